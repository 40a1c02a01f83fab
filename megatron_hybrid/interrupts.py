"""Ctrl-C inside an import ends the process there.

Libraries answer a failed import with another way to go: torch goes on without numpy, for one, whatever it failed of. The
KeyboardInterrupt is lost to them, and the process goes on with modules that are half there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_IMPORTING = "<frozen importlib._bootstrap>"


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """This frame, its caller's, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextlib.contextmanager
def imports_end_at_once(leave: Callable[[FrameType], None]) -> Iterator[None]:
    """Within, a SIGINT that comes in an import is followed by leave(the frame it came in), then ends the process; any
    other raises KeyboardInterrupt as ever.

    Outside the main thread, and where SIGINT is ignored (as under nohup) or somebody else's, nothing is changed.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        if any(caller.f_code.co_filename == _IMPORTING for caller in stack(frame)):
            leave(frame)
            end_by_signal()
        signal.default_int_handler(number, frame)

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if ours and signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def say(line: str) -> None:
    """On stderr, also from a handler that came in the middle of a print, which Python's own streams refuse."""
    os.write(2, f"{line}\n".encode())


def end_by_signal() -> None:
    """End this process by SIGINT: a shell and torchrun then know why it ended."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
