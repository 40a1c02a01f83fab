"""Speed of the CPU casts against memcpy of the same bytes in the same run (target: at least 25%).

A cast of bf16 reads 2 bytes an element and writes the payload and scales; memcpy is timed over a buffer that moves as
many bytes (half read, half written), by as many threads. Amax passes that a format needs are part of its cast. On a machine
that others use too, --cpu-time counts processor time (of all threads, divided by their number) instead of the clock.

    python scripts/bench_cpu_casts.py [--rows 4096] [--cols 8192] [--threads 2] [--isa avx2] [--only nvfp4] [--cpu-time]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from megatron_hybrid import kernels
from megatron_hybrid.formats import DIRECTIONS, ROWWISE, parse_format

FORMATS = (
    "fp8_current_e4m3",
    "fp8_delayed_e4m3",
    "fp8_rowwise_e4m3",
    "fp8_block_e4m3",
    "fp8_block_e4m3:2d",
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "mxfp8_e4m3:2d",
    "nvfp4",
    "nvfp4:2d",
    "nvfp4:row_scaled",
    "nvfp4:rht",
    "nvfp4:sr",
    "nvfp4:rht,sr",
)


class Timer:
    def __init__(self, repeats: int, cpu_time: bool):
        self.repeats = repeats
        self.clock = (lambda: time.process_time() / torch.get_num_threads()) if cpu_time else time.perf_counter

    def seconds(self, call) -> float:
        """Median time of a call, after one to warm up."""
        call()
        times = []
        for _ in range(self.repeats):
            start = self.clock()
            call()
            times.append(self.clock() - start)
        return statistics.median(times)

    def memcpy_seconds(self, num_bytes: int) -> float:
        """Time of a copy that moves ``num_bytes`` in all: half read, half written."""
        src = torch.zeros(num_bytes // 2, dtype=torch.uint8).fill_(1)
        dst = torch.zeros_like(src)
        return self.seconds(lambda: dst.copy_(src))


class Cast:
    """One cast with its buffers, and its decode."""

    def __init__(self, x, name: str, direction: str, transposed: bool):
        fmt = parse_format(name)
        M, K = x.shape
        self.x, self.fmt, self.direction, self.transposed = x, fmt, direction, transposed
        outer, inner = (K, M) if transposed else (M, K)
        self.qdata = torch.zeros(outer, -(-inner * fmt.bits // 8), dtype=torch.uint8)
        dtype = torch.float32 if fmt.scale == "fp32" else torch.uint8
        self.scale = torch.zeros(fmt.scale_shape(M, K, direction), dtype=dtype)
        shape = fmt.amax_shape(M, K, direction)
        self.amax = None if shape is None else torch.ones(shape)
        self.rng = torch.tensor([1, 2, 3, 0, 0, K]) if fmt.sr else None
        self.out = torch.zeros_like(x)
        self.bytes = x.numel() * x.element_size() + self.qdata.numel() + self.scale.numel() * self.scale.element_size()

    def quantize(self):
        if self.amax is not None and not self.fmt.is_stateful:
            kernels.amax(self.x, self.fmt, self.direction, self.amax)
        kernels.quantize(self.x, self.fmt, self.direction, qdata=self.qdata, scale=self.scale, amax=self.amax,
                         transposed=self.transposed, fixed_scale=self.fmt.is_stateful, rng=self.rng)  # fmt: skip

    def dequantize(self):
        M, K = self.x.shape
        kernels.dequantize(self.qdata, self.scale, self.amax, self.fmt, self.direction, M, K,
                           transposed=self.transposed, out=self.out)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--isa", help="instruction set to use instead of the widest")
    parser.add_argument("--cpu-time", action="store_true", help="processor time instead of the clock")
    parser.add_argument("--only", default="", help="formats that contain this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    timer = Timer(args.repeats, args.cpu_time)
    extension = kernels.extension("cpu")
    if args.isa:
        extension.set_isa(args.isa)
    x = torch.randn(args.rows, args.cols).to(torch.bfloat16)
    print(f"{args.rows} x {args.cols} bf16, {args.threads} threads, {extension.isa()}, torch {torch.__version__}")
    print(f"{'format':20} {'direction':10} {'payload':10} {'cast':>12} {'of memcpy':>10} {'decode':>12} {'of memcpy':>10}")
    worst = (2.0, "")
    for name in FORMATS:
        if args.only not in name:
            continue
        for direction in DIRECTIONS:
            for transposed in (False, True):
                cast = Cast(x, name, direction, transposed)
                copy = timer.memcpy_seconds(cast.bytes)
                forth, back = timer.seconds(cast.quantize), timer.seconds(cast.dequantize)
                layout = "transposed" if transposed else "row-major"
                print(f"{name:20} {direction:10} {layout:10} {cast.bytes / forth / 1e9:7.1f} GB/s {copy / forth:10.0%} "
                      f"{cast.bytes / back / 1e9:7.1f} GB/s {copy / back:10.0%}", flush=True)  # fmt: skip
                # the layouts in use: rows as they are, columns as the GEMM reads them
                if transposed == (direction != ROWWISE):
                    worst = min(worst, (copy / forth, f"{name} {direction} {layout}"))
    print(f"slowest cast in its usual layout: {worst[0]:.0%} of memcpy ({worst[1]})")


if __name__ == "__main__":
    main()
