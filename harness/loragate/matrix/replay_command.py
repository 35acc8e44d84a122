"""The command that runs a case again, as whoever reads a report can paste it into a shell.

Reads the environment: `./ci/gate` and `./ci/loragate` export in LORAGATE_COMMAND how the caller's
folder reaches `ci/loragate`. Every process of a run inherits it, so all of them give the same text.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from loragate.core.checkout import data_root, project_root
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
    if not set(matrix) <= set(default_files(data_root())):
        words += [word for path in matrix for word in ("--matrix", str(path))]
    command = os.environ.get(_COMMAND)
    settings = {
        # only subjects of the user, which are named `module:object`, are found through it
        "PYTHONPATH": _python_path() if ":" in run_id else "",
        _PYTHON: os.environ.get(_PYTHON, "") if command else "",
    }
    given = [f"{name}={shlex.quote(value)}" for name, value in settings.items() if value]
    # an activated environment has `loragate` on PATH
    return " ".join([*given, shlex.join([command or "loragate", *words])])


def _python_path() -> str:
    """PYTHONPATH without what `ci/environment.sh` adds to that of the caller."""
    ours = {project_root() / name for name in ("harness", "kernels")}
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(f for f in folders if f and Path(f).resolve() not in ours)
