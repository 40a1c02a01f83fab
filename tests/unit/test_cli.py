"""The installed command: recipes, explain, doctor."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from linear_cases import saved_tensors

import megatron_hybrid as mh
from megatron_hybrid.cli import COMMANDS, main
from megatron_hybrid.explain import Table, explain, format_bytes
from megatron_hybrid.gemm import DeviceKind, grouped_cuda
from megatron_hybrid.mcore.planning import explained, plans_by_step
from megatron_hybrid.model_shape import LinearShape, ModelShape, ShapeError
from megatron_hybrid.plan import INPUT, WEIGHT
from megatron_hybrid.recipe import Recipe, list_recipes

FLAGS = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 32, "micro-batch-size": 4,
         "tensor-model-parallel-size": 2, "sequence-parallel": True, "swiglu": True, "vocab-size": 100,
         "make-vocab-size-divisible-by": 64}  # fmt: skip


def model_file(tmp_path, **changes):
    path = tmp_path / "model.yaml"
    flags = {name: value for name, value in (FLAGS | changes).items() if value is not None}
    path.write_text(json.dumps(flags))
    return str(path)


def run(capsys, *argv):
    code = main(argv)
    return code, *capsys.readouterr()


def test_recipes_are_listed_a_line_each(capsys):
    code, out, _ = run(capsys, "recipes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [name for name, _ in list_recipes()]


def test_without_a_command_the_help_is_printed(capsys):
    code, out, err = run(capsys)
    assert code == 2 and not out and err.startswith("usage: megatron-hybrid") and all(name in err for name in COMMANDS)


def test_version(capsys):
    with pytest.raises(SystemExit) as leave:
        main(["--version"])
    assert leave.value.code == 0 and capsys.readouterr().out == f"megatron-hybrid {mh.__version__}\n"


def fresh(*words: str, **env: str) -> subprocess.CompletedProcess:
    """A process of its own, in which nothing is loaded yet."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=os.environ | env)


def test_a_command_that_loads_torch_says_so_before(tmp_path):
    done = fresh("-m", "megatron_hybrid.cli", "explain", "--recipe", "mxfp8", "--model", model_file(tmp_path), "--device", "cpu")
    assert done.returncode == 0 and done.stderr == "[megatron_hybrid] loading torch ...\n" and "loading" not in done.stdout


