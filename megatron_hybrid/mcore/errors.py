"""A user's mistake ends in one message, not in a traceback on every rank."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import sys
import traceback

from . import interrupt

EXIT_CODE = 2
_PEER_TIMEOUT = datetime.timedelta(seconds=20)
_PATIENCE = datetime.timedelta(seconds=5)  # of rank 0, that has said what there is to say


class UserError(ValueError):
    """Something the user can put right; the message says what was found, where, and what would be right."""


@contextlib.contextmanager
def user_errors():
    """Turn our errors into a message and exit status 2 on every rank; an interrupt (Ctrl-C) into a line, see `interrupt`.

    The checks give every rank the same answer, so rank 0 alone prints it. The others wait until it has, because
    torchrun ends all ranks when the first one leaves; one whose message differs prints its own.
    """
    try:
        with interrupt.ending_quietly():
            yield
    except Exception as error:
        if not isinstance(error, _user_errors()):
            raise
        _report(str(error), getattr(error, "alone", None))
        raise SystemExit(EXIT_CODE) from None


@contextlib.contextmanager
def megatrons_checks():
    """Turn what Megatron's own checks of arguments raise into `UserError`."""
    try:
        yield
    except (AssertionError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"Megatron's arguments: {_words(error)}") from error


def _words(error: Exception) -> str:
    """What a check says; of one without words its line, and where that is."""
    if str(error):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"`{last.line}` does not hold ({os.path.basename(last.filename)}:{last.lineno})"


def _user_errors() -> tuple[type, ...]:
    """Our classes that mean a user's mistake; those whose module nobody has imported cannot have been raised."""
    classes = {
        "..recipe_source": "RecipeError", "..plan": "PlanError", "..model_shape": "ShapeError",
        "..patches.framework": "PatchError", "..patches.save_errors": "CannotSave",
    }  # fmt: skip
    modules = {name: sys.modules.get(importlib.util.resolve_name(name, __package__)) for name in classes}
    return UserError, *(getattr(module, classes[name]) for name, module in modules.items() if module)


def _report(message: str, alone: bool | None) -> None:
    """alone: whether this rank may be the only one with an error; if not, whatever rank 0 says will do. None: rank 0 says
    the same."""
    rank, store = int(os.environ.get("RANK", "0")), _store()
    key = f"megatron_hybrid/error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
        _say_to_others(message, store, key)
    elif alone or not _rank_0_says(message if alone is None else None, store, key, rank):
        print(f"error on rank {rank}: {message}", file=sys.stderr, flush=True)


def _say_to_others(message: str, store, key: str) -> None:
    """And stay until they have read it: the store may end with rank 0, and torchrun ends all ranks with the first."""
    others = [f"{key}/{rank}" for rank in range(1, int(os.environ.get("WORLD_SIZE", "1")))]
    if store is None or not others:
        return
    with contextlib.suppress(Exception):  # a rank without an error never answers
        store.set(key, message)
        store.wait(others, _PATIENCE)


def _rank_0_says(message: str | None, store, key: str, rank: int) -> bool:
    """Wait for rank 0's message; whether it is this one, or None: any."""
    if store is None:  # then only another host can differ, whose first rank speaks for it
        return int(os.environ.get("GROUP_RANK", "0")) == 0 or int(os.environ.get("LOCAL_RANK", "0")) > 0
    try:
        store.wait([key], _PEER_TIMEOUT)
        said = store.get(key).decode()
        store.set(f"{key}/{rank}", "read")
    except Exception:  # rank 0 has no error, or is gone
        return False
    return message is None or said == message


def _store():
    """What the ranks can talk through: the process group's store, before that torchrun's, or None."""
    import torch.distributed as dist

    if not dist.is_available():
        return None
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(*address, is_master=False, timeout=_PEER_TIMEOUT)
    except Exception:  # the message matters more than who else prints it
        return None
