"""A user's mistake: one message that names it, from rank 0, no traceback, and every rank ends with an error."""

from __future__ import annotations

import pytest
from launch import torchrun
from mcore_cases import MIXED, MOCK, MODEL, SCRIPT, TP2, Case, run_cases, write_dataset

pytestmark = pytest.mark.dist

RECIPES = {
    "key.yaml": "version: 1\nname: key\ndefautls: mxfp8_e4m3\n",
    "format.yaml": "version: 1\nname: format\ndefaults:\n  fprop: mxpf8_e4m3\n",
    "option.yaml": 'version: 1\nname: option\ndefaults:\n  fprop: "nvfp4:2dd"\n',
    "nothing.yaml": "version: 1\nname: nothing\ndefaults: mxfp8_e4m3\n"
    'rules:\n  - match: {name: "*.linear_fc3"}\n    use: high_precision\n',
    "beyond.yaml": 'version: 1\nname: beyond\ndefaults: mxfp8_e4m3\nrules:\n  - match: {layers: "7"}\n    use: nvfp4\n',
    "part.yaml": "version: 1\nname: part\ndefaults: mxfp8_e4m3\n"
    'rules:\n  - match: {layers: "first:1,9"}\n    use: nvfp4\n',
    "lives.yaml": "version: 1\nname: lives\ndefaults: mxfp8_e4m3\nweights: quantized\n",
    "lone.yaml": 'version: 1\nname: lone\ndefaults:\n  wgrad: {grad_output: "nvfp4:rht", input: nvfp4}\n',
}

MEGATRON_FSDP = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"]


def recipe(file: str) -> list[str]:
    return ["--hq-recipe", f"{{folder}}/{file}"]


def data(prefix: str, *flags: str) -> list[str]:
    return ["--data-path", f"{{folder}}/{prefix}", "--split", "90,10,0", *flags]


