"""Casts on a GPU: time, bandwidth and share of the copy bandwidth measured in the same run (goals P1-P4).

    python scripts/bench_casts.py [--rows 16384 --cols 8192] [--json OUT]

Every row rotates among inputs larger than the L2, poisons nothing it does not then check, and compares its bytes with
the CPU kernels' on the first and last rows' blocks of a smaller tensor.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess

import torch

import megatron_hybrid as mh
from megatron_hybrid.explain import Table
from megatron_hybrid.formats import COLUMNWISE, ROWWISE

CASES = [  # (goal, rowwise, columnwise, source)
    ("P1", "fp8_block_e4m3", "fp8_block_e4m3", "original"),
    ("P1", "fp8_block_e4m3:2d", "fp8_block_e4m3:2d", "original"),
    ("P1", "mxfp8_e4m3", "mxfp8_e4m3", "original"),
    ("P1", "mxfp8_e4m3", "fp8_block_e4m3", "original"),
    ("P1", "mxfp8_e4m3", "nvfp4", "original"),
    ("P1", "nvfp4:row_scaled", "mxfp8_e4m3", "original"),
    ("P1", "nvfp4:row_scaled", "mxfp8_e4m3", "rowwise_dequantized"),
    ("P1", "nvfp4", "nvfp4", "original"),
    ("P1", "mxfp8_e4m3", None, "original"),
    ("P1", None, "mxfp8_e4m3", "original"),
    ("P2", "fp8_delayed_e4m3", "fp8_delayed_e4m3", "original"),
    ("P2", "fp8_current_e4m3", "fp8_current_e4m3", "original"),
    ("P2", "fp8_current_e4m3", "fp8_block_e4m3", "original"),
    ("P2", "fp8_rowwise_e4m3", "fp8_rowwise_e4m3", "original"),
    ("P3", "mxfp8_e4m3", "nvfp4:rht,sr", "original"),
    ("P3", "fp8_current_e4m3", "nvfp4:rht,sr", "original"),
]
DECODED = ["fp8_current_e4m3", "fp8_block_e4m3", "mxfp8_e4m3", "nvfp4", "nvfp4:row_scaled"]


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
    """Input read once (twice where a tensor or row amax must be known first), outputs written once."""
    amax_first = any(
        f is not None and f.outer_axis != "none" and not f.is_stateful and not (f.outer_axis == "row" and d == ROWWISE)
        for f, d in zip(quantizer.formats(), (ROWWISE, COLUMNWISE))
    )
    return x.nbytes * (2 if amax_first else 1) + sum(p.nbytes for p in payloads if p is not None)


def caster(quantizer, device):
    state = quantizer.new_state(device)
    rng = mh.Rng(1, 2, 3, 0, device=device) if any(f and f.sr for f in quantizer.formats()) else None
    return lambda x: quantizer.cast(x, state=state, rng=rng, transposed=True)


def check(quantizer) -> bool:
    """The CUDA bytes are the CPU's."""
    x = torch.randn(300, 416, generator=torch.Generator().manual_seed(0)).bfloat16()
    cpu, gpu = caster(quantizer, "cpu")(x), caster(quantizer, "cuda")(x.cuda())
    return all(
        torch.equal(b.cpu().reshape(-1).view(torch.uint8), c.reshape(-1).view(torch.uint8))
        for s, t in zip(gpu, cpu) if s is not None
        for b, c in zip(s.buffers().values(), t.buffers().values())
    )  # fmt: skip


def bench(args) -> list[dict]:
    g = torch.Generator("cuda").manual_seed(0)
    inputs = [torch.randn(args.rows, args.cols, device="cuda", generator=g).bfloat16() for _ in range(3)]
    copy = copy_bandwidth(inputs, args.repeat)
    rows = [{"goal": "-", "what": "copy", "TB/s": copy, "share": 1.0, "us": 2 * inputs[0].nbytes / copy / 1e6}]
    for goal, row, col, source in CASES:
        q = mh.HybridQuantizer(row, col, source)
        run = caster(q, "cuda")
        nbytes = needed_bytes(inputs[0], q, run(inputs[0]))
        us = median_us(run, inputs, args.repeat)
        what = f"{row or '-'} | {col or '-'}" + (" (derived)" if q.derives_columnwise else "")
        rate = nbytes / us / 1e6
        rows.append({"goal": goal, "what": what, "us": us, "TB/s": rate, "share": rate / copy, "bytes_equal": check(q)})
    for name in DECODED:
        q = mh.HybridQuantizer(name, None)
        stores = [q.cast(x, columnwise=False)[0] for x in inputs]
        out = torch.empty(inputs[0].shape, dtype=torch.bfloat16, device="cuda")
        us = median_us(lambda s: s.decode(out), stores, args.repeat)
        rate = (stores[0].nbytes + out.nbytes) / us / 1e6
        same = torch.equal(out.cpu(), stores[(args.repeat - 1) % 3].dequantize(torch.bfloat16).cpu())
        rows.append({"goal": "P4", "what": f"decode {name}", "us": us, "TB/s": rate, "share": rate / copy, "bytes_equal": same})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", help="write the rows, card, versions and commit here")
    args = parser.parse_args()
    rows = bench(args)
    header = ("goal", "what", "us", "TB/s", "share", "bytes")
    cells = [
        (r["goal"], r["what"], f"{r['us']:.0f}", f"{r['TB/s']:.2f}", f"{r['share']:.0%}",
         {True: "equal", False: "DIFFER", None: ""}[r.get("bytes_equal")])
        for r in rows
    ]  # fmt: skip
    print(Table(header, tuple(cells), (f"{torch.cuda.get_device_name()}, torch {torch.__version__}",)))
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        meta = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
                "date": datetime.date.today().isoformat(), "commit": commit, "command": "scripts/bench_casts.py",
                "rows": args.rows, "cols": args.cols}  # fmt: skip
        with open(args.json, "w") as f:
            json.dump({**meta, "results": rows}, f, indent=1)


if __name__ == "__main__":
    main()
