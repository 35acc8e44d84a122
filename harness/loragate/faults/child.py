"""The planted process: `python -m loragate.faults.child ORDER TRANSCRIPT`.

It imports the planted copy of the package and runs the order, with the same code that runs a case
of the gate.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from loragate.core.machine import select_interpreter
from loragate.core.verdict import Judgement, Verdict
from loragate.faults.model import Sighting
from loragate.faults.order import Order, Recorder, Suite, read_order
from loragate.matrix.case import Case
from loragate.matrix.ids import case_id

SUBJECT = "lorakernels"


def main(order_path: str, transcript_path: str) -> int:
    order, recorder = read_order(Path(order_path)), Recorder(Path(transcript_path))
    recorder.begin("import")
    select_interpreter()
    import torch

    # several planted processes share the cores
    torch.set_num_threads(1)
    import lorakernels

    home = Path(str(lorakernels.__file__)).resolve()
    assert home.is_relative_to(Path(order.planted).resolve()), f"the planted copy is not {home}"
    for sighting in _sightings(order, recorder):
        recorder.record(sighting)
    recorder.finish()
    return 0


def _sightings(order: Order, recorder: Recorder) -> Iterator[Sighting]:
    if order.suite is Suite.BASELINE:
        from loragate.faults.baseline_suite.suite import run_test, tests_of

        for test in tests_of(order.module, order.checks):
            recorder.begin(test)
            yield run_test(test)
        return
    for check in order.checks:
        from loragate.faults.checks import run_check

        recorder.begin(check)
        yield run_check(check)
    for case in order.cases:
        yield from _judge(case, recorder)


def _judge(case: Case, recorder: Recorder) -> Iterator[Sighting]:
    from loragate.matrix.case_run import CaseRun
    from loragate.oracles import ORACLES
    from loragate.run.trial import open_trial, run_trial

    name = case_id(case)
    trial = open_trial(CaseRun(SUBJECT, case))
    for oracle in case.oracles:
        if oracle not in ORACLES:
            continue
        recorder.begin(oracle)
        if isinstance(trial, str):
            yield Sighting(judge=oracle, case=name, verdict=Verdict.SKIP, message=trial)
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
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
