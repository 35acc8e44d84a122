"""Whole files or none, files of users that are no pipes, and a lock for files that several
processes change."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

# what people write by hand, or a command records
_LARGEST_TEXT = 16 << 20


def read_regular(path: Path) -> bytes:
    """The content of a file that a user names. Raises OSError, also for a pipe or a device, which
    would be waited for or read for ever, and for a file beyond 16 MiB."""
    # a pipe without a writer is opened at once
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "must be a regular file, not a pipe, device or folder")
        if state.st_size > _LARGEST_TEXT:
            allowed = f"at most {_LARGEST_TEXT >> 20} MiB"
            raise OSError(errno.EFBIG, f"must have {allowed} (got {state.st_size} bytes)")
        return file.read(_LARGEST_TEXT)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to a new file beside `path`, then put it in its place: a reader never sees half
    a file, and a killed process leaves the old one. A link stays, and leads to the new file, and a
    file keeps who may read it."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # bytes of a log that are no text arrive as surrogates; they must not cost the report
    data = text.encode(errors="backslashreplace")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp hides its files from everybody else, who may be a web server
        Path(name).chmod(stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Before hours are spent on what `write_atomically` could not put there. Raises OSError."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    # of some file systems only an attempt says that they take no files
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}."):
        pass


def replace_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a new folder, and put that in the place of `folder`, which may not exist:
    nobody finds half of it. The old one stays where that fails. OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as path:
        # a folder that is made by tempfile cannot be read by others, who may run the engine
        new, old = Path(path) / "new", Path(path) / "old"
        new.mkdir()
        write(new)
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise


def lock_of(path: Path) -> FileLock:
    """The lock of those who read `path`, change it and write it back."""
    # not beside the file, where the lock would stay behind and may lie on a network disk
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return FileLock(Path(tempfile.gettempdir()) / f"loragate-{os.getuid()}-{name}.lock")
