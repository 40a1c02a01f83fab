"""A linear forward and backward on a GPU: every recipe in turn with torch's bf16 linear (goals P5, P6, P7, P11).

    python scripts/bench_linear.py [--json OUT] [--recipes fp8_delayed fp8_current] [--shapes 4096x14336]

Casts of x, w and dy are included; gradients are cleared each step. The floor of a recipe is its three GEMMs measured
alone, plus the bytes its casts must move at the copy bandwidth of the same run. All steps and GEMMs take turns, so that
they meet the same clocks: a card slows down under load. Results are checked against float64 products of the same
operands. Inputs rotate and are larger than the L2.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import bench_cast
import torch
from bench_common import device_kernels, interleaved_us, is_gemm, kernel_shares, write_result

import megatron_hybrid as mh
from megatron_hybrid.explain import Table
from megatron_hybrid.plan import GRAD_OUTPUT, INPUT, WEIGHT

BLOCK_BACKWARD = dict(dgrad={"grad_output": "fp8_block_e4m3", "weight": "fp8_block_e4m3:2d"}, wgrad="fp8_block_e4m3")
MIXED_BACKWARD = dict(
    dgrad={"grad_output": "fp8_delayed_e5m2", "weight": "fp8_delayed_e4m3"},
    wgrad={"grad_output": "fp8_delayed_e5m2", "input": "fp8_delayed_e4m3"},
)
# recipes that are not shipped, by name
OWN = {
    "current+block": dict(fprop="fp8_current_e4m3", **BLOCK_BACKWARD),
    "current+delayed": dict(fprop="fp8_current_e4m3", **MIXED_BACKWARD),
    "nvfp4_plain": dict(
        fprop={"input": "nvfp4", "weight": "nvfp4:2d"},
        dgrad={"grad_output": "nvfp4", "weight": "nvfp4:2d"},
        wgrad="nvfp4",
    ),
}  # fmt: skip
RECIPES = ["bf16", "fp8_delayed", "fp8_delayed fast", "fp8_current", "fp8_block", "fp8_rowwise", "current+block",
           "current+delayed", "mxfp8", "nvfp4_plain", "nvfp4", "bf16 main_grad", "fp8_delayed main_grad"]  # fmt: skip
# best peer's speed over bf16 in this recipe, from docs/performance.md's table, by (K, N)
PEERS = {
    "4096x14336": {"fp8_delayed": 1.65, "fp8_current": 1.52, "fp8_block": 1.30, "fp8_rowwise": 4093 / 3501},
    "14336x4096": {"fp8_delayed": 1.67, "fp8_current": 1.55, "fp8_block": 1.42, "fp8_rowwise": 4370 / 4076},
}
TOLERANCE = 2.0**-7  # of the norm: two roundings to bf16 (2^-8) and sums kept to 13 fraction bits


def load_recipe(words: str) -> mh.Recipe:
    name = words.split()[0]
    if name not in OWN:
        recipe = mh.Recipe.load(name)
    else:
        recipe = mh.Recipe.from_dict({"version": 1, "name": name, "defaults": OWN[name]})
    if "fast" not in words.split():
        return recipe
    table = recipe.to_dict()
    table["accumulate"] = dict.fromkeys(("fprop", "dgrad", "wgrad"), "fast")
    return mh.Recipe.from_dict(table)


@dataclass
class Shape:
    """Tensors of one shape; `count` of each, to rotate through."""

    M: int
    K: int
    N: int
    count: int = 3

    def __post_init__(self):
        g = torch.Generator("cuda").manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, device="cuda", generator=g).bfloat16()

        self.xs = [randn(self.M, self.K).requires_grad_() for _ in range(self.count)]
        self.dys = [randn(self.M, self.N) for _ in range(self.count)]
        self.weight = randn(self.N, self.K) / self.K**0.5

    def layer(self, words: str | None, backend=None):
        """A linear of a recipe, or torch's; no bias."""
        if words is None:
            layer = torch.nn.Linear(self.K, self.N, bias=False, device="cuda", dtype=torch.bfloat16)
        else:
            layer = mh.HybridLinear(
                self.K, self.N, bias=False, recipe=load_recipe(words), name="fc", backend=backend, device="cuda",
                dtype=torch.bfloat16,
            )  # fmt: skip
        with torch.no_grad():
            layer.weight.copy_(self.weight)
        if words is not None and layer.plan.uses_rng:  # keys of a step; the weight is cast in every call all the same
            mh.prepare(layer, seed=1).begin_step(1)
            layer.hq.weight_cache = None
        if words is not None and "main_grad" in words.split():
            layer.weight.main_grad = torch.zeros(self.N, self.K, device="cuda")
        return layer

    def step(self, layer, i: int):
        """Forward and backward with the i-th inputs; (y, dx, dw)."""
        x, dy = self.xs[i % self.count], self.dys[i % self.count]
        x.grad = layer.weight.grad = None
        y = layer(x)
        y.backward(dy)
        return y.detach(), x.grad, layer.weight.grad


