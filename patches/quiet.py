"""Hide what Megatron says at import about packages that are absent on purpose."""

from __future__ import annotations

import contextlib
import warnings

ABSENT = (
    r"Transformer[ -]Engine and Apex are not installed",
    r"Apex is not installed",
    r"absl\.logging is not installed",
    r"Only transformer-engine>=.* supports MoE experts",
    r"The following imports from `dynamic_context\.py` will be removed",
)


@contextlib.contextmanager
def quiet_missing_te_warnings():
    """Import Megatron without its warnings that Transformer Engine, Apex or absl are missing.

    What Megatron falls back to is in the patches' table and in ``megatron-hybrid doctor``; all other warnings
    still show.
    """
    with warnings.catch_warnings():
        for message in ABSENT:
            warnings.filterwarnings("ignore", message=message)
        yield
