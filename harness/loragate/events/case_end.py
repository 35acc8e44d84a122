"""How a run of a case ended, as the event that records it. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loragate.core.clipped import RECORD_LIMIT, clipped
from loragate.core.verdict import Failure, Judgement, Verdict
from loragate.events.model import CaseFinished
from loragate.matrix.case_run import CaseRun


def end_of(
    run: CaseRun,
    verdict: Verdict,
    *,
    worker: str,
    gpu: str,
    duration_s: float,
    judgements: Sequence[Judgement] = (),
    failure: Failure | None = None,
    message: str = "",
) -> CaseFinished:
    """`worker` and `gpu` say where it ran; `failure` and `message` what no oracle could.

    A message of any length may come from the code under test; of a long one the middle is left out.
    """
    return CaseFinished(
        run_id=run.run_id,
        subject=run.subject,
        site=run.case.site.value,
        draw=run.draw,
        repeat=run.repeat,
        seed=run.seed,
        worker=worker,
        verdict=verdict,
        judgements=tuple(replace(j, message=_recorded(j.message)) for j in judgements),
        duration_s=duration_s,
        replay=run.replay,
        gpu=gpu,
        failure=failure,
        message=_recorded(message),
    )


def _recorded(text: str) -> str:
    return clipped(text, RECORD_LIMIT)
