"""Forward and backward of a few Llama-8B-shaped layers, embedding, output layer and loss included (goal P10).

    python scripts/bench_step.py [--recipe bf16 fp8_delayed ...] [--main-grad] [--profile] [--json OUT]

One process, one GPU, no launcher. Each recipe trains on this package's spec alone, all models in turn in every round,
gradients cleared and weights cast again each step. Peers run beside where they can be imported. Checked: losses and
gradients of the fused layers, and of the same layers in plain torch, against the model in FP32; the fused ones may not
be off more than twice as far. Without a GPU it runs on the CPU, for trying the script: give small sizes.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import time
from dataclasses import dataclass

import torch
from bench_common import median, write_result
from bench_peers import TE, TE_RECIPES, of_peer, te_missing
from step_profile import copy_bandwidth, profile, short

from megatron_hybrid.explain import Table
from megatron_hybrid.patches import cpu_device
from megatron_hybrid.patches.quiet import quiet_missing_te_warnings

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    cpu_device.install()  # before Megatron is imported

with quiet_missing_te_warnings():
    import torch.nn.functional as F
    from megatron.core import mpu, tensor_parallel
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    from megatron_hybrid import Recipe
    from megatron_hybrid.gated_cast import SwigluCast, swiglu_casts
    from megatron_hybrid.mcore import driver
    from megatron_hybrid.mcore.spec import HybridLayerSpec
    from megatron_hybrid.ops_triton.swiglu import swiglu

# Transformer Engine's ms in another call (performance.md's table)
TE_TABLE = {"bf16": 102.1, "fp8_delayed": 78.9, "fp8_current": 80.8, "fp8_block": 88.1}
GOALS = {"bf16": 100.0, **{name: 0.97 * TE_TABLE[name] for name in ("fp8_delayed", "fp8_current", "fp8_block")}}
DATA_SETS = 3
_SPIN = 40_000_000  # clock cycles, about 22 ms
CHECKED = 2048  # tokens of the comparison with FP32, whose attention holds all its scores
GOAL_SHAPE = {"layers": 4, "seq": 8192, "hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "vocab": 32000}
SETTLE = 3  # steps before a result is looked at: delayed scales have moved on


@dataclass
class Subject:
    """One model and how a step of it runs. own: bytes it holds between steps."""

    name: str
    model: torch.nn.Module
    controller: object = None
    context: object = None
    own: int = 0
    steps: int = 0

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {n.removeprefix("module."): p for n, p in self.model.named_parameters()}

    def step(self, batch) -> torch.Tensor:
        """Forward and backward; the losses (1, sequence)."""
        for p in self.model.parameters():
            p.grad = None
            p.grad_added_to_main_grad = False
        self.steps += 1
        if self.controller is not None:
            self.controller.begin_step(self.steps)
        losses = self.model(batch[0], batch[1], None, labels=batch[2])
        losses.mean().backward()
        if self.controller is not None:
            self.controller.end_step()
        return losses.detach()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=list(GOALS), help="names or paths (default: %(default)s)")
    parser.add_argument("--peers", nargs="*", choices=[TE, "local"], default=[TE],
                        help="beside them: te (Transformer Engine, where importable), local (Megatron's own layers)")
    parser.add_argument("--plain", nargs="*", default=[], metavar="RECIPE", help="time these on plain torch layers too")
    for name, size in {**GOAL_SHAPE, "repeat": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--main-grad", nargs="*", default=[], metavar="RECIPE",
                        help="time these with gradients added into FP32 main_grad too (P10b)")
    parser.add_argument("--apart", nargs="*", default=[], metavar="RECIPE",
                        help="time these with SwiGLU, and with its gradient, in kernels of their own too")
    parser.add_argument("--no-check", action="store_true", help="leave the comparison with FP32 out")
    parser.add_argument("--profile", action="store_true", help="kernels of one step by kind, and the longest ones")
    parser.add_argument("--json", help="write rows, card, versions and commit here")
    parser.add_argument("--commit", help="what to record as the commit where there is no git checkout")
    return parser.parse_args()


def is_goal_shape(args) -> bool:
    return ON_GPU and all(getattr(args, k) == v for k, v in GOAL_SHAPE.items())


def start_one_rank() -> None:
    backend = "nccl" if ON_GPU else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()


def config(args, dtype=torch.bfloat16, **changes) -> TransformerConfig:
    settings = dict(
        num_layers=args.layers, hidden_size=args.hidden, ffn_hidden_size=args.ffn, num_attention_heads=args.heads,
        num_query_groups=args.groups, bf16=dtype == torch.bfloat16, params_dtype=dtype, pipeline_dtype=dtype,
        attention_dropout=0.0, hidden_dropout=0.0, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=F.silu, add_bias_linear=False, bias_activation_fusion=ON_GPU, masked_softmax_fusion=False,
    )  # fmt: skip
    return TransformerConfig(**{**settings, **changes})


def build(args, spec, **changes) -> torch.nn.Module:
    """The model; every one has the same weights."""
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    model_config = GPTModelConfig(
        transformer=config(args, **changes), transformer_layer_spec=spec, vocab_size=args.vocab, seq_length=args.seq,
        position_embedding_type="rope", rotary_base=500000, share_embeddings_and_output_weights=False,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return GPTModelBuilder(model_config).build_distributed_models(groups, wrap_with_ddp=False)[0]


def ours(args, recipe, *, fused: bool | None = None, name=None, main_grad=False, **changes) -> Subject:
    before = allocated()
    if fused is False:
        changes = {"bias_activation_fusion": False, **changes}
    model = build(args, HybridLayerSpec(Recipe.load(recipe), fused=fused), **changes)
    attached = driver.attach([model.module if hasattr(model, "module") else model], seed=1)
    subject = Subject(name or recipe, model, attached and attached.controller)
    if main_grad:
        add_main_grads(model)
    subject.own = allocated() - before
    return subject


def ours_apart(args, recipe) -> list[Subject]:
    """What SwiGLU inside casts saves: the same model with its gradient in a kernel of its own, and with both."""
    found = [ours(args, recipe, name=f"{recipe} {what} apart") for what in ("gradient", "swiglu and gradient")]
    for subject, forward_too in zip(found, (False, True)):
        for module in subject.model.modules():
            if isinstance(module, MLP):
                module.forward = functools.partial(_mlp_apart, module, forward_too)
    return found


def _mlp_apart(mlp, forward_too: bool, hidden_states, **others):
    """`FusedMLP.forward` with SwiGLU's gradient, or with both, written in high precision and then cast."""
    h, fc2 = mlp.linear_fc1(hidden_states)[0], mlp.linear_fc2
    forth, _ = swiglu_casts(h, fc2.hq, fc2.weight, training=fc2.training)
    return fc2(swiglu(h) if forward_too or forth is None else SwigluCast.apply(h, forth, None))


