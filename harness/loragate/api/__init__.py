"""Run the gate, read a report, compare two: what a script or a service of your own needs.

    from loragate import api

    report = api.run("report", api.Options(subjects=("mine.lora:MySubject",)))
    for result in report.troubles:
        print(result.run_id, result.message, result.replay)

These names stay as they are from release to release; other modules may change. Importing this
package imports no torch.
"""

from __future__ import annotations

from loragate.api.compare import Change, Difference, compare
from loragate.api.report import Leg, Report, Result, read
from loragate.api.run import Options, RunError, run
from loragate.core.verdict import ExitCode, Failure, Verdict

__all__ = [
    "Change",
    "Difference",
    "ExitCode",
    "Failure",
    "Leg",
    "Options",
    "Report",
    "Result",
    "RunError",
    "Verdict",
    "compare",
    "read",
    "run",
]
