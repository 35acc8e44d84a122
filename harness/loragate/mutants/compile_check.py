"""The compile leg of the gate on a planted package."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from loragate.core.child_process import ProcessPool, python_module
from loragate.core.verdict import ExitCode, Failure, Verdict
from loragate.core.warm_server import environment_of_forks
from loragate.mutants.unit_runs import text_of
from loragate.mutants.units import Ended

_COMPILE_LEG_S = 900.0
COMPILE_LEG = "compile leg"


def run_compile_leg(folder: Path, processes: ProcessPool) -> Ended | None:
    """How the leg fails, or None; it compiles what has changed. INFRA if it was ended, or could not
    judge."""
    log = folder / "compile.txt"
    environment = environment_of_forks(gpu=True)
    path = os.pathsep.join([str(folder / "planted" / "kernels"), environment["PYTHONPATH"]])
    begin = time.monotonic()
    with log.open("wb") as output:
        child = processes.start(
            python_module("loragate.compile_leg"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment | {"PYTHONPATH": path},
            cwd=folder,
        )
        try:
            code = child.wait(_COMPILE_LEG_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            processes.end(child)
    if code == 0:
        return None
    lines = [line for line in text_of(log).splitlines() if not line.startswith("pass:")]
    return Ended(
        unit=COMPILE_LEG,
        verdict=Verdict.FAIL if code in (ExitCode.WRONG, None) else Verdict.INFRA,
        judge=COMPILE_LEG,
        kind=Failure.HANG.value if code is None else f"exit code {code}",
        message=next((line for line in lines if ":" in line and "compile leg:" not in line), ""),
        seconds=time.monotonic() - begin,
    )