def peers(args) -> list[Subject]:
    found = []
    if TE in args.peers and (reason := te_missing()):
        print(f"Transformer Engine: {reason}; goals are of another call's figures, within 8%")
    elif TE in args.peers:
        for recipe in filter(TE_RECIPES.__contains__, args.recipe):
            before, spec = allocated(), gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
            model = build(args, spec, apply_rope_fusion=True, **TE_RECIPES[recipe])
            found.append(Subject(of_peer(recipe), model, own=allocated() - before))
    if "local" in args.peers:
        before, spec = allocated(), gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
        model = build(args, spec, bias_activation_fusion=False)
        for module in model.modules():  # its attention needs a mask, which the others do without
            if hasattr(module, "attn_mask_type") and hasattr(module, "scale_mask_softmax"):
                module.register_forward_pre_hook(_add_mask, with_kwargs=True)
        found.append(Subject("Megatron local bf16", model, own=allocated() - before))
    return found


def _add_mask(module, inputs, kwargs):
    q, k, v, _ = inputs
    mask = torch.ones(1, 1, q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).triu(1)
    return (q, k, v, mask), kwargs


def add_main_grads(model) -> None:
    """Every parameter accumulates in FP32; the linears do it themselves, for the rest a hook adds."""

    def add(p):
        if not p.grad_added_to_main_grad:
            p.main_grad.add_(p.grad)
        p.grad = None

    for p in model.parameters():
        p.main_grad = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
        p.register_post_accumulate_grad_hook(add)


def allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if ON_GPU else 0


def batches(args) -> list:
    device = "cuda" if ON_GPU else "cpu"
    g = torch.Generator().manual_seed(3)
    positions = torch.arange(args.seq, device=device).expand(1, -1)
    tokens = [torch.randint(0, args.vocab, (1, args.seq), generator=g).to(device) for _ in range(DATA_SETS)]
    return [(t, positions, t.roll(-1, 1)) for t in tokens]


# ---- results


def results(subject: Subject, batch) -> dict[str, torch.Tensor]:
    """Losses and some gradients, FP32, after a few steps on the same batch."""
    for _ in range(SETTLE):
        losses = subject.step(batch)
    wanted = ("embedding.word_embeddings.weight", "layers.0.self_attention.linear_qkv.weight",
              "layers.0.mlp.linear_fc1.weight", "final_layernorm.weight")  # fmt: skip
    gradients = {n: p.grad.float() for n, p in subject.parameters().items() if n.endswith(wanted)}
    assert len(gradients) == len(wanted), list(gradients)
    return {"loss": losses.float(), **gradients}


def error(got: dict, exact: dict) -> dict[str, float]:
    """Relative error of each, root mean square; the loss's in absolute terms."""
    off = {n: float((got[n] - t).norm() / t.norm()) for n, t in exact.items() if n != "loss"}
    return {"loss": float((got["loss"] - exact["loss"]).square().mean().sqrt()), **off}


def check(args) -> list[dict]:
    """Fused and plain layers of each recipe against the model in FP32, whose products are FP32 too."""
    torch.backends.cuda.matmul.allow_tf32 = False
    args = argparse.Namespace(**{**vars(args), "seq": min(args.seq, CHECKED)})
    batch = batches(args)[0]
    wide = ours(args, "bf16", fused=False, dtype=torch.float32)
    copy_weights(ours(args, "bf16", fused=False), wide)
    exact, rows = results(wide, batch), []
    del wide
    for recipe in args.recipe:
        plain, fused = (error(results(ours(args, recipe, fused=f), batch), exact) for f in (False, ON_GPU))
        ok = all(fused[n] <= 2 * plain[n] for n in exact)
        worst = max(fused[n] / plain[n] if plain[n] else 1.0 for n in exact)
        rows.append({"recipe": recipe, "ok": ok, "fused": fused, "plain": plain, "worst_ratio": worst})
    return rows


def copy_weights(source: Subject, target: Subject) -> None:
    """The FP32 model has the bf16 models' weights, not those drawn in FP32."""
    of_name = source.parameters()
    for name, p in target.parameters().items():
        p.data.copy_(of_name[name].data)


# ---- time, memory, kernels


def peak_gib(subject: Subject, batch) -> float:
    """The most that a step allocates, the subject's weights included and everybody else's left out."""
    if not ON_GPU:
        return 0.0
    subject.step(batch)
    clear(subject)
    others = allocated() - subject.own
    torch.cuda.reset_peak_memory_stats()
    subject.step(batch)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - others) / 2**30


def interleaved_ms(subjects: list[Subject], data, rounds: int) -> dict[str, list[float]]:
    """Device ms of each round's step, start to end, all subjects in turn, each round in another order."""
    times: dict[str, list] = {s.name: [] for s in subjects}
    for r in range(rounds):
        turn = r % len(subjects)
        for subject in subjects[turn:] + subjects[:turn]:
            if not ON_GPU:
                start = time.perf_counter()
                subject.step(data[r % len(data)])
                times[subject.name].append((time.perf_counter() - start) * 1e3)
                continue
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(_SPIN)  # the host runs ahead of the device, as it does between the steps of a training
            start.record()
            subject.step(data[r % len(data)])
            end.record()
            torch.cuda.synchronize()
            times[subject.name].append(start.elapsed_time(end))
        for subject in subjects:
            clear(subject)
    return times


