"""Text files that are there whole or not at all, and paths that are no files."""

from __future__ import annotations

import os
from pathlib import Path


def has_no_end(path: Path) -> bool:
    """Whether it is a pipe or a device, which may be read without an end."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_whole(path: Path, text: str) -> None:
    """Write under a temporary name of this process, then rename; the folder must be there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
