"""What a planted process does, which is a fork of the server.

It imports the planted copy of the package and runs the order, with the code of the gate: cases
here, host tests and launches each in a process of their own, because Triton's interpreter is on in
one of them and off in the other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from loragate.core.child_process import run_module
from loragate.core.verdict import Judgement, Verdict
from loragate.faults.gate_contents import SUBJECT
from loragate.faults.model import Part, Sighting
from loragate.faults.order import IMPORT, Begun, Order, Recorder, Suite, check_planted, read_order
from loragate.faults.planting import PACKAGE
from loragate.matrix.case import Case
from loragate.matrix.ids import case_id


def run_order(order_path: Path, transcript_path: Path) -> None:
    """Run an order beside which the planted copy of the package lies."""
    order, recorder = read_order(order_path), Recorder(transcript_path)
    recorder.begin(Begun(IMPORT))
    check_planted(order_path)
    if order.suite is Suite.BASELINE:
        _run_baseline(order, recorder)
    else:
        for part, listed in (("host_tests", order.tests), ("launches", order.launches)):
            if listed:
                _run_apart(part, str(order_path), str(transcript_path))
        _run_cases(order, recorder)
    recorder.finish()


def _run_apart(part: str, order_path: str, transcript_path: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    module = f"loragate.faults.{part}"
    done = run_module(module, order_path, transcript_path, env=environment, capture=False)
    if done.returncode:
        sys.exit(f"{module} ended with {done.returncode}")


def _run_baseline(order: Order, recorder: Recorder) -> None:
    import_module(PACKAGE)
    from loragate.faults.baseline_suite.suite import run_test, tests_of

    for test in tests_of(order.module, order.launches):
        recorder.begin(Begun(test))
        recorder.record(run_test(test))


def _run_cases(order: Order, recorder: Recorder) -> None:
    if order.cases:
        recorder.begin(Begun(IMPORT))
        import_module(PACKAGE)
    for case in order.cases:
        verdicts = []
        for sighting in _judge(case, recorder):
            recorder.record(sighting)
            verdicts.append(sighting.verdict)
        if order.first_only and Verdict.FAIL in verdicts:
            break


def _judge(case: Case, recorder: Recorder) -> Iterator[Sighting]:
    from loragate.matrix.case_run import CaseRun
    from loragate.oracles import ORACLES
    from loragate.run.trial import open_trial, run_trial

    name = case_id(case)
    trial = open_trial(CaseRun(SUBJECT, case))
    for oracle in case.oracles:
        if oracle not in ORACLES:
            continue
        recorder.begin(Begun(oracle, name, Part.CASE))
        if isinstance(trial, str):
            yield _sighting(name, Judgement(oracle, Verdict.SKIP, message=trial))
        else:
            # one at a time, so that it is known which oracle was running if the process dies
            (judgement,) = run_trial(replace(trial, case=replace(case, oracles=(oracle,))))
            yield _sighting(name, judgement)


def _sighting(case: str, judgement: Judgement) -> Sighting:
    where = ", ".join(f"{key} {value}" for key, value in judgement.where.items())
    return Sighting(
        judge=judgement.oracle,
        case=case,
        verdict=judgement.verdict,
        failure=judgement.failure,
        message=judgement.message + (f" ({where})" if where else ""),
        part=Part.CASE,
    )
