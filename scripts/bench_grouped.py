"""Grouped linear, forward and backward, against `torch._grouped_mm` in bf16 (goal P8), and its host time (P9).

    python scripts/bench_grouped.py [--experts 128 --k 2048 --n 1536 --tokens 32768] [--recipe fp8_rowwise ...] [--json OUT]

Uneven groups, some of them empty, whose sizes only the device knows. Weights quantized before (their cache is kept) and
not (cast in every step). All subjects take turns in every round on inputs larger than the L2. Checked: no wait for the
device, and results against the loop over experts. Without a GPU it runs on the CPU, for trying the script: give small
sizes.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass

import torch
from bench_common import kernel_shares, write_result

import megatron_hybrid as mh
from megatron_hybrid.explain import Table

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
EMULATED = ["mxfp8", "nvfp4_rowscaled_fprop_mxfp8_bwd"]
RECIPES = ["bf16", "fp8_rowwise", "fp8_block", *EMULATED, *(f"{name}@decoding" for name in EMULATED if ON_GPU)]
GOAL = {"fp8_rowwise": 1.05, "fp8_block": 1.05}  # times as fast as torch, weights quantized before
DATA_SETS = 3
U = 2.0**-8  # bf16's unit roundoff
_SPIN = 20_000_000  # clock cycles, about 11 ms: the host runs ahead of the device


@dataclass
class Subject:
    """One way to run the linear. run(x, dy) -> (y, dx, dw). whole: makes tensors of what run gives, where it is not."""

    name: str
    run: object
    how: str = ""
    whole: object = tuple


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in {"experts": 128, "k": 2048, "n": 1536, "tokens": 32768, "repeat": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="(default %(default)s)")
    parser.add_argument(
        "--recipe", nargs="+", default=RECIPES, help="names or paths, @backend behind (default: %(default)s)"
    )  # fmt: skip
    parser.add_argument("--gemms", action="store_true", help="grouped GEMMs alone: the library's and our own")
    parser.add_argument(
        "--dense", nargs=3, type=int, default=[8192, 4096, 14336], metavar=("M", "K", "N"),
        help="of --gemms: of the dense products among them (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="device time of one step by kind of kernel")
    parser.add_argument("--json", help="write rows, card, versions and commit here")
    parser.add_argument("--commit", help="what to record as the commit where there is no git checkout")
    return parser.parse_args()


def splits_of(tokens: int, experts: int) -> list[int]:
    """Uneven groups, every eighth empty."""
    weights = torch.rand(experts, generator=torch.Generator().manual_seed(0)) + 0.1
    weights[3::8] = 0
    sizes = (weights / weights.sum() * tokens).long()
    sizes[0] += tokens - sizes.sum()
    return sizes.tolist()


def torch_subject(weight: torch.Tensor, ends: torch.Tensor) -> Subject:
    w = weight.detach().clone().requires_grad_()

    def run(x, dy):
        w.grad = None
        x = x.detach().requires_grad_()
        y = torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
        y.backward(dy)
        return y.detach(), x.grad, w.grad

    return Subject("torch bf16", run)


def our_subject(args, recipe: str, weight, sizes, *, cached: bool, one_by_one=False) -> Subject:
    """recipe: a name or path, maybe with the backend that is forced behind it: ``mxfp8@decoding``."""
    path, _, backend = recipe.partition("@")
    module = mh.HybridGroupedLinear(
        args.experts, args.k, args.n, recipe=path, name="decoder.layers.0.mlp.experts.linear_fc1",
        layer=1, num_layers=4, backend=backend or None, device=DEVICE, dtype=torch.bfloat16,
    )  # fmt: skip
    module.weight.data.copy_(weight)
    module.hq.one_by_one = one_by_one
    controller = mh.prepare(module, num_microbatches=1)
    controller.begin_step(1)

    def run(x, dy):
        module.weight.grad = None
        if not cached:
            controller.invalidate()
        x = x.detach().requires_grad_()
        y = module(x, sizes)
        y.backward(dy)
        return y.detach(), x.grad, module.weight.grad

    return Subject(f"{recipe}{'' if cached else ', weight cast inside'}", run, str(module.how))


def run_ahead() -> None:
    """Keep the device busy for a while: the host gets ahead of it."""
    if ON_GPU:
        torch.cuda._sleep(_SPIN)


def timed(subjects: list[Subject], data, rounds: int, ready=run_ahead) -> dict[str, tuple[list[float], list[float]]]:
    """(device us, host us) of each round, all in turn. ready: called before a subject's time begins."""
    found = {s.name: ([], []) for s in subjects}
    for r in range(rounds):
        turn = r % len(subjects)
        for subject in subjects[turn:] + subjects[:turn]:
            device, host = found[subject.name]
            if ON_GPU:
                torch.cuda.synchronize()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            ready()
            if ON_GPU:
                start.record()
            began = time.perf_counter()
            subject.run(*data[r % len(data)])
            host.append((time.perf_counter() - began) * 1e6)
            if ON_GPU:
                end.record()
                torch.cuda.synchronize()
                device.append(start.elapsed_time(end) * 1e3)
            else:
                device.append(host[-1])
    return found


