"""The command that runs a case again, as whoever reads a report can paste it into a shell.

Reads the environment: `./ci/gate` and `./ci/loragate` export in LORAGATE_COMMAND how the caller's
folder reaches `ci/loragate`. Every process of a run inherits it, so all of them give the same text.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from loragate.core.checkout import project_root
from loragate.matrix.load import default_files

_COMMAND = "LORAGATE_COMMAND"
# the interpreter that the caller chose for `ci/gate`
_PYTHON = "LORAGATE_PYTHON"


def replay_command(run_id: str, draw: int, repeat: int, matrix: Sequence[Path] = ()) -> str:
    """The command that runs a draw again, together with the repeats that preceded this one.

    matrix: the files that the case was selected from; none for the default ones.
    """
    words = ["replay", run_id, "--draw", str(draw)]
    if repeat:
        words += ["--repeats", str(repeat + 1)]
    # ids are unique among the default files, so that a part of them needs no option
    if not set(matrix) <= set(default_files(project_root())):
        words += [word for path in matrix for word in ("--matrix", str(path))]
    return f"{_program()} {shlex.join(words)}"


def _program() -> str:
    command = os.environ.get(_COMMAND)
    if not command:
        # an activated environment has it on PATH
        return "loragate"
    python = os.environ.get(_PYTHON)
    prefix = f"{_PYTHON}={shlex.quote(python)} " if python else ""
    return f"{prefix}{shlex.quote(command)}"
