"""Flags, their help, versions, and that nothing happens before it is asked for."""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_hybrid.mcore import host_optimizer, validation, versions
from megatron_hybrid.mcore.arguments import HybridQuantConfig, _refuse, help_text
from megatron_hybrid.mcore.errors import UserError, user_errors

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=REPOSITORY, check=False)


def test_import_changes_nothing():
    """No Megatron, no CUDA, no patch, no environment variable, no change of torch."""
    code = """
import json, os, sys
before = dict(os.environ)
import torch
functions = {name: getattr(torch, name) for name in ("empty", "zeros", "load", "compile")}
import megatron_hybrid, megatron_hybrid.linear, megatron_hybrid.recipe, megatron_hybrid.mcore
from megatron_hybrid import HybridLinear
print(json.dumps({
    "megatron": sorted(m for m in sys.modules if m == "megatron" or m.startswith("megatron.")),
    "patches": "megatron_hybrid.patches" in sys.modules,
    "cuda": torch.cuda.is_initialized(),
    "environment": dict(os.environ) == before,
    "torch": all(getattr(torch, name) is f for name, f in functions.items()),
}))
"""
    done = run("-c", code)
    assert json.loads(done.stdout) == {
        "megatron": [], "patches": False, "cuda": False, "environment": True, "torch": True
    }, done.stderr  # fmt: skip


def test_help_is_fast_and_complete():
    done = run("scripts/pretrain_gpt.py", "--help")
    assert done.returncode == 0 and done.stderr == ""
    for field in dataclasses.fields(HybridQuantConfig):
        flag = "--" + field.name.replace("_", "-")
        assert (flag in done.stdout) == (field.name != "hq_demo_disable_attention")
    assert "high_precision,dequantized" in done.stdout
    imported = run("-X", "importtime", "scripts/pretrain_gpt.py", "--help").stderr
    assert "torch" not in imported and "megatron.core" not in imported


def test_an_assertion_of_megatron_without_words_is_told_by_its_line():
    from megatron_hybrid.mcore.errors import _words

    save_interval = None
    with pytest.raises(AssertionError) as found:
        assert save_interval is not None
    found.value.args = ()
    assert re.fullmatch(r"`assert save_interval is not None` does not hold \(test_mcore_arguments.py:\d+\)", _words(found.value))


@pytest.mark.parametrize("words", ["the same", "another message"])
def test_rank_0_stays_until_the_others_have_read_what_it_says(words, monkeypatch):
    """Its store may end with it: a rank that came later found none and died of that, with another exit status."""
    from concurrent.futures import ThreadPoolExecutor

    import torch.distributed as dist

    from megatron_hybrid.mcore import errors

    monkeypatch.setenv("WORLD_SIZE", "2")
    store, ended = dist.HashStore(), []

    def rank_0():
        errors._say_to_others("the same", store, "k")
        ended.append(store.check(["k/1"]))

    def rank_1():
        time.sleep(0.3)
        return errors._rank_0_says(words, store, "k", 1)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(rank_0), pool.submit(rank_1)
        first.result()
        assert second.result() == (words == "the same") and ended == [True]


def test_help_says_the_default():
    assert "Default: bf16" in " ".join(help_text("x").split())


@pytest.mark.parametrize(
    "message,hint",
    [
        ("unrecognized arguments: --hq-strikt", "--hq-strikt: did you mean --hq-strict?"),
        ("unrecognized arguments: --hq-strikt=1 --hq-explian", "--hq-explian: did you mean --hq-explain?"),
        ("argument --x: expected one argument", "argument --x: expected one argument"),
    ],
)
def test_parser_mistakes_name_the_nearest_flag(message, hint):
    parser = argparse.ArgumentParser()
    for flag in ("--hq-strict", "--hq-explain", "--hq-recipe"):
        parser.add_argument(flag)
    with pytest.raises(UserError) as caught:
        _refuse(parser, message)
    assert hint in str(caught.value)


@pytest.mark.parametrize("version,part", [(None, "is not installed"), ("0.18.0", "0.18.0"), ("0.20.0", "0.20.0")])
def test_other_versions_of_megatron_are_refused(monkeypatch, version, part):
    monkeypatch.setattr(versions, "installed", lambda: version)
    with pytest.raises(UserError) as caught:
        versions.require()
    assert part in str(caught.value) and versions.SUPPORTED in str(caught.value)


def test_this_version_is_accepted():
    assert versions.require() == versions.installed()


@pytest.mark.parametrize("text", ["a,b", "", "1,2,3,4", "-1,2", "0,0,0"])
def test_split_that_is_none(text):
    with pytest.raises(UserError, match="--split"):
        validation._parse_split(text)


def test_split():
    assert validation._parse_split("969, 30, 1") == [969, 30, 1]


def ranks(**changes):
    sizes = dict(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1)
    sizes |= dict(expert_model_parallel_size=1, num_experts=None, expert_tensor_parallel_size=None)
    return SimpleNamespace(**{**sizes, "world_size": 8, "sequence_parallel": False, "seq_length": 128, **changes})


def test_ranks():
    validation.check_ranks(ranks(tensor_model_parallel_size=2, pipeline_model_parallel_size=4))
    with pytest.raises(UserError, match="multiple of 3 ranks, found 8"):
        validation.check_ranks(ranks(tensor_model_parallel_size=3))
    validation.check_ranks(ranks(num_experts=8, expert_model_parallel_size=4, tensor_model_parallel_size=2))
    with pytest.raises(UserError, match="needs a multiple of 16 ranks, found 8"):
        validation.check_ranks(ranks(num_experts=8, expert_model_parallel_size=8, tensor_model_parallel_size=2))


def test_moments_on_the_host_are_not_saved_while_steps_go_on():
    """A writer beside training is given a copy of the device's tensors, but the host's tensors themselves."""
    args = SimpleNamespace(hq_offload_optimizer=True, optimizer="adam", async_save=False)
    host_optimizer.refuse_unsupported(args)
    args.async_save = True
    with pytest.raises(UserError, match="beside --async-save: the next step changes the moments while they are written"):
        host_optimizer.refuse_unsupported(args)


def test_only_our_errors_become_messages(capsys):
    with pytest.raises(SystemExit) as left, user_errors():
        raise UserError("this is wrong")
    assert left.value.code == 2 and capsys.readouterr().err == "error: this is wrong\n"
    with pytest.raises(ValueError, match="an invariant"), user_errors():
        raise ValueError("an invariant")


@pytest.mark.parametrize("flag", ["save", "tensorboard_dir", "hq_metrics_file", "hq_stats_file"])
def test_outputs_are_tried_before_training(flag, tmp_path):
    def checked(path):
        args = dict.fromkeys(("save", "tensorboard_dir", "hq_metrics_file", "hq_stats_file")) | {flag: str(path)}
        validation.check_outputs(SimpleNamespace(**args))

    checked(tmp_path / "new 雪" / "er {x}")
    (tmp_path / "file").write_text("kept")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent" / "x")
    for path in ("file/x", "nowhere/x", "x" * 300 + "/x"):
        with pytest.raises(UserError, match=f"--{flag.replace('_', '-')} .*: cannot be written to"):
            checked(tmp_path / path)
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "new 雪", "nowhere"]