# name -> (flags, what the message must contain); flags without a data source get mock data
TABLE = {
    "unknown_recipe": (["--hq-recipe", "mxpf8"], ["unknown recipe 'mxpf8'", "did you mean 'mxfp8'"]),
    "missing_recipe_file": (recipe("absent.yaml"), ["absent.yaml"]),
    "unknown_key": (recipe("key.yaml"), ["key.yaml:3", "'defautls'", "'defaults'"]),
    "unknown_format": (recipe("format.yaml"), ["format.yaml:4", "mxpf8_e4m3", "'mxfp8_e4m3'"]),
    "unknown_option": (recipe("option.yaml"), ["option.yaml:4", "'2dd'", "'2d'"]),
    "rule_for_no_module": (recipe("nothing.yaml"), ["nothing.yaml:5", "matches nothing in the model", "'linear_fc2'"]),
    "rule_for_no_layer": (recipe("beyond.yaml"), ["beyond.yaml:5", "the model's layers are 1 to 2"]),
    "rule_for_a_layer_too_many": (recipe("part.yaml"), ["part.yaml:5", "layers '9' of 'first:1,9', the model's are 1 to 2"]),
    "lone_transform": (recipe("lone.yaml"), ["lone.yaml:4", "wgrad: rht must be on both operands"]),
    "unknown_backward": (["--hq-backward", "bf16"], ["--hq-backward", "high_precision"]),
    "unknown_flag": (["--hq-recipes", "mxfp8"], ["--hq-recipes", "did you mean --hq-recipe?"]),
    "missing_data": (data("absent"), ["dataset", "absent", "prepare it with scripts/prepare_data.py"]),
    "empty_data": (data("empty"), ["dataset", "holds no documents"]),
    "truncated_data": (data("truncated"), ["truncated.bin is truncated", "the index says"]),
    "short_data": (data("short"), ["fewer than one sequence needs"]),
    "too_few_ranks": (["--tensor-model-parallel-size", "4"], ["a multiple of 4 ranks, found 2"]),
    "too_few_ranks_together": (
        ["--pipeline-model-parallel-size", "2"],
        ["--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 needs a multiple of 4 ranks"],
    ),
    "indivisible_sequence": (["--seq-length", "33"], ["--seq-length 33", "--tensor-model-parallel-size 2"]),
    "megatron_assertion": (["--global-batch-size", "7"], ["Megatron's arguments", "7"]),
    "experts_flex": (["--num-experts", "4", "--moe-token-dispatcher-type", "flex"], ["flex", "not supported"]),
    "experts_on_ranks": (
        ["--num-experts", "3", "--expert-model-parallel-size", "2"],
        ["--num-experts 3", "--expert-model-parallel-size 2", "does not divide"],
    ),
    "mamba": (["--hybrid-layer-pattern", "M*-"], ["--hybrid-layer-pattern M*-", "layers M are not supported"]),
    "no_experts_on_ranks": (["--expert-model-parallel-size", "2"], ["without --num-experts"]),
    "window": (["--window-size", "8,0"], ["--window-size"]),
    "megatron_fsdp_unsharded": (
        [*MEGATRON_FSDP, "--data-parallel-sharding-strategy", "no_shard"],
        ["--use-megatron-fsdp beside --data-parallel-sharding-strategy no_shard"],
    ),
    "megatron_fsdp_stages": (
        [*MEGATRON_FSDP, "--pipeline-model-parallel-size", "2"],
        ["--use-megatron-fsdp beside --pipeline-model-parallel-size 2: its mesh of ranks has no pipeline stages"],
    ),
    "megatron_fsdp_instances": (
        [*MEGATRON_FSDP, "--num-distributed-optimizer-instances", "2"],
        ["--use-megatron-fsdp beside --num-distributed-optimizer-instances 2"],
    ),
    "megatron_fsdp_fp16": ([*MEGATRON_FSDP, "--fp16"], ["--use-megatron-fsdp beside --fp16"]),
    "megatron_fsdp_quantized": (
        [*MEGATRON_FSDP, "--hq-recipe", "{folder}/lives.yaml", "--megatron-fsdp-main-params-dtype", "bf16"],
        ["with `weights: quantized` needs --megatron-fsdp-main-params-dtype fp32"],
    ),
    "fsdp2_quantized": (
        ["--use-torch-fsdp2", "--ckpt-format", "torch_dist", "--hq-recipe", "{folder}/lives.yaml"],
        ["with `weights: quantized` beside --use-torch-fsdp2", "`param_gather: both` alone has FSDP2 gather payloads"],
    ),
    "step_of_torch_save": (
        ["--ckpt-format", "torch", "--load", "{folder}", "--ckpt-step", "2"],
        ["--ckpt-step 2 beside --ckpt-format torch", "of that step and the optimizer of the latest one"],
    ),
    "cuda_graphs": (["--cuda-graph-impl", "local"], ["--cuda-graph-impl local", "leave it out"]),
    "offload_and_recompute": (
        ["--hq-offload-layers", "1", "--recompute-granularity", "selective"],
        ["--hq-offload-layers 1 beside --recompute-granularity selective"],
    ),
    **{
        flag: ([f"--{flag}", "0", *more], [f"--{flag} 0: at least 1 is expected"])
        for flag, more in {
            "num-layers": [], "num-attention-heads": [], "seq-length": [], "train-iters": [], "vocab-size": [],
            "tensor-model-parallel-size": [], "pipeline-model-parallel-size": [], "context-parallel-size": [],
            "expert-model-parallel-size": ["--num-experts", "4"],
        }.items()
    },  # fmt: skip
    "profile_before_the_start": (["--hq-profile-step", "-3"], ["--hq-profile-step -3: at least 0 is expected"]),
    "offload_negative": (["--hq-offload-layers", "-1"], ["--hq-offload-layers -1: at least 0 is expected"]),
    "more_experts_than_there_are": (
        ["--num-experts", "4", "--moe-router-topk", "9"], ["--moe-router-topk 9 of --num-experts 4: there are not as many"],
    ),
    "tracker_of_nothing": (["--load", "{folder}/tracker"], ["latest_checkpointed_iteration.txt: an iteration or", "'abc'"]),
    "damaged_checkpoint": (["--load", "{folder}/damaged"], ["iter_0000005/.metadata cannot be read: Ran out of input", "copy"]),
    "fp16_precision_aware": (
        ["--fp16", "--use-precision-aware-optimizer", "--optimizer-cpu-offload"],
        ["--use-precision-aware-optimizer beside --fp16 and --clip-grad 1: Megatron clips no gradients in FP16"],
    ),
    "profile_nowhere": (["--hq-profile-step", "2"], ["--hq-profile-step has no place to write to"]),
    "strict": (["--hq-recipe", MIXED, "--hq-strict"], ["--hq-strict", "fprop", "emulated on cpu"]),
    "strict_ragged": (
        ["--hq-recipe", MIXED, "--hq-strict", "--seq-length", "30", "--micro-batch-size", "1"],
        ["input.columnwise nvfp4 is gathered in high precision (15 rows a rank are not whole blocks of 16), of decoder"],
    ),
    "two_specs": (["--hq-recipe", "mxfp8", "--spec", "some.module", "spec"], ["--spec some.module spec", "--hq-recipe"]),
    "nan_both_ways": (
        ["--hq-check-nan", "--no-check-for-nan-in-loss-and-grad"],
        ["--hq-check-nan", "--no-check-for-nan-in-loss-and-grad"],
    ),
    "save_in_a_file": (["--save", "{folder}/empty.bin", "--save-interval", "1"], ["--save", "empty.bin: cannot be written to ("]),
    "metrics_in_a_file": (["--hq-metrics-file", "{folder}/empty.bin/m"], ["--hq-metrics-file", "cannot be written to ("]),
    "metrics_folder": (["--hq-metrics-file", "{folder}"], ["--hq-metrics-file", "cannot be written to (Is a directory)"]),
    **{
        flag: ([f"--{flag}", *value, "--hq-recipe", "mxfp8"], [f"--{flag} beside --hq-recipe mxfp8"])
        for flag, value in {
            "fp8-format": ["e4m3"],
            "fp4-format": ["e2m1"],
            "fp8-param-gather": [],
            "te-precision-config-file": ["x.yaml"],
            "tp-comm-overlap": [],
        }.items()
    },
}


