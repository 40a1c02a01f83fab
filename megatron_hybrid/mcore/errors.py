"""A user's mistake ends in one message, not in a traceback on every rank."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys

EXIT_CODE = 2
_KEY = "megatron_hybrid/error"
_PEER_SECONDS = 5


class UserError(ValueError):
    """Something the user can put right; the message says what was found, where, and what would be right."""


@contextlib.contextmanager
def user_errors():
    """Turn our errors into a message and exit status 2 on every rank.

    The checks give every rank the same answer, so rank 0 alone prints it; another rank speaks only where its
    message differs, or where it is the first on another host, whose files may differ.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, _user_errors()):
            raise
        _report(str(error))
        raise SystemExit(EXIT_CODE) from None


def _user_errors() -> tuple[type, ...]:
    from ..patches import PatchError
    from ..plan import PlanError
    from ..recipe import RecipeError

    return UserError, RecipeError, PlanError, PatchError


def _report(message: str) -> None:
    rank = int(os.environ.get("RANK", "0"))
    store = _store()
    if rank == 0:
        if store is not None:
            store.set(_KEY, message)
        print(f"error: {message}", file=sys.stderr, flush=True)
    elif _must_speak(store, message):
        print(f"error on rank {rank}: {message}", file=sys.stderr, flush=True)


def _must_speak(store, message: str) -> bool:
    """Whether rank 0 does not say the same for this rank."""
    if store is None:
        return int(os.environ.get("GROUP_RANK", "0")) > 0 and int(os.environ.get("LOCAL_RANK", "0")) == 0
    try:
        store.wait([_KEY], datetime.timedelta(seconds=_PEER_SECONDS))
    except Exception:  # rank 0 has no error, or is gone
        return True
    return store.get(_KEY).decode() != message


def _store():
    """The store of the default process group, or None before there is one."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_store()