def rng(layer) -> mh.Rng | None:
    """A key for casts outside of steps, where the recipe rounds stochastically."""
    return mh.Rng(1, 1, 1, 0, device="cuda") if layer.plan.uses_rng else None


def gemm_runs(shape: Shape, layer) -> dict:
    """Each of a layer's three GEMMs alone, over payloads of the rotating inputs."""
    plan, runs = layer.plan, {}
    w = layer.weight.detach()
    state = {op: [s for s in plan.quantizers[op].new_state("cuda")] for op in (INPUT, WEIGHT, GRAD_OUTPUT)}

    def cast(operand, x):
        return plan.quantize(operand, x.detach(), rowwise=True, columnwise=True, state=state[operand], rng=rng(layer))

    w_row, w_col = cast(WEIGHT, w)
    xs, dys = [cast(INPUT, x) for x in shape.xs], [cast(GRAD_OUTPUT, dy) for dy in shape.dys]
    pick = lambda items, i: items[i % shape.count]  # noqa: E731
    runs["fprop"] = lambda i: plan.run("fprop", pick(xs, i)[0], w_row, torch.bfloat16)
    runs["dgrad"] = lambda i: plan.run("dgrad", pick(dys, i)[0], w_col, torch.bfloat16)
    runs["wgrad"] = lambda i: plan.run("wgrad", pick(dys, i)[1], pick(xs, i)[1], torch.bfloat16)
    return runs


def cast_bytes(shape: Shape, layer) -> int:
    """Bytes the casts of x, w and dy must move."""
    total = 0
    for operand, x in ((INPUT, shape.xs[0]), (WEIGHT, layer.weight), (GRAD_OUTPUT, shape.dys[0])):
        quantizer = layer.plan.quantizers[operand]
        if not any(f.is_quantized for f in quantizer.formats()):
            continue
        payloads = quantizer.cast(x.detach(), state=quantizer.new_state("cuda"), rng=rng(layer), transposed=True)
        written = [p for p in payloads if p is not None and p.format.is_quantized]
        total += bench_cast.needed_bytes(x, quantizer, written)
    return total


def kept_bytes(shape: Shape, layer) -> int:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        layer(shape.xs[0])
    return sum(t.numel() * t.element_size() for t in kept)


def relative(a, b) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def check(shape: Shape, words: str, layer) -> dict:
    """Relative distance of y, dx, dw from the float64 products of the same operands.

    Memory is filled with NaN before.
    """
    exact = shape.layer(words.replace("main_grad", ""), backend="reference")
    if hasattr(layer.weight, "main_grad"):
        layer.weight.main_grad.zero_()
    torch.use_deterministic_algorithms(True)  # fills new memory
    try:
        got = list(shape.step(layer, 0))
    finally:
        torch.use_deterministic_algorithms(False)
    if hasattr(layer.weight, "main_grad"):
        got[2] = layer.weight.main_grad.clone()
    wanted = shape.step(exact, 0)
    found = {name: relative(a, b) for name, a, b in zip(("y", "dx", "dw"), got, wanted)}
    for name, distance in found.items():
        if not distance <= TOLERANCE:
            raise SystemExit(f"{words}: {name} is {distance:.2e} from the exact products")
    return found


