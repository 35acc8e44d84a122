"""Files of an adapter, opened only if they are files: a pipe or a device would be read for ever."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lorakernels.adapters.errors import AdapterError

MAX_TEXT_BYTES = 16 << 20
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder or a link to one. AdapterError if it may not be looked at."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as bad:
        raise AdapterError(f"{path}: cannot be read: {bad.strerror}") from bad
    except ValueError as bad:
        # such as a null character
        raise AdapterError(f"{path}: is no path: {bad}") from bad


def require_regular(path: Path) -> None:
    """AdapterError unless `path` is a regular file or a link to one; opens nothing."""
    try:
        _check_kind(path, path.stat().st_mode)
    except FileNotFoundError as missing:
        raise AdapterError(f"{path}: file not found; a PEFT adapter has one") from missing
    except OSError as bad:
        raise AdapterError(f"{path}: cannot be read: {bad.strerror}") from bad


def read_small_file(path: Path) -> bytes:
    """The content of a regular file of at most MAX_TEXT_BYTES. AdapterError."""
    require_regular(path)
    try:
        # for reading, without waiting should the file have become a pipe since
        with open(os.open(path, os.O_NONBLOCK), "rb") as file:
            _check_kind(path, os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_TEXT_BYTES + 1)
    except OSError as bad:
        raise AdapterError(f"{path}: cannot be read: {bad.strerror}") from bad
    if len(content) > MAX_TEXT_BYTES:
        allowed = f"at most {MAX_TEXT_BYTES >> 20} MiB"
        raise AdapterError(f"{path}: must have {allowed} (got {path.stat().st_size} bytes)")
    return content


def _check_kind(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for matches, name in _KINDS if matches(mode)), "something else")
        raise AdapterError(f"{path}: must be a regular file (got {kind})")
