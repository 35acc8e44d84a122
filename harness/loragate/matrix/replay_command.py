"""The command that runs a case again, as whoever reads a report can paste it into a shell.

Reads the environment: `./ci/gate` and `./ci/loragate` export in LORAGATE_COMMAND how the caller's
folder reaches `ci/loragate`. Every process of a run inherits it, so all of them give the same text.
Without it the command has the interpreter and the PYTHONPATH of the run, since another installation
of the harness would judge by other rules.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from loragate.core.checkout import data_root, project_root
from loragate.matrix.load import default_files, folded

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
        words += [word for path in folded(matrix) for word in ("--matrix", str(path))]
    script = os.environ.get(_COMMAND)
    settings = {
        # beside a script only subjects of the user, which are named `module:object`, need it
        "PYTHONPATH": _python_path(bool(script)) if ":" in run_id or not script else "",
        _PYTHON: os.environ.get(_PYTHON, "") if script else "",
    }
    given = [f"{name}={shlex.quote(value)}" for name, value in settings.items() if value]
    return " ".join([*given, shlex.join([*([script] if script else _installed()), *words])])


def _installed() -> list[str]:
    """`loragate` where PATH has that of the interpreter of this run, as in an activated
    environment; else the module with this interpreter."""
    found, own = shutil.which("loragate"), Path(sys.executable).parent
    if found and Path(found).parent.resolve() == own.resolve():
        return ["loragate"]
    return [sys.executable, "-m", "loragate"]


def _python_path(has_script: bool) -> str:
    """PYTHONPATH, without what `ci/environment.sh` adds to that of the caller of a script."""
    ours = {project_root() / name for name in ("harness", "kernels")} if has_script else set()
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(f for f in folders if f and Path(f).resolve() not in ours)
