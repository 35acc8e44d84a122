"""The evidence of a trial, which its oracles share: starting an engine takes longer than judging.

Invariant: evidence is kept for the trial that is being judged alone, so that a repeat runs again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.engine.evidence import Evidence, collect
from loragate.engine.process import EngineBreach, EngineError, EngineNotStarted
from loragate.engine.world import unwritten
from loragate.matrix.case import Site
from loragate.protocol import BrokenProtocol, Trial, subject_code


@dataclass(frozen=True, slots=True)
class _Kept:
    trial: Trial
    found: Evidence | EngineError


_kept: list[_Kept] = []


def inapplicable(trial: Trial) -> str | None:
    """The reason why no oracle of engines can judge a trial, or None."""
    if trial.case.site is not Site.ENGINE:
        return f"judges engines (site {trial.case.site})"
    return unwritten(trial.case)


def judged(name: OracleName, trial: Trial, judge: Callable[[Evidence], Judgement]) -> Judgement:
    """The judgement on the evidence of a trial; INFRA for an engine that does not start. An error
    of a call and a breach of the protocol are the subject's."""
    found = _evidence(trial)
    if isinstance(found, EngineNotStarted):
        return Judgement(name, Verdict.INFRA, Failure.NOT_STARTED, str(found))
    if isinstance(found, EngineBreach):
        raise BrokenProtocol(str(found))
    if isinstance(found, EngineError):
        with subject_code():
            raise found
    return judge(found)


def _evidence(trial: Trial) -> Evidence | EngineError:
    if not _kept or _kept[0].trial is not trial:
        _kept[:] = [_Kept(trial, _collected(trial))]
    return _kept[0].found


def _collected(trial: Trial) -> Evidence | EngineError:
    target = trial.subject.engine_target(trial.case)
    try:
        return collect(target, trial.case, trial.machine, trial.seed)
    except EngineError as error:
        return error