def bench_shape(shape: Shape, recipes, rounds: int, copy: float, label: str) -> list[dict]:
    layers = {None: shape.layer(None), **{r: shape.layer(r) for r in recipes}}
    checked = {r: check(shape, r, layers[r]) for r in recipes}
    cases = {}
    for name, layer in layers.items():
        cases[name] = lambda i, m=layer: shape.step(m, i)
        if name is not None:
            cases |= {(name, gemm): run for gemm, run in gemm_runs(shape, layer).items()}
    us = interleaved_us(cases, rounds)
    rows = [{"shape": label, "recipe": "torch bf16", "us": us[None], "speedup": 1.0,
             "kept": kept_bytes(shape, layers[None])}]  # fmt: skip
    for r in recipes:
        layer = layers[r]
        gemms = {gemm: us[r, gemm] for gemm in layer.plan.steps()}
        moved = cast_bytes(shape, layer)
        floor = sum(gemms.values()) + moved / copy / 1e6
        kernels = device_kernels(lambda i, m=layer: shape.step(m, i))
        row = {
            "shape": label, "recipe": r, "runs": {g: s.runs for g, s in layer.plan.steps().items()}, "us": us[r],
            "speedup": us[None] / us[r], "floor_us": floor, "over_floor": us[r] / floor, "gemms_us": gemms,
            "cast_bytes": moved, "cast_floor_us": moved / copy / 1e6, "profile_us": kernel_shares(kernels),
            "kernels": kernels, "kept": kept_bytes(shape, layer), "distance": checked[r],
        }  # fmt: skip
        if (peer := PEERS.get(label, {}).get(r)) is not None:
            row["peer_speedup"], row["over_peer"] = peer, row["speedup"] / peer
        rows.append(row)
    return rows


def same_kernels(rows) -> dict:
    """P6: GEMM kernels of a hybrid recipe are those of the single-format recipes it is made of."""
    gemms = {r["recipe"]: [k for k, _ in r.get("kernels", []) if is_gemm(k)] for r in rows}
    found = {}
    if {"fp8_current", "fp8_block", "current+block"} <= gemms.keys():
        wanted = gemms["fp8_current"][:1] + gemms["fp8_block"][1:]
        found["current+block = current fprop, block dgrad and wgrad"] = gemms["current+block"] == wanted
    if {"fp8_current", "fp8_delayed", "current+delayed"} <= gemms.keys():
        found["current+delayed = current"] = gemms["current+delayed"] == gemms["fp8_current"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", nargs="+", default=["4096x14336", "14336x4096"], help="KxN")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kernels", action="store_true", help="print every kernel of a step")
    parser.add_argument("--commit", help="recorded in place of git's")
    parser.add_argument("--json", help="write rows, card, versions and commit here")
    args = parser.parse_args()
    bandwidth_inputs = [torch.randn(16384, 8192, device="cuda").bfloat16() for _ in range(3)]
    copy = bench_cast.copy_bandwidth(bandwidth_inputs, 20)
    del bandwidth_inputs
    rows, equal = [], {}
    for label in args.shapes:
        k, n = map(int, label.split("x"))
        shape = Shape(args.tokens, k, n)
        new = bench_shape(shape, args.recipes, args.rounds, copy, label)
        rows += new
        equal[label] = same_kernels(new)
    _print(rows, copy, equal, args.kernels)
    write_result(args.json, rows, copy_TBps=copy, tokens=args.tokens, same_kernels=equal, commit=args.commit)


def _print(rows, copy, equal, kernels: bool) -> None:
    header = ("K x N", "recipe", "us", "x bf16", "floor", "over", "x peer", "gemms", "casts", "other", "kept MB",
              "distance")  # fmt: skip
    cells = []
    for r in rows:
        shares = r.get("profile_us", {})
        parts = [f"{shares.get(k, 0):.0f}" for k in ("gemms", "casts", "other")] if shares else ["", "", ""]
        far = max(r.get("distance", {}).values(), default=None)
        cells.append(
            (r["shape"], r["recipe"], f"{r['us']:.0f}", f"{r['speedup']:.2f}",
             f"{r['floor_us']:.0f}" if "floor_us" in r else "", f"{r['over_floor']:.3f}" if "over_floor" in r else "",
             f"{r['over_peer']:.2f}" if "over_peer" in r else "", *parts, f"{r['kept'] / 1e6:.0f}",
             "" if far is None else f"{far:.1e}")
        )  # fmt: skip
    card = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy:.2f} TB/s"
    notes = (card, f"same kernels: {equal}")
    print(Table(header, tuple(cells), notes))
    for r in rows if kernels else ():
        for name, us in r.get("kernels", []):
            print(f"  {r['shape']} {r['recipe']:18} {us:8.1f} {name[:110]}")


if __name__ == "__main__":
    main()
