"""Where an exception was raised, in a line for the person who reads it. Pure."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

# code that a user did not write
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_FOREIGN = ("<", *(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], *_LIBRARIES)))


def headline(error: BaseException) -> str:
    """Type and message of an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def error_and_place(error: BaseException) -> str:
    """The error in one line, with the file and line of its innermost frame that is neither this
    package's nor a library's; of any frame if all of them are."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_FOREIGN)]
    place = next((f" ({f.filename}:{f.lineno})" for f in reversed(own or frames)), "")
    return f"{headline(error)}{place}"


def innermost(trace: TracebackType | None, package: str) -> str:
    """Module and line of the innermost frame in a module of `package`."""
    place = package
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if name.startswith(f"{package}."):
            place = f"{name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return place
