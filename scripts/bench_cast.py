"""Casts on a GPU: time, bandwidth and share of the copy bandwidth measured in the same run (goals P1-P4).

    python scripts/bench_cast.py [--rows 16384 --cols 8192] [--json OUT] [--only mxfp8] [--any-strips]

Every row rotates among inputs larger than the L2. Results at full size, in memory that was poisoned before, are compared
with the CPU kernels' byte for byte (`--no-check` leaves that out). `--any-strips`: casts to NVFP4 once more by strips
wherever these can, also where csrc/cuda chooses another kernel.
"""

from __future__ import annotations

import argparse

import torch
from bench_common import write_result

import megatron_hybrid as mh
from megatron_hybrid import kernels
from megatron_hybrid.explain import Table
from megatron_hybrid.formats import COLUMNWISE, ROWWISE
from megatron_hybrid.lean import OperandCast
from megatron_hybrid.ops_triton.swiglu import gradient, swiglu
from megatron_hybrid.testing.strips import any_strips

DERIVED = "rowwise_dequantized"
CASES = [  # (goal, rowwise, columnwise, source)
    ("P1", "fp8_block_e4m3", "fp8_block_e4m3", "original"),
    ("P1", "fp8_block_e4m3:2d", "fp8_block_e4m3:2d", "original"),
    ("P1", "mxfp8_e4m3", "mxfp8_e4m3", "original"),
    ("P1", "mxfp8_e4m3", "fp8_block_e4m3", "original"),
    ("P1", "fp8_block_e4m3", "mxfp8_e4m3", "original"),
    ("P1", "mxfp8_e4m3", "nvfp4", "original"),
    ("P1", "nvfp4:row_scaled", "mxfp8_e4m3", "original"),
    ("P1", "nvfp4:row_scaled", "mxfp8_e4m3", DERIVED),
    ("P1", "mxfp8_e4m3", "fp8_block_e4m3", DERIVED),
    ("P1", "nvfp4", "nvfp4", "original"),
    ("P1", "fp8_block_e4m3", "nvfp4", "original"),
    ("P1", "fp8_current_e4m3", "nvfp4", "original"),
    ("P1", "nvfp4:2d", "nvfp4:2d", "original"),
    ("P1", "nvfp4", None, "original"),
    ("P1", None, "nvfp4", "original"),
    ("P1", "nvfp4:row_scaled", None, "original"),
    ("P1", "mxfp8_e4m3", None, "original"),
    ("P1", None, "mxfp8_e4m3", "original"),
    ("P1", "fp8_block_e4m3", None, "original"),
    ("P1", None, "fp8_block_e4m3", "original"),
    ("P1", "fp8_block_e4m3:2d", None, "original"),
    ("P1", None, "fp8_block_e4m3:2d", "original"),
    ("P2", "fp8_delayed_e4m3", "fp8_delayed_e4m3", "original"),
    ("P2", "fp8_delayed_e4m3", "fp8_block_e4m3", "original"),
    ("P2", "fp8_delayed_e4m3", None, "original"),
    ("P2", "fp8_current_e4m3", "fp8_current_e4m3", "original"),
    ("P2", "fp8_current_e4m3", "fp8_block_e4m3", "original"),
    ("P2", "fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "original"),
    ("P2", "fp8_rowwise_e4m3", None, "original"),
    ("P2", None, "fp8_rowwise_e4m3", "original"),
    ("P2", "fp8_block_e4m3", "fp8_rowwise_e4m3", "original"),
    ("P2", None, "fp8_delayed_e4m3", "original"),
    ("P3", "mxfp8_e4m3", "nvfp4:rht,sr", "original"),
    ("P3", "fp8_current_e4m3", "nvfp4:rht,sr", "original"),
    ("P3", "fp8_block_e4m3", "nvfp4:rht,sr", "original"),
    ("P3", "mxfp8_e4m3", "nvfp4:rht", "original"),
    ("P3", None, "nvfp4:rht,sr", "original"),
    ("P3", "nvfp4", "nvfp4:rht,sr", "original"),
]
DECODED = [  # (rowwise, columnwise)
    ("fp8_current_e4m3", None), ("fp8_block_e4m3", None), ("mxfp8_e4m3", None), ("nvfp4", None),
    ("nvfp4:row_scaled", None), (None, "mxfp8_e4m3"), (None, "nvfp4:rht"),
]  # fmt: skip
FUSED = ["fp8_delayed_e4m3", "fp8_block_e4m3", "mxfp8_e4m3"]
AMAXES = ["fp8_current_e4m3", "fp8_rowwise_e4m3", "nvfp4:rht"]


def median_us(run, inputs, repeat: int) -> float:
    """Median device time of `run(x)` over rotating inputs."""
    for x in inputs:
        run(x)
    times = []
    for i in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(inputs[i % len(inputs)])
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return sorted(s.elapsed_time(e) for s, e in times)[repeat // 2] * 1e3


def copy_bandwidth(inputs, repeat: int) -> float:
    out = torch.empty_like(inputs[0])
    return 2 * out.nbytes / median_us(out.copy_, inputs, repeat) / 1e6  # TB/s


def needed_bytes(x, quantizer, payloads) -> int:
    """Input read once (twice where a tensor or column amax must be known first), outputs written once."""
    amax_first = any(
        f is not None and f.outer_axis != "none" and not f.is_stateful and not (f.outer_axis == "row" and d == ROWWISE)
        for f, d in zip(quantizer.formats(), (ROWWISE, COLUMNWISE))
    )
    return x.nbytes * (2 if amax_first else 1) + sum(p.nbytes for p in payloads if p is not None)


def cast_states(name: str):
    """(rowwise, columnwise) state of a pair of one format."""
    return mh.HybridQuantizer(name, name).new_state("cuda")


def caster(quantizer, device):
    state = quantizer.new_state(device)
    rng = mh.Rng(1, 2, 3, 0, device=device) if any(f and f.sr for f in quantizer.formats()) else None
    return lambda x: quantizer.cast(x, state=state, rng=rng, transposed=True)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().reshape(-1).view(torch.uint8), b.cpu().reshape(-1).view(torch.uint8))


def check(quantizer, x) -> bool:
    """The CUDA bytes are the CPU's; what CUDA allocates is filled with something else first."""
    torch.use_deterministic_algorithms(True)  # fills new memory
    try:
        gpu = caster(quantizer, "cuda")(x)
    finally:
        torch.use_deterministic_algorithms(False)
    cpu = caster(quantizer, "cpu")(x.cpu())
    pairs = [(s, t) for s, t in zip(gpu, cpu) if s is not None]
    return all(same_bytes(b, c) for s, t in pairs for b, c in zip(s.buffers().values(), t.buffers().values()))


class Bench:
    def __init__(self, args):
        self.args, self.rows = args, []
        g = torch.Generator("cuda").manual_seed(0)
        self.inputs = [torch.randn(args.rows, args.cols, device="cuda", generator=g).bfloat16() for _ in range(3)]
        self.copy = copy_bandwidth(self.inputs, args.repeat)
        copied = 2 * self.inputs[0].nbytes
        self.rows.append({"goal": "-", "what": "copy", "us": copied / self.copy / 1e6, "TB/s": self.copy, "share": 1.0})

    def wants(self, what: str) -> bool:
        return not self.args.only or any(part in what for part in self.args.only)

    def add(self, goal, what, run, inputs, nbytes, equal):
        if not self.wants(what):
            return
        if self.args.once:
            return run(inputs[0])
        us = median_us(run, inputs, self.args.repeat)
        same = equal() if self.args.check else None
        self.rows.append({"goal": goal, "what": what, "us": us, "TB/s": nbytes / us / 1e6,
                          "share": nbytes / us / 1e6 / self.copy, "bytes_equal": same})  # fmt: skip

    def casts(self):
        x = self.inputs[0]
        for goal, row, col, source in CASES:
            q = mh.HybridQuantizer(row, col, source)
            what = f"{row or '-'} | {col or '-'}" + (" (derived)" if q.derives_columnwise else "")
            if self.wants(what):
                run = caster(q, "cuda")
                nbytes = 0 if self.args.once else needed_bytes(x, q, run(x))
                self.add(goal, what, run, self.inputs, nbytes, lambda q=q: check(q, x))
                if self.args.any_strips and not q.derives_columnwise and "nvfp4" in what:
                    with any_strips():
                        self.add(goal, f"{what}, by strips", run, self.inputs, nbytes, lambda q=q: check(q, x))

    def fused(self):
        """What a cast takes along: sums of columns, SwiGLU of (M, 2F) and its gradient, each beside the same in kernels of
        their own."""
        x = self.inputs[0]
        dy = self.inputs[1][:, : x.shape[1] // 2].contiguous()
        for name in FUSED:
            cast = OperandCast(mh.HybridQuantizer(name, name), True, "cuda")
            states = cast_states(name)
            payload = sum(p.nbytes for p in cast(x, True, True, states))

            def with_sums(x, cast=cast, states=states):
                parts = kernels.sum_parts(x)
                cast(x, True, True, states, sums=parts)
                return parts.sum(dim=0).to(x.dtype)

            def after_sum(x, cast=cast, states=states):
                cast(x, True, True, states)
                return x.sum(dim=0)

            def gated(x, cast=cast, states=states):
                gate, up = x.chunk(2, dim=1)
                return cast(up, True, True, states, gate=gate)

            def after_swiglu(x, cast=cast, states=states):
                return cast(swiglu(x), True, True, states)

            def equal(gated=gated, after_swiglu=after_swiglu):
                return all(same_bytes(a.qdata, b.qdata) for a, b in zip(gated(x), after_swiglu(x)))

            def back(x, cast=cast, states=states):
                return cast(x, True, True, states, grad=dy)

            def after_back(x, cast=cast, states=states):
                return cast(gradient(dy, x), True, True, states)

            def equal_back(back=back, after_back=after_back):
                return all(same_bytes(a.qdata, b.qdata) for a, b in zip(back(x), after_back(x)))

            half, three = x.nbytes + payload // 2, x.nbytes + dy.nbytes + payload
            self.add("-", f"swiglu's gradient in {name} | {name}", back, self.inputs, three, equal_back)
            self.add("-", f"swiglu's gradient before {name} | {name}", after_back, self.inputs, three, lambda: None)
            self.add("-", f"sums with {name} | {name}", with_sums, self.inputs, x.nbytes + payload, lambda: None)
            self.add("-", f"torch's sum after {name} | {name}", after_sum, self.inputs, x.nbytes + payload, lambda: None)
            self.add("-", f"swiglu in {name} | {name}", gated, self.inputs, half, equal)
            self.add("-", f"swiglu before {name} | {name}", after_swiglu, self.inputs, half, lambda: None)

    def decodes(self):
        out = torch.empty(self.inputs[0].shape, dtype=torch.bfloat16, device="cuda")
        for row, col in DECODED:
            what = f"decode {row or '-'} | {col or '-'}"
            if self.wants(what):
                q, side = mh.HybridQuantizer(row, col), 0 if row else 1
                stores = [caster(q, "cuda")(x)[side] for x in self.inputs]

                def equal(q=q, side=side, s=stores[0]):
                    expected = caster(q, "cpu")(self.inputs[0].cpu())[side].dequantize(torch.bfloat16)
                    return same_bytes(s.decode(out.fill_(float("nan"))), expected)

                def equal_operand(q=q, side=side, s=stores[0]):
                    expected = caster(q, "cpu")(self.inputs[0].cpu())[side].operand(torch.bfloat16, outer=False)
                    return same_bytes(s.operand(torch.bfloat16, outer=False), expected)

                nbytes = stores[0].nbytes + out.nbytes
                self.add("P4", what, lambda s: s.decode(out), stores, nbytes, equal)
                self.add("P4", f"{what}, as a GEMM reads it", lambda s: s.operand(torch.bfloat16, outer=False), stores, nbytes,
                         equal_operand)  # fmt: skip

    def amaxes(self):
        x = self.inputs[0]
        for name in AMAXES:
            q = mh.HybridQuantizer(None, name)

            def equal(q=q):
                return same_bytes(q.amax(x)[1], q.amax(x.cpu())[1])

            self.add("-", f"amax {name}", q.amax, self.inputs, x.nbytes, equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--only", nargs="*", help="rows whose name contains one of these")
    parser.add_argument("--once", action="store_true", help="run every row once and measure nothing: for profilers")
    parser.add_argument("--no-check", dest="check", action="store_false")
    parser.add_argument("--any-strips", action="store_true", help="casts to NVFP4 once more by strips")
    parser.add_argument("--json", help="write the rows, card, versions and commit here")
    parser.add_argument("--commit", help="what to call the source in the JSON where it is no git repository")
    args = parser.parse_args()
    bench = Bench(args)
    bench.casts()
    bench.fused()
    bench.decodes()
    bench.amaxes()
    torch.cuda.synchronize()
    cells = [
        (r["goal"], r["what"], f"{r['us']:.0f}", f"{r['TB/s']:.2f}", f"{r['share']:.0%}",
         {True: "equal", False: "DIFFER", None: ""}[r.get("bytes_equal")])
        for r in bench.rows
    ]  # fmt: skip
    notes = (f"{torch.cuda.get_device_name()}, torch {torch.__version__}",)
    print(Table(("goal", "what", "us", "TB/s", "share", "bytes"), tuple(cells), notes))
    write_result(args.json, bench.rows, rows=args.rows, cols=args.cols, repeat=args.repeat, commit=args.commit)


if __name__ == "__main__":
    main()
