"""The casts of a layer of experts, against the time their bytes alone take: tokens through the map of their copies, rows
and columns of all groups together, SwiGLU's result and gradient cast as they are computed.

    python scripts/bench_group_casts.py [--tokens 16384 --experts 32 --top 8 --hidden 2048 --ffn 768] [--json OUT]

Uneven groups; all casts take turns in every round on inputs larger than the L2. The bytes: every input read once for
the cast and once for amaxes where scales need these before, every payload written once, at the copy bandwidth measured
in the same run. Computed casts stand beside SwiGLU's kernel and a cast, whose payloads must be the same. Without a GPU
it runs nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import bench_cast
import torch
from bench_common import interleaved_us, write_result

from megatron_hybrid import kernels
from megatron_hybrid.explain import Table
from megatron_hybrid.formats import parse_format
from megatron_hybrid.grouped_columns import GroupCast
from megatron_hybrid.groups import Groups
from megatron_hybrid.ops_triton import swiglu
from megatron_hybrid.permutation import RowMap

SETS = 2  # of inputs, in turn
FORMATS = ["fp8_block_e4m3", "fp8_rowwise_e4m3"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"tokens": 16384, "experts": 32, "top": 8, "hidden": 2048, "ffn": 768, "repeat": 20}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="(default %(default)s)")
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="by rows and by columns (default: %(default)s)")
    parser.add_argument("--json", help="write rows, card, versions and commit here")
    parser.add_argument("--commit", help="what to record as the commit where there is no git checkout")
    return parser.parse_args()


@dataclass(frozen=True)
class Task:
    """A cast. run(i) -> (rowwise payload or None, columnwise payload); apart: the same by kernels apart, or None.

    read: bytes of its inputs.
    """

    name: str
    read: int
    run: Callable
    apart: Callable | None = None


class Layer:
    """Inputs of a layer's casts, and where its groups are."""

    def __init__(self, args):
        rows, g = args.tokens * args.top, torch.Generator("cuda").manual_seed(0)

        def random(*shape):
            return [torch.randn(*shape, generator=g, device="cuda").bfloat16() for _ in range(SETS)]

        likes = torch.rand(args.experts, generator=g, device="cuda") + 0.5  # how much experts are liked
        scores = torch.rand(args.tokens, args.experts, generator=g, device="cuda").log() / likes
        routed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(args.top, 1).indices, True)
        self.copies = RowMap.of(routed, rows)
        self.layout = Groups(routed.sum(0), args.experts, rows, torch.device("cuda")).layout(128)
        self.tokens = random(args.tokens, args.hidden)
        self.x, self.dy = random(rows, 2 * args.ffn), random(rows, args.ffn)
        self.probs = torch.rand(args.tokens, args.experts, generator=g, device="cuda")
        self.dots = torch.zeros(rows, -(-args.ffn // 128), device="cuda")

    def weights(self, dots=None) -> tuple:
        return kernels.weights_of(self.probs, self.copies.choice, dots)

    def product(self, i: int) -> torch.Tensor:
        return swiglu.weighted_product(self.x[i % SETS], self.probs, self.copies)

    def gradient(self, i: int) -> torch.Tensor:
        return swiglu.weighted_gradient(self.dy[i % SETS], self.x[i % SETS], self.probs, self.copies)[0]

    def tasks(self, fmt) -> list[Task]:
        columns, both, layout = GroupCast(None, fmt), GroupCast(fmt, fmt), self.layout
        product = [self.product(i) for i in range(SETS)]
        halves = [x.chunk(2, dim=1) for x in self.x]

        def cast_product(i):
            gate, up = halves[i % SETS]
            return both(up, layout, gate=gate, weights=self.weights())

        def cast_gradient(i):
            return both(self.x[i % SETS], layout, grad=self.dy[i % SETS], weights=self.weights(self.dots))

        def columns_of_tokens(i):
            return columns(self.tokens[i % SETS], layout, self.copies)

        def cast_tokens(i):
            return both(self.tokens[i % SETS], layout, self.copies)

        of_x, of_dy = self.x[0].nbytes, self.dy[0].nbytes
        return [
            Task("columns of tokens", self.tokens[0].nbytes, columns_of_tokens),
            Task("rows and columns of tokens", self.tokens[0].nbytes, cast_tokens),
            Task("SwiGLU's result", of_dy, lambda i: both(product[i % SETS], layout)),
            Task("its gradient", of_x, lambda i: both(self.x[i % SETS], layout)),
            Task("SwiGLU and cast", of_x, cast_product, lambda i: both(self.product(i), layout)),
            Task("its gradient and cast", of_x + of_dy, cast_gradient, lambda i: both(self.gradient(i), layout)),
        ]


def bytes_of(payloads) -> int:
    return sum(p.qdata.nbytes + p.scale.nbytes for p in payloads if p is not None)


def differing(found, expected, layout) -> int:
    """Codes of all rows that are there, and scales of blocks that are or of whole columns, that are not the same."""
    ends, off = int(layout.ends[-1]), 0
    for a, b in zip(found, expected, strict=True):
        columns = a.direction == "columnwise"
        codes = slice(0, ends) if columns else slice(None)
        scales = slice(0, ends // 128) if columns and a.scale.shape[0] == layout.rows // 128 else slice(None)
        off += int((a.qdata[:, codes] != b.qdata[:, codes]).sum()) + int((a.scale[scales] != b.scale[scales]).sum())
    return off


def main() -> int:
    args = parse_args()
    if not torch.cuda.is_available():
        print("no GPU here")
        return 0
    layer, rows = Layer(args), []
    bandwidth = bench_cast.copy_bandwidth(layer.x, args.repeat) * 1e6  # bytes a us
    for fmt in map(parse_format, args.formats):
        reads = 2 if fmt.outer_axis == "row" else 1
        tasks = layer.tasks(fmt)
        ways = {(task.name, "us"): task.run for task in tasks}
        ways |= {(task.name, "apart"): task.apart for task in tasks if task.apart}
        times = interleaved_us(ways, args.repeat)
        for task in tasks:
            made = task.run(0)
            floor = (task.read * reads + bytes_of(made)) / bandwidth
            off = differing(made, task.apart(0), layer.layout) if task.apart else 0
            took = {"us": times[task.name, "us"], "bytes_us": floor, "apart_us": times.get((task.name, "apart"))}
            rows.append({"format": str(fmt), "cast": task.name, **took, "off": off})
    heads = ("format", "cast", "us", "of the bytes alone", "apart us", "differing bytes")
    print(f"copy: {bandwidth / 1e6:.2f} TB/s")
    print(Table(heads, tuple(
        (r["format"], r["cast"], f"{r['us']:.0f}", f"{r['us'] / r['bytes_us']:.2f}x",
         "" if r["apart_us"] is None else f"{r['apart_us']:.0f}", str(r["off"])) for r in rows
    )))  # fmt: skip
    write_result(args.json, rows, bandwidth=bandwidth, commit=args.commit)
    return int(any(r["off"] for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
