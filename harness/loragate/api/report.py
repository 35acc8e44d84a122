"""A report as an object. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loragate.core.verdict import ExitCode, Failure, Verdict
from loragate.events.log import read_events
from loragate.report.outcomes import CaseOutcome
from loragate.report.summary import Summary, summarize
from loragate.run.folder import EVENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One case of one subject over all its draws and repeats.

    `failure` is the kind of a FAIL or INFRA, `message` one or more lines that explain any verdict
    but PASS. `replay` is the command that runs the deciding trial again, in the folder where the
    gate was called. `trials` were run, `bad_trials` of them did not pass. `known` are the ids of
    listed findings that the case shows; with nothing else against it its verdict is PASS.
    """

    run_id: str
    subject: str
    site: str
    verdict: Verdict
    failure: Failure | None
    message: str
    replay: str
    trials: int
    bad_trials: int
    known: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A process of the gate, for instance the cases or the host tests."""

    name: str
    verdict: Verdict
    message: str
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A judged run, which `run` names. `reasons` say why the verdict is not PASS, the gravest
    first; `missing` are run ids that were planned and never started. `seconds` is None for a run
    that was killed, and `commit` is "" where the code has no history."""

    folder: Path
    run: str
    verdict: Verdict
    exit_code: ExitCode
    reasons: tuple[str, ...]
    results: Mapping[str, Result]
    missing: tuple[str, ...]
    legs: tuple[Leg, ...]
    seconds: float | None
    commit: str
    versions: Mapping[str, str]
    machine: Mapping[str, str]

    @property
    def troubles(self) -> tuple[Result, ...]:
        """Results that did not pass, in order of their run ids."""
        return tuple(item for item in self.results.values() if item.verdict is not Verdict.PASS)


def read(folder: str | Path) -> Report:
    """The report in a folder, judged from its events alone, as `loragate report` does.

    Raises ValueError where there are none, or a newer version wrote them.
    """
    path = Path(folder)
    return _report(path, summarize(read_events(path / EVENTS)))


def _report(folder: Path, summary: Summary) -> Report:
    plan, finished = summary.plan, summary.finished
    return Report(
        folder=folder,
        run=plan.run if plan else "",
        verdict=summary.verdict,
        exit_code=summary.exit_code,
        reasons=summary.reasons,
        results={case.run_id: _result(case) for case in summary.cases},
        missing=summary.missing,
        legs=tuple(
            Leg(
                name=leg.name,
                verdict=leg.verdict,
                message=leg.message,
                seconds=leg.finished.duration_s if leg.finished else None,
            )
            for leg in summary.legs
        ),
        seconds=finished.duration_s if finished else None,
        commit=plan.commit if plan else "",
        versions=plan.versions if plan else {},
        machine=plan.machine if plan else {},
    )


def _result(case: CaseOutcome) -> Result:
    return Result(
        run_id=case.run_id,
        subject=case.subject,
        site=case.site,
        verdict=case.verdict,
        failure=case.failure,
        message=case.message,
        replay=case.replay,
        trials=case.trials,
        bad_trials=len(case.bad_trials),
        known=tuple(finding.id for finding in case.known),
    )
