"""Whole files or none: a reader never sees half a report."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to a new file beside `path`, then put it in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # bytes of a log that are no text arrive as surrogates; they must not cost the report
    data = text.encode(errors="backslashreplace")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp hides its files from everybody else, who may be a web server
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