def case(name: str, flags: list[str]) -> Case:
    source = [] if "--data-path" in flags else MOCK
    left_out = {"--use-distributed-optimizer": "--use-torch-fsdp2", "--bf16": "--fp16"}
    model = [flag for flag in MODEL if left_out.get(flag) not in flags]
    return Case(name, [SCRIPT, *model, *TP2, *source, *flags])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    for file, text in RECIPES.items():
        (folder / file).write_text(text)
    for name, documents in {"empty": [], "truncated": [500] * 20, "short": [10, 10]}.items():
        write_dataset(folder / name, documents)
    (folder / "empty.bin").write_bytes(b"\0\0")
    whole = folder / "truncated.bin"
    whole.write_bytes(whole.read_bytes()[:-100])
    for name, word in {"tracker": "abc", "damaged": "5"}.items():
        (folder / name / "iter_0000005").mkdir(parents=True)
        (folder / name / "latest_checkpointed_iteration.txt").write_text(word)
    for file, text in {"metadata.json": "{}", ".metadata": ""}.items():
        (folder / "damaged" / "iter_0000005" / file).write_text(text)
    return run_cases([case(name, flags) for name, (flags, _) in TABLE.items()], folder)


@pytest.mark.parametrize("name", TABLE)
def test_mistake(runs, name):
    done = runs[name]
    first, second = done.output
    assert done.exit == [2, 2], first[-2000:]
    errors = [line for line in first.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and "Traceback" not in first + second
    assert not [line for line in second.splitlines() if line.startswith("error")]
    message = first[first.index("error: ") :]
    for part in TABLE[name][1]:
        assert part in message
    assert len(message.splitlines()) <= 3


def test_message_survives_torchrun():
    """torchrun ends the other ranks when one leaves: the message must be out by then, once."""
    flags = [*MODEL, *TP2, *MOCK, "--hq-recipe", "mxpf8"]
    result = torchrun(2, SCRIPT, *flags, check=False)
    assert result.returncode != 0
    assert result.stdout.count("error: unknown recipe 'mxpf8'") == 1 and "error on rank" not in result.stdout
