"""Folders that compilers write to, tried before a run starts.

A cache that cannot be written would otherwise fail each kernel on its own. Only what a run is going
to use is tried: Triton's cache where kernels are compiled, torch's cache where a subject may bring
custom operators, for which torch loads its compiler.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

from loragate.core.errors import CommandError
from loragate.core.machine import Machine
from loragate.core.verdict import ExitCode
from loragate.subjects.registry import SUBJECTS


@cache
def check_caches(subject: str, machine: Machine, *, cross_compiled: bool = False) -> None:
    """Raises CommandError for a cache that the subject needs here and that cannot be written.

    cross_compiled: whether the run also compiles its kernels for other GPUs.
    Imports Triton, so its interpreter must have been selected.
    """
    known = SUBJECTS.get(subject)
    if known is not None and not known.compiles:
        return
    if machine.device == "cuda" or cross_compiled:
        from triton import knobs

        _try_folder("Triton", Path(knobs.cache.dir), "TRITON_CACHE_DIR")
    # without the variable it lies in the folder for temporary files
    torch_cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if torch_cache:
        _try_folder("torch", Path(torch_cache), "TORCHINDUCTOR_CACHE_DIR")


def check_temporary_folder() -> None:
    """Raises CommandError where the machine has no folder for temporary files."""
    try:
        # it writes a file, in one folder after the other
        tempfile.gettempdir()
    except OSError as error:
        message = f"{error.strerror}; set TMPDIR to a folder that can be written"
        raise CommandError(message, ExitCode.INFRASTRUCTURE) from error


def _try_folder(owner: str, folder: Path, variable: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # a full disk still makes empty files
            file.write(b"loragate")
    except OSError as error:
        raise CommandError(
            f"{owner} cannot write its cache in {folder}: {error.strerror}; "
            f"set {variable} to a folder that can be written",
            ExitCode.INFRASTRUCTURE,
        ) from error
