"""Export and import against Megatron's own model: logits of quantized runs of several layouts (case 66).

A logit's rounding is measured, not guessed: a plain bf16 forward of the exported folder differs from its FP32 forward by so
much, and Megatron's bf16 logits may differ by at most twice that.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from launch import HERE
from mcore_cases import MIXED, MOCK, MODEL, SCRIPT, TP2, Case, assert_ended, metrics, run_cases

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hf_reference import PlainModel  # noqa: E402
from run_logits import fixed_tokens  # noqa: E402

from megatron_hybrid.checkpoint_file import Checkpoint  # noqa: E402
from megatron_hybrid.cli import main  # noqa: E402

pytestmark = pytest.mark.dist

LOGITS = str(HERE / "run_logits.py")
ONE_RANK = ["--make-vocab-size-divisible-by", "128", "--hq-recipe", "bf16", "--skip-train"]  # 128 rows, as with TP 2
EXPERTS = (
    "--qk-layernorm --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-layer-freq [0,1] --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
).split()
SHARED = (
    "--add-qkv-bias --num-experts 4 --moe-router-topk 2 --moe-router-pre-softmax --moe-ffn-hidden-size 64 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 96 --moe-shared-expert-gate"
).split()
SCALED = "--add-qkv-bias --use-rope-scaling --rope-scaling-factor 8 --rotary-base 500000 --norm-epsilon 1e-3".split()
GROUPS = ["--group-query-attention", "--num-query-groups", "2"]
WITHOUT_DISTRIBUTED_OPTIMIZER = [word for word in MODEL if word != "--use-distributed-optimizer"]
QUANTIZED = "version: 1\nname: quantized\ndefaults: mxfp8_e4m3\nweights: quantized\nparam_gather: both\n"
TIED = [word for word in MODEL if word != "--untie-embeddings-and-output-weights"]
# name: model, layout, recipe
MODELS = {
    "tensor": ([*MODEL, *GROUPS], TP2, MIXED),
    "pipeline": (TIED, ["--pipeline-model-parallel-size", "2"], "fp8_delayed"),
    "experts": ([*MODEL, *GROUPS, *EXPERTS], [*TP2, "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"],
                "mxfp8"),
    "fsdp2": (WITHOUT_DISTRIBUTED_OPTIMIZER, ["--use-torch-fsdp2", "--ckpt-format", "torch_dist"], "mxfp8"),
    "quantized": (MODEL, TP2, "{folder}/quantized.yaml"),
    "one_by_one": ([*MODEL, *(word for word in EXPERTS if word != "--moe-grouped-gemm")], ["--expert-model-parallel-size", "2"],
                   "mxfp8"),
    "scaled": ([*TIED, *GROUPS, *SCALED], TP2, "fp8_block"),
    "shared": ([*MODEL, *SHARED], [*TP2, "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"], "nvfp4"),
}  # fmt: skip
CONVERTED = ("tensor", "experts", "scaled", "shared")
KINDS = {"tensor": "llama", "pipeline": "llama", "experts": "qwen3_moe", "scaled": "qwen2", "shared": "qwen2_moe",
         "fsdp2": "llama", "quantized": "llama", "one_by_one": "qwen3_moe"}  # fmt: skip


def trained(name: str) -> list[Case]:
    model, layout, recipe = MODELS[name]
    vocab = [] if "--tensor-model-parallel-size" in layout else ["--make-vocab-size-divisible-by", "128"]
    save = ["--save", f"{{folder}}/{name}", "--save-interval", "4"]
    load = ["--load", f"{{folder}}/{name}", "--hq-switch-recipe", "--no-load-optim", "--no-load-rng",
            "--hq-metrics-file", f"{{folder}}/{name}.logits"]  # fmt: skip
    return [
        Case(name, [SCRIPT, *model, *MOCK, *layout, *vocab, "--hq-recipe", recipe, *save]),
        Case(f"{name}_logits", [LOGITS, *model, *MOCK, *ONE_RANK, *load], ranks=1),
    ]


def converted(name: str) -> Case:
    load = ["--load", f"{{folder}}/{name}_back", "--finetune", "--hq-metrics-file", f"{{folder}}/{name}_back.logits"]
    return Case(f"{name}_back", [LOGITS, *MODELS[name][0], *MOCK, *ONE_RANK, *load], ranks=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    (folder / "quantized.yaml").write_text(QUANTIZED)
    done = run_cases([case for name in MODELS for case in trained(name)], folder)
    for case in done.values():
        assert_ended(case)
    for name in MODELS:
        assert main(["export", str(folder / name), str(folder / f"{name}_hf")]) == 0
    for name in CONVERTED:
        assert main(["import", str(folder / f"{name}_hf"), str(folder / f"{name}_back")]) == 0
    again = folder / "again"
    again.mkdir()
    model, layout, _ = MODELS["tensor"]
    finetuned = [SCRIPT, *model, *MOCK, *layout, "--load", "{folder}/tensor_back", "--finetune", "--hq-recipe", "nvfp4",
                 "--hq-metrics-file", "{folder}/finetuned"]  # fmt: skip
    for path in folder.iterdir():
        if path.name.endswith("_back"):
            (again / path.name).symlink_to(path)
    for case in run_cases([*map(converted, CONVERTED), Case("finetuned", finetuned)], again).values():
        assert_ended(case)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_c66_exported_logits_are_the_trained_ones_within_rounding(folder, name):
    found = torch.load(folder / f"{name}.logits.pt").float()
    tokens = fixed_tokens(127)
    model = PlainModel(folder / f"{name}_hf", torch.float32)
    assert model.config["model_type"] == KINDS[name]
    torch.testing.assert_close(torch.load(folder / f"{name}.logits.rotary.pt"), model.frequencies(), rtol=1e-5, atol=0)
    exact = model(tokens)
    rounded = PlainModel(folder / f"{name}_hf", torch.bfloat16)(tokens).float()
    assert (found - exact).norm() <= 2 * (rounded - exact).norm()
    assert (rounded - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("name", MODELS)
def test_c66_transformers_gives_the_same_logits(folder, name):
    transformers = pytest.importorskip("transformers")
    tokens, found = fixed_tokens(127), torch.load(folder / f"{name}.logits.pt").float()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{name}_hf", dtype=dtype)
        with torch.no_grad():
            logits = model(tokens).logits.float()
        exact = PlainModel(folder / f"{name}_hf", torch.float32)(tokens)
        assert (logits - exact).norm() < tolerance * exact.norm()
    assert (found - exact).norm() <= 2 * (logits - exact).norm()  # of bf16 in transformers


@pytest.mark.parametrize("name", CONVERTED)
def test_c66_imported_weights_are_the_trained_ones_bit_for_bit(folder, name):
    assert torch.equal(
        torch.load(folder / f"{name}.logits.pt"), torch.load(folder / "again" / f"{name}_back.logits.pt")
    )


def test_training_goes_on_from_imported_weights_under_another_recipe(folder):
    first = metrics(folder / "again" / "finetuned")[1]["loss"]
    assert first < 4.5 and Checkpoint(folder / "tensor_back").recipe is None  # from scratch it is 4.87
