"""What the line after Ctrl-C says; whole runs are in tests/distributed/test_interrupted_runs.py."""

from __future__ import annotations

import sys
import types

import pytest

from megatron_hybrid.mcore import interrupt


def stack(*names: str):
    """The stack of an exception that was raised in functions of these names, each called by the one before."""
    source = "".join(f"def {name}(inner): inner[0](inner[1:])\n" for name in names)
    functions: dict = {}
    exec(source, functions)

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        inner = [*(functions[name] for name in names), stop]
        inner[0](inner[1:])
    return caught.tb


@pytest.fixture
def arguments(monkeypatch, tmp_path):
    args = types.SimpleNamespace(train_iters=100, curr_iteration=4, iteration=0, save=str(tmp_path))
    module = types.SimpleNamespace(_GLOBAL_ARGS=args, _GLOBAL_TENSORBOARD_WRITER=None)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    return args


def test_where(arguments):
    says = lambda *names: interrupt.describe(stack(*names)).partition(";")[0]  # noqa: E731
    assert says("pretrain", "train", "train_step") == "interrupted in iteration 5 of 100"
    saving = "interrupted while a checkpoint was saved, after iteration 5 of 100"
    assert says("pretrain", "train", "save_checkpoint") == saving
    assert says("pretrain", "evaluate") == "interrupted in an evaluation"
    arguments.iteration = 50  # resumed: Megatron's own count has not caught up yet
    arguments.curr_iteration = 0
    assert says("pretrain", "train") == "interrupted in iteration 51 of 100"
    del arguments.curr_iteration
    assert says("pretrain") == "interrupted before the first iteration"


def test_what_is_saved(arguments, tmp_path):
    says = lambda: interrupt.describe(stack("train")).partition("; ")[2]  # noqa: E731
    assert says() == f"no checkpoint is in {tmp_path} yet"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3\n")
    assert says() == f"the last checkpoint in {tmp_path} is of iteration 3"
    arguments.save = None
    assert says() == "nothing was saved: there is no --save"