def waits(subject: Subject, data) -> bool:
    """Whether it waits for the device."""
    if not ON_GPU:
        return False
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        subject.run(*data[0])
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def worst(found, expected) -> float:
    """The largest difference in units of what two roundings to bf16 and sums in another order may make."""
    ratios = []
    for f, e in zip(found, expected):
        e = e.float()
        ratios.append(float(((f.float() - e).abs() / (3 * U * e.abs() + 1e-4 * e.abs().max() + 1e-30)).max()))
    return max(ratios)


def profile(subject: Subject, data) -> dict[str, float]:
    subject.run(*data[0])
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        subject.run(*data[0])
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels, longest = [(e.name, e.time_range.elapsed_us()) for e in events], Counter()
    for name, us in kernels:
        longest[name[:120]] += us
    return {"kinds": kernel_shares(kernels), "longest": longest.most_common(14)}


def bench(args) -> list[dict]:
    splits = splits_of(args.tokens, args.experts)
    sizes = torch.tensor(splits, dtype=torch.int32, device=DEVICE)
    ends = sizes.cumsum(0).to(torch.int32)
    g = torch.Generator().manual_seed(1)
    weight = (torch.randn(args.experts, args.n, args.k, generator=g) * args.k**-0.5).bfloat16().to(DEVICE)
    data = [
        (torch.randn(args.tokens, args.k, generator=g).bfloat16().to(DEVICE),
         torch.randn(args.tokens, args.n, generator=g).bfloat16().to(DEVICE))
        for _ in range(DATA_SETS)
    ]  # fmt: skip
    subjects, rows = [torch_subject(weight, ends)], []
    for recipe in args.recipe:
        subjects += [our_subject(args, recipe, weight, sizes, cached=cached) for cached in ((True, False))]
    for subject in subjects:
        row = {"what": subject.name, "how": subject.how}
        recipe = subject.name.removesuffix(", weight cast inside")
        if recipe in args.recipe:
            loop = our_subject(args, recipe.partition("@")[0], weight, splits, cached=True, one_by_one=True)
            row["worst"] = worst(subject.run(*data[0]), loop.run(*data[0]))
            del loop
        row["waits"] = waits(subject, data)
        rows.append(row)
    timed(subjects, data, 2)
    for row, (device, host) in zip(rows, timed(subjects, data, args.repeat).values()):
        row |= {"us": sorted(device)[len(device) // 2], "least": min(device), "host_us": sorted(host)[len(host) // 2]}
    for row, subject in zip(rows, subjects):
        row["speedup"] = rows[0]["us"] / row["us"]
        row["goal"] = GOAL.get(row["what"])
        if args.profile and ON_GPU:
            row["profile"] = profile(subject, data)
    return rows


def own_gemms(args) -> list[Subject]:
    """Our FP8 GEMMs over uneven groups, in CUDA where they are built, and in Triton: by what scales cover."""
    from megatron_hybrid.gemm import grouped_cuda
    from megatron_hybrid.ops_triton import grouped_gemm

    E, T, K, N = args.experts, args.tokens, args.k, args.n
    blocks = grouped_gemm.block_map(
        torch.tensor(splits_of(T, E), dtype=torch.int32, device=DEVICE), -(-T // grouped_gemm.BLOCK) + E
    )
    R = blocks.count * grouped_gemm.BLOCK  # of the contraction in wgrad

    def codes(*shape):
        return torch.randn(*shape, device=DEVICE).to(torch.float8_e4m3fn)

    def scales(*shape):
        return torch.rand(*shape, device=DEVICE) + 0.5

    operands = {
        "fprop": (codes(T, K), codes(E * N, K)), "dgrad": (codes(T, N), codes(E * K, N)), "wgrad": (codes(N, R), codes(K, R)),
    }  # fmt: skip
    shapes = {"fprop": (T, N), "dgrad": (T, K), "wgrad": (E, N, K)}
    outs = {gemm: torch.empty(*shape, dtype=torch.bfloat16, device=DEVICE) for gemm, shape in shapes.items()}

    def of_rows(a, b):
        return scales(len(a)), scales(len(b))

    def of_tiles(a, b):
        deep = a.shape[1] // 128
        return scales(len(a), deep), scales(len(b) // 128, deep)

    by_rows = [
        ("rows, fast", grouped_cuda.ROW, True, of_rows),
        ("rows, full", grouped_cuda.ROW, False, of_rows),
        ("tiles", grouped_cuda.TILES, False, of_tiles),
    ]
    by_columns = [
        ("rows, full", grouped_cuda.ROW, lambda a, b: (scales(E, len(a)), scales(E, len(b)))),
        ("blocks", grouped_cuda.BLOCKS, lambda a, b: (scales(R // 128, len(a)), scales(R // 128, len(b)))),
    ]
    subjects = []

    def add(where, function, name, gemm, scale, *kind, **options):
        a, b = operands[gemm]
        factors = scale(a, b)
        subjects.append(Subject(
            f"{where}, {name}: {gemm}",
            lambda x, dy: function(a, b, *factors, outs[gemm], blocks, *kind, **options),
        ))  # fmt: skip

    for where, module in [("CUDA", grouped_cuda)] * (grouped_cuda.library() is not None) + [("Triton", grouped_gemm)]:
        for name, kind, fast, scale in by_rows:
            for gemm in ("fprop", "dgrad"):
                add(where, module.multiply_rows, name, gemm, scale, kind, fast=fast)
        for name, kind, scale in by_columns:
            add(where, module.multiply_columns, name, "wgrad", scale, kind, fast=False, add=False)
    return subjects


def decoding_gemms(args) -> list[Subject]:
    """MXFP8 and NVFP4 over uneven groups, with the decode of tokens: weights decoded where they are multiplied; both
    operands decoded to bf16 before, for the library. And the same of one dense product."""
    from megatron_hybrid.gemm import decoding
    from megatron_hybrid.ops_triton import grouped_gemm
    from megatron_hybrid.storage import cast, decode_operands

    if not ON_GPU or decoding.grouped_cuda.library() is None:
        return []
    E, T, K, N = args.experts, args.tokens, args.k, args.n
    sizes = torch.tensor(splits_of(T, E), dtype=torch.int32, device=DEVICE)
    blocks = grouped_gemm.block_map(sizes, -(-T // grouped_gemm.BLOCK) + E)
    ends = sizes.cumsum(0).to(torch.int32)
    subjects = []

    def quantized(rows, width, fmt):
        return cast(torch.randn(rows, width, device=DEVICE).bfloat16(), mh.parse_format(fmt), "rowwise")

    def before(a, b, *, grouped):
        operands = [s.unwritten_operand(torch.bfloat16) for s in (a, b)]
        decode_operands((a, b), operands, outer=False)
        if not grouped:
            return torch.mm(operands[0], operands[1].t())
        return torch._grouped_mm(operands[0], operands[1].view(E, -1, a.shape[1]).transpose(1, 2), offs=ends)

    for fmt in ("mxfp8_e4m3", "nvfp4:row_scaled"):
        for gemm, deep, wide in (("fprop", K, N), ("dgrad", N, K)):
            a, b = quantized(T, deep, fmt), quantized(E * wide, deep, fmt)
            subjects += [
                Subject(f"decoding inside, {fmt}: {gemm}", lambda x, dy, a=a, b=b: decoding.multiply(a, b, E, blocks)),
                Subject(f"decoding before, {fmt}: {gemm}", lambda x, dy, a=a, b=b: before(a, b, grouped=True)),
            ]
        a, b = quantized(args.dense[0], args.dense[1], fmt), quantized(args.dense[2], args.dense[1], fmt)
        subjects += [
            Subject(f"decoding inside, {fmt}: dense", lambda x, dy, a=a, b=b: decoding.multiply(a, b)),
            Subject(f"decoding before, {fmt}: dense", lambda x, dy, a=a, b=b: before(a, b, grouped=False)),
        ]
        if fmt == "mxfp8_e4m3":
            x, w = a.operand(torch.bfloat16), b.operand(torch.bfloat16)
            subjects.append(Subject("bf16: dense", lambda _, dy, x=x, w=w: torch.mm(x, w.t())))
    return subjects


def gemms_alone(args) -> list[dict]:
    """Device us of the library's three grouped GEMMs, equal groups: bf16, row-scaled FP8 with either accumulation; and of
    our own FP8 ones, uneven groups."""
    E, T, K, N = args.experts, args.tokens // args.experts * args.experts, args.k, args.n
    ends = torch.full((E,), T // E, device=DEVICE).cumsum(0).to(torch.int32)

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device=DEVICE).to(dtype)

    x, dy, w = random(T, K), random(T, N), random(E, N, K)
    made = {"bf16": (
        lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends),
        lambda: torch._grouped_mm(dy, w, offs=ends),
        lambda: torch._grouped_mm(dy.T, x, offs=ends),
    )}  # fmt: skip
    q = {name: random(*shape, dtype=torch.float8_e4m3fn) for name, shape in
         {"x": (T, K), "dy": (T, N), "w": (E, N, K), "wt": (E, K, N), "xc": (K, T), "dyc": (N, T)}.items()}  # fmt: skip
    s = {name: torch.ones(*shape, device=DEVICE) for name, shape in
         {"rows": (T,), "n": (E, N), "k": (E, K)}.items()}  # fmt: skip
    for fast in (True, False):
        def run(a, b, scale_a, scale_b, fast=fast):
            return lambda: torch._scaled_grouped_mm(
                a, b, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        made[f"fp8 row, {'fast' if fast else 'full'}"] = (
            run(q["x"], q["w"].transpose(1, 2), s["rows"], s["n"]),
            run(q["dy"], q["wt"].transpose(1, 2), s["rows"], s["k"]),
            run(q["dyc"], q["xc"].T, s["n"].reshape(-1), s["k"].reshape(-1)),
        )
    subjects = [Subject(f"{name} {gemm}", lambda x, dy, run=run: run()) for name, runs in made.items()
                for gemm, run in zip(("fprop", "dgrad", "wgrad"), runs)] + own_gemms(args) + decoding_gemms(args)  # fmt: skip
    timed(subjects, [(None, None)], 2)

    def work(name):
        return 2 * args.dense[0] * args.dense[1] * args.dense[2] if name.endswith("dense") else 2 * T * K * N

    return [{"what": name, "us": sorted(device)[len(device) // 2], "TFLOP/s": work(name) / min(device) / 1e6}
            for name, (device, _) in timed(subjects, [(None, None)], args.repeat).items()]  # fmt: skip


def show(rows: list[dict]) -> None:
    cells = [
        (r["what"], f"{r['us']:.0f}", f"{r['speedup']:.2f}x",
         "" if r["goal"] is None else "met" if r["speedup"] >= r["goal"] else f"missed ({r['goal']}x)",
         f"{r['host_us']:.0f}", "yes" if r["waits"] else "no", f"{r['worst']:.2f}" if "worst" in r else "", r["how"])
        for r in rows
    ]  # fmt: skip
    header = ("what", "us", "against torch", "goal", "host us", "waits", "off", "how")
    print(Table(header, tuple(cells), (f"{torch.cuda.get_device_name() if ON_GPU else 'CPU'}, torch {torch.__version__}",)))
    for row in rows:
        if "profile" in row:
            kinds = ", ".join(f"{k} {v:.0f}" for k, v in sorted(row["profile"]["kinds"].items(), key=lambda kv: -kv[1]))
            print(f"{row['what']}: {kinds}")
            for name, us in row["profile"]["longest"]:
                print(f"    {us:7.0f} us {name}")


def main() -> int:
    args = parse_args()
    if args.gemms:
        rows = gemms_alone(args)
        print(Table(("what", "us", "TFLOP/s"), tuple((r["what"], f"{r['us']:.0f}", f"{r['TFLOP/s']:.0f}") for r in rows)))
        write_result(args.json, rows, commit=args.commit)
        return 0
    rows = bench(args)
    show(rows)
    sizes = {k: getattr(args, k) for k in ("experts", "k", "n", "tokens")}
    write_result(args.json, rows, sizes=sizes, commit=args.commit)
    return int(any(row.get("worst", 0) > 1 for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