def clear(subject: Subject) -> None:
    """Let the gradients go."""
    for p in subject.model.parameters():
        p.grad = None


def measure(args, data) -> list[dict]:
    subjects, rows = [], {}
    for recipe in args.recipe:
        subjects.append(ours(args, recipe))
        if recipe in args.plain:
            subjects.append(ours(args, recipe, fused=False, name=f"{recipe} plain torch"))
        if recipe in args.apart and ON_GPU:
            subjects += ours_apart(args, recipe)
        if recipe in args.main_grad:
            subjects.append(ours(args, recipe, main_grad=True, name=f"{recipe} main_grad"))
    subjects += peers(args)
    for subject in subjects:
        rows[subject.name] = {"what": subject.name, "GiB": peak_gib(subject, data[0])}
        clear(subject)
    interleaved_ms(subjects, data, 2)
    for name, times in interleaved_ms(subjects, data, args.repeat).items():
        rows[name] |= {"ms": median(times), "least": min(times), "most": max(times)}
    if args.profile and ON_GPU:
        copy = copy_bandwidth()
        for subject in subjects:
            rows[subject.name]["profile"] = profile(subject, data[0], args, copy)
            clear(subject)
    for name, row in rows.items():
        beside = rows.get(of_peer(name))
        known = GOALS.get(name) if is_goal_shape(args) else None
        row["goal"] = 0.97 * beside["ms"] if beside and name != "bf16" else known
    return list(rows.values())


def show(rows: list[dict], checks: list[dict]) -> None:
    card = torch.cuda.get_device_name() if ON_GPU else "CPU"
    cells = [
        (r["what"], f"{r['ms']:.1f}", f"{r['least']:.1f}", f"{r['GiB']:.2f}",
         "" if r["goal"] is None else f"{r['goal']:.1f}",
         "" if r["goal"] is None else "met" if r["ms"] <= r["goal"] else "missed") for r in rows
    ]  # fmt: skip
    print(Table(("what", "ms", "least", "GiB", "goal", ""), tuple(cells), (f"{card}, torch {torch.__version__}",)))
    for row in rows:
        if "profile" in row:
            parts = ", ".join(f"{k} {v:.2f}" for k, v in sorted(row["profile"]["kinds"].items(), key=lambda kv: -kv[1]))
            print(f"{row['what']}: {row['profile']['sum']:.1f} ms on the device: {parts}")
            shares = ", ".join(f"{n[1:]} {s:.0%}" for n, s in row["profile"]["shares"].items())
            print(f"  of the copy bandwidth ({row['profile']['copy']:.2f} TB/s): {shares}")
            for k in row["profile"]["kernels"][:14]:
                print(f"  {k['ms']:7.3f} ms {k['calls']:4d} x {k['kind']:9.9s} {short(k['kernel'])}")
    for c in checks:
        print(f"{c['recipe']}: {'ok' if c['ok'] else 'WRONG'}, off by {c['worst_ratio']:.2f}x as much as plain torch "
              f"at most; loss off by {c['fused']['loss']:.2e} (plain {c['plain']['loss']:.2e})")  # fmt: skip


def main() -> int:
    args = parse_args()
    logging.disable(logging.WARNING)
    start_one_rank()
    data = batches(args)
    checks = [] if args.no_check else check(args)
    rows = measure(args, data)
    show(rows, checks)
    sizes = {k: getattr(args, k) for k in GOAL_SHAPE}
    write_result(args.json, rows, checks=checks, sizes=sizes, commit=args.commit)
    torch.distributed.destroy_process_group()
    return int(not all(c["ok"] for c in checks))


if __name__ == "__main__":
    raise SystemExit(main())