@pytest.mark.parametrize("argv", [["recipes"], ["report", "nowhere"]])
def test_others_do_not_load_it(argv):
    cli = f"from megatron_hybrid.cli import main\nimport sys\nmain({argv})\nassert 'torch' not in sys.modules"
    done = fresh("-c", cli)
    assert done.returncode == 0 and "loading" not in done.stderr, done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_launcher_says_on_rank_0_that_it_loads(rank, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('trains')")
    done = fresh("-m", "megatron_hybrid.launch", str(script), RANK=rank)
    assert done.returncode == 0 and done.stdout == "trains\n"
    said = "[megatron_hybrid] loading torch and Megatron ...\n"
    assert done.stderr.startswith(said) if rank == "0" else said not in done.stderr


def test_every_command_has_a_summary_and_help(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit) as leave:
            main([command, "--help"])
        assert leave.value.code == 0 and "usage: megatron-hybrid" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", [name for name, _ in list_recipes() if "rowscaled" not in name])
def test_explain_plans_every_recipe_for_a_gpu_that_is_not_there(recipe, capsys, tmp_path):
    path = model_file(tmp_path, **{"num-layers": 3})  # of two the first and the last are all
    code, out, err = run(capsys, "explain", "--recipe", recipe, "--model", path, "--device", "sm_90", "--per-layer")
    assert code == 0 and not err
    rows = [line for line in out.splitlines() if line.startswith(("decoder.", "output_layer"))]
    times = 2 if "late" in recipe else 1
    assert len(rows) == times * (3 * 4 + 1) * 3
    assert "on sm_90" in out.splitlines()[0] and out.count("inputs kept for backward, a microbatch:") == times


MODELS = sorted((Path(__file__).parents[2] / "configs" / "models").glob("*.yaml"))


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
@pytest.mark.parametrize("recipe", [name for name, _ in list_recipes()])
def test_explain_fits_a_terminal_and_says_all_that_rows_say(recipe, model):
    shape = ModelShape.load(model)
    if "rowscaled" in recipe and not shape.num_experts:
        return
    small = (DeviceKind("cpu"), DeviceKind("cuda", (10, 0))) if shape.num_layers < 10 else ()
    for device in (DeviceKind("cuda", (9, 0)), *small):
        at_step = plans_by_step(Recipe.load(recipe), shape, device, shape)
        text = "\n".join(map(str, explained(at_step, shape)))
        tables = [part for part in explained(at_step, shape, per_layer=True) if isinstance(part, Table)]
        assert max(map(len, text.splitlines())) <= 120 and len(text.splitlines()) <= 90 * len(at_step)
        said = [section(table_of(part)) for part in explained(at_step, shape) if " linears; gemms: " in part]
        assert len(said) == len(tables) == len(at_step)
        for found, table in zip(said, tables):
            assert found == {(row[0], row[1]): row[2:] for row in table}
            assert set(table.notes) <= set(text.splitlines())


def table_of(text: str) -> list[str]:
    return text.split("\nrow, col: ")[0].splitlines()


def section(lines: list[str]) -> dict:
    """The rows of `explain`, read back from what is printed of layers that are alike."""
    found, where, gemms = {}, "", {}
    for line in lines:
        cells = re.split(r"  +", line.strip())
        depth = len(line) - len(line.lstrip())
        if not line or set(line) <= {" ", "-"} or cells[0] in ("gemm", "bytes"):
            continue
        if depth == 0:
            where, gemms, leaves = re.sub(r" \(\d+ layers alike\)", "", line), {}, [""]
        elif depth == 2:
            leaves = (leaves if leaves[-1].endswith(",") else []) + line.strip().split(", ")
        elif cells[0] in ("fprop", "dgrad", "wgrad"):
            for leaf in leaves:
                gemms.setdefault(leaf.removesuffix(","), {})[cells[0]] = cells[1:]
        else:
            leaf = "" if cells[0] == where else cells[0]
            for name in names(where, leaf):
                found |= {(name, gemm): row(gemm, said, *cells[1:]) for gemm, said in gemms[leaf].items()}
    return found


def names(where: str, leaf: str) -> list[str]:
    if not leaf:
        return [where]
    before, _, numbers = where.rpartition(".")
    ends = [list(map(int, part.split("-"))) for part in numbers.split(",")]
    return [f"{before}.{number}.{leaf}" for run in ends for number in range(run[0], run[-1] + 1)]


def row(gemm, said, input_kept, weight_kept, gathered):
    a, b, sums, runs, pads = said
    kept = {"dgrad": f"weight {weight_kept}", "wgrad": f"input {input_kept}"}.get(gemm)
    what, _, count = kept.rpartition(" ") if kept else ("-", "", "-")
    if kept and count[-1] == "B":  # a number and its unit
        what, number = what.rpartition(" ")[::2]
        count = f"{number} {count}"
    received = dict(part.split(" ", 1) for part in gathered.split(", ")) if gathered != "-" else {}
    kind, _, backend = runs.partition(": ")
    long = [operand.replace(".row ", ".rowwise ").replace(".col ", ".columnwise ") for operand in (a, b)]
    return *long, sums, backend or kind.replace(" ", "_"), kind, pads, what, count, received.get(gemm, "-")


def test_explain_follows_bf16_edges_and_says_how_much_is_kept(capsys, tmp_path):
    path = model_file(tmp_path, **{"num-layers": 4, "first-last-layers-bf16": True})
    _, out, _ = run(capsys, "explain", "--recipe", "mxfp8", "--model", path, "--device", "cpu", "--per-layer")
    rows = {tuple(line.split()[:2]): line for line in out.splitlines() if line.startswith("decoder")}
    assert "high precision" in rows["decoder.layers.0.mlp.linear_fc2", "wgrad"]
    fc2 = rows["decoder.layers.1.mlp.linear_fc2", "wgrad"]
    ffn, rows_, blocks = 128 // 2, 32 * 4, 4  # a tensor-parallel rank's half of int(64 * 8 / 3 / 64) * 64
    assert fc2.split("input columnwise")[1].split()[:2] == format_bytes(ffn * rows_ + ffn * blocks).split()
    qkv = rows["decoder.layers.1.self_attention.linear_qkv", "fprop"]
    assert qkv.endswith(format_bytes(rows_ // 2 * (64 + 64 // 32)))  # the other rank's rows: codes and scales
    sums = next(line for line in out.splitlines() if line.startswith("inputs and gradients gathered"))
    assert "bf16: " in sums and int(sums.rpartition("(")[2].rstrip("%)")) > 50  # two of four layers are in bf16


def test_explain_counts_the_experts_of_a_rank(capsys, tmp_path):
    experts = {"num-experts": 8, "moe-ffn-hidden-size": 32, "moe-router-topk": 2, "expert-model-parallel-size": 2}
    path = model_file(tmp_path, **experts, **{"tensor-model-parallel-size": 1, "sequence-parallel": False})
    _, out, _ = run(capsys, "explain", "--recipe", "mxfp8", "--model", path, "--device", "cpu", "--per-layer")
    found = [line for line in out.splitlines() if "experts 0:8" in line]
    rows = {(line.split()[0], line.split()[3]): line for line in found}
    dgrad = rows["decoder.layers.0.mlp.experts.linear_fc2", "dgrad"]
    weight = 4 * 64 * 32 * (1 + 1 / 32)  # four of eight experts, codes and a scale a block of 32
    assert dgrad.split("weight columnwise")[1].split()[:2] == format_bytes(int(weight)).split()


@pytest.mark.parametrize("weights, strategy, bytes_kept", [
    ("high_precision", "optim_grads_params", 0), ("quantized", "optim_grads_params", 0), ("high_precision", "optim_grads", 1),
])  # fmt: skip
def test_explain_counts_no_weight_whose_memory_comes_and_goes(weights, strategy, bytes_kept, capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"version: 1\nname: r\ndefaults: mxfp8_e4m3\nweights: {weights}\nparam_gather: both\n")
    path = model_file(tmp_path, **{"use-megatron-fsdp": True, "data-parallel-sharding-strategy": strategy})
    _, out, _ = run(capsys, "explain", "--recipe", str(recipe), "--model", path, "--device", "cpu", "--per-layer")
    dgrad = next(line for line in out.splitlines() if line.startswith("decoder") and line.split()[1] == "dgrad")
    kept = "original" if (weights, bytes_kept) == ("high_precision", 0) else "columnwise"
    saved = dgrad.split(f"weight {kept}")[1].split()
    assert (saved[0] == "0") == (bytes_kept == 0), dgrad
    (held,) = [line for line in out.splitlines() if line.startswith("cast weights")]
    assert held.startswith("cast weights, held through a step: 0 beside") == (bytes_kept == 0), held


KEEPING = "bf16 mxfp8 mxfp8_fprop_nvfp4_bwd fp8_current fp8_block hp_fprop_mxfp8_bwd mxfp8_fprop_hp_bwd".split()


@pytest.mark.parametrize("recipe", KEEPING)
def test_p12_bytes_kept_are_those_that_autograd_is_given(recipe):
    """properties.md 12: what explain says is saved is what the saved-tensor hooks see."""
    layer = mh.HybridLinear(96, 64, bias=False, recipe=recipe, name="a", dtype=torch.bfloat16)
    x = torch.randn(40, 96, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors() as seen:
        layer(x)
    held = {t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in seen}
    held.pop(layer.weight.untyped_storage().data_ptr(), None)
    shape = LinearShape(40, 64, 96)
    assert sum(held.values()) == sum(shape.saved_bytes(layer.plan, operand) for operand in (INPUT, WEIGHT))
    _, dgrad, wgrad = explain(layer, {"a": shape}).records()
    for row, operand in ((dgrad, WEIGHT), (wgrad, INPUT)):
        assert row["saved"] == format_bytes(shape.saved_bytes(layer.plan, operand))


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--recipe", "mxfp9", "--model", "{model}"], "did you mean"),
        (["--recipe", "mxfp8", "--model", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["--recipe", "mxfp8", "--model", "{model}", "--device", "tpu"], "--device tpu: expected cpu, here"),
        (["--recipe", "mxfp8", "--checkpoint", "{folder}"], "is not a distributed checkpoint (no .metadata in it)"),
        (["--model", "{model}"], "needs --recipe"),
        (["--recipe", "nvfp4_rowscaled_fprop_mxfp8_bwd", "--model", "{model}"], "grouped_linear"),
    ],
)  # fmt: skip
def test_mistakes_exit_2_with_the_cause(argv, says, capsys, tmp_path):
    path = model_file(tmp_path)
    code, _, err = run(capsys, "explain", *[word.format(model=path, folder=tmp_path) for word in argv])
    assert code == 2 and err.startswith("error: ") and says in err and "Traceback" not in err


def test_a_warning_about_a_recipe_is_a_line(capsys, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("version: 1\ndefaults: {wgrad: {grad_output: mxfp8_e5m2}}\n"
                      "rules:\n- {match: {name: '*'}, use: nvfp4}\n- {match: {layers: 1}, use: nvfp4}\n")  # fmt: skip
    code, _, err = run(capsys, "explain", "--recipe", str(recipe), "--model", model_file(tmp_path), "--device", "cpu")
    lines = [line for line in err.splitlines() if "loading" not in line]
    assert code == 0 and len(lines) == 2
    assert all(line.startswith(f"warning: {recipe}:") for line in lines)
    assert "known to diverge" in lines[0] and "rules[1] never decides anything" in lines[1]


def test_the_folder_of_a_run_points_at_its_checkpoints(capsys, tmp_path):
    """The folder above that of --save is a likely mistake; files and other folders beside it are passed over."""
    saved = tmp_path / "checkpoints"
    for folder in (tmp_path / "a_tensorboard", saved):
        folder.mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    (saved / "latest_checkpointed_iteration.txt").write_text("30")
    code, _, err = run(capsys, "explain", "--recipe", "mxfp8", "--checkpoint", str(tmp_path))
    assert code == 2 and f"{tmp_path} is not a distributed checkpoint" in err
    assert f"{saved} is such a folder" in err and "a_tensorboard" not in err


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"num-layers": 0}, "--num-layers must be at least 1, found 0"),
        ({"num-layers": -3}, "--num-layers must be at least 1, found -3"),
        ({"num-layers": True}, "--num-layers must be a whole number, found True"),
        ({"num-attention-heads": 0}, "--num-attention-heads must be at least 1"),
        ({"hidden-size": 65}, "--hidden-size 65 is not a multiple of --num-attention-heads 4"),
        ({"hidden-size": "1e30"}, "--hidden-size must be a whole number, found '1e30'"),
        ({"seq-length": "long"}, "--seq-length must be a whole number, found 'long'"),
        ({"vocab-size": [1]}, "--vocab-size must be a whole number, found \\[1\\]"),
        ({"tensor-model-parallel-size": 0}, "--tensor-model-parallel-size must be at least 1"),
        ({"tensor-model-parallel-size": 3}, "--num-attention-heads 4 is not a multiple of --tensor-model-parallel-size 3"),
        ({"ffn-hidden-size": 127, "tensor-model-parallel-size": 2}, "--ffn-hidden-size 127 is not a multiple of --tensor"),
        ({"num-experts": 5, "expert-model-parallel-size": 2}, "--num-experts 5 is not a multiple of --expert-model-par"),
        ({"num-layers": 99999999999}, "make 99999999999 parts; at most 1000000 are planned"),
        ({"num-experts": 10**6}, "make 4000000 parts"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path, flags, words):
    """In one line, not by a division by zero, by memory that runs out, or by figures of a model that nobody can train."""
    sizes = {"num-layers": 4, "hidden-size": 64, "num-attention-heads": 4}
    path = tmp_path / "model.yaml"
    path.write_text(json.dumps(sizes | flags))
    with pytest.raises(ShapeError, match=rf"model\.yaml: .*{words}"):
        ModelShape.load(path)


def test_a_model_file_without_an_end_is_refused(tmp_path):
    (tmp_path / "model.yaml").symlink_to("/dev/zero")
    with pytest.raises(ShapeError, match=r"model\.yaml: not a regular file"):
        ModelShape.load(tmp_path / "model.yaml")


def test_a_model_file_without_a_size_names_file_and_flag(tmp_path):
    with pytest.raises(ShapeError, match=r"model\.yaml: --num-layers must be a whole number, found None"):
        ModelShape.load(model_file(tmp_path, **{"num-layers": None}))


def test_doctor_finds_this_installation_ready():
    """In a process of its own: it imports Megatron."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_hybrid.cli", "doctor", "--json"], capture_output=True, text=True, timeout=120
    )
    findings = {(f["section"], f["what"]): f for f in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [f for f in findings.values() if f["state"] == "FAIL"]
    patches = {what.removeprefix("patch ") for section, what in findings if section == "Megatron" and "patch" in what}
    from megatron_hybrid.patches import PATCHES

    stand_in = set() if torch.cuda.is_available() else {"cpu_device"}
    assert patches == {*PATCHES, "arguments", "metrics"} | stand_in
    assert "in use" in findings["kernels", "CPU"]["detail"]
    if not torch.cuda.is_available():
        assert "needs a CUDA device" in findings["gemm backends on cpu", "scaled_mm"]["detail"]


def test_doctor_says_that_a_folder_on_the_path_is_no_installation(monkeypatch):
    import megatron_hybrid.observe.doctor as doctor

    def missing():
        raise ImportError("cannot import name 'patches'")

    monkeypatch.setattr(doctor, "_patches", missing)
    last = list(doctor._megatron())[-1]
    assert last.state == "FAIL" and "cannot import name 'patches'" in last.detail and "make setup" in last.detail


def test_doctor_says_what_is_broken(monkeypatch, capsys):
    import megatron_hybrid.observe.doctor as doctor

    def missing(device_type):
        raise RuntimeError("the cpu kernels are not built")

    monkeypatch.setattr(doctor.kernels, "extension", missing)
    monkeypatch.setattr(doctor, "_megatron", lambda: iter(()))
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and "FAIL  CPU: the cpu kernels are not built" in out and out.endswith("not ready: CPU\n")


def test_explain_says_how_experts_run_and_counts_a_rank_s_share_of_them(capsys):
    model = str(Path(__file__).parents[2] / "configs" / "models" / "qwen3_30b_a3b.yaml")
    rows = "grouped_mm" if grouped_cuda.library() is None else "grouped_decoding"
    expected = {
        "nvfp4_rowscaled_fprop_mxfp8_bwd": f"at once: fprop {rows}, dgrad {rows}, wgrad grouped_mm; groups padded to 32",
        "fp8_rowwise": "at once: fprop grouped_fp8",
        "fp8_block": "at once: fprop grouped_fp8, dgrad grouped_fp8, wgrad grouped_fp8; groups padded to 128",
        "fp8_current": "one by one: input.rowwise fp8_current_e4m3: a group has one scale",
    }
    for recipe, words in expected.items():
        assert main(["explain", "--model", model, "--recipe", recipe, "--device", "sm_90"]) == 0
        out = capsys.readouterr().out
        assert f"experts run {words}" in out and "linear_fc1 experts 0:128 and 95 more" in out
        # 48 layers of attention and 16 of 128 experts, and the output layer
        weights = 48 * (2048 * (4096 + 1024) + 4096 * 2048 + 16 * 3 * 2048 * 768) + 2048 * 151936
        assert f"parameters of {format_bytes(2 * weights)} in bf16" in out
