"""What the line after Ctrl-C says; whole runs are in tests/distributed/test_interrupted_runs.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import types

import pytest

from megatron_hybrid import interrupts
from megatron_hybrid.mcore import interrupt


@pytest.fixture
def arguments(monkeypatch, tmp_path):
    args = types.SimpleNamespace(train_iters=100, curr_iteration=4, iteration=0, save=str(tmp_path))
    module = types.SimpleNamespace(_GLOBAL_ARGS=args, _GLOBAL_TENSORBOARD_WRITER=None)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    return args


def test_where(arguments):
    says = lambda *names: interrupt.describe(set(names)).partition(";")[0]  # noqa: E731
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
    says = lambda: interrupt.describe({"train"}).partition("; ")[2]  # noqa: E731
    assert says() == f"no checkpoint is in {tmp_path} yet"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3\n")
    assert says() == f"the last checkpoint in {tmp_path} is of iteration 3"
    arguments.save = None
    assert says() == "nothing was saved: there is no --save"


FORGIVING = """
    import os, signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
    from {module} import {name}
    sys.path.insert(0, {folder!r})
    with {name}({arguments}):
        try:
            import slow
        except BaseException:
            pass  # as torch does where numpy's import fails
    print("went on")
"""


@pytest.mark.parametrize(
    ("module", "name", "arguments", "line"),
    [
        ("megatron_hybrid.interrupts", "imports_end_at_once", "lambda frame: print(frame.f_code.co_name)", "inner"),
        ("megatron_hybrid.mcore.errors", "user_errors", "", "interrupted before the first iteration"),
    ],
)
def test_an_import_that_forgives_does_not_lose_it(tmp_path, module, name, arguments, line):
    inner = """
        import os, signal
        def inner():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass
        inner()
    """
    (tmp_path / "slow.py").write_text(textwrap.dedent(inner))
    code = textwrap.dedent(FORGIVING).format(module=module, name=name, arguments=arguments, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-u", "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert (done.stdout + done.stderr).strip() == line


@pytest.fixture
def pythons_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_elsewhere_it_is_the_exception_and_the_handler_goes_with_the_block(pythons_handler):
    with pytest.raises(KeyboardInterrupt), interrupts.imports_end_at_once(pytest.fail):
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_stays_ignored(pythons_handler):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.imports_end_at_once(pytest.fail):
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
