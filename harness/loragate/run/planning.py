"""The plan of a selection on this machine, and the results that are expected of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from loragate.core.machine import detect_machine, select_interpreter
from loragate.events.model import Expected, Skipped
from loragate.findings.ledger import any_loses_device
from loragate.findings.load import own_findings
from loragate.matrix.case_run import CaseRun
from loragate.matrix.load import load_cases
from loragate.matrix.plan import Candidate, Plan, plan
from loragate.matrix.plan import Skipped as SkippedCase
from loragate.matrix.selection import Selection

if TYPE_CHECKING:
    from loragate.matrix.case import Case
    from loragate.protocol import Capabilities


def plan_selection(selection: Selection) -> tuple[Plan, Mapping[str, Capabilities | str]]:
    """The plan on this machine, and what each subject can do here, or why it can do nothing.

    Raises ValueError for errors of the user, and CommandError where nothing can run. Otherwise
    imports torch and the subjects.
    """
    cases = load_cases(selection.matrix)
    select_interpreter()
    from loragate.run.trial import load_subject

    abilities = {name: load_subject(name)[1] for name in selection.subjects}
    candidates = [
        Candidate(name, partial(refusal_of, name, have)) for name, have in abilities.items()
    ]
    made = plan(
        cases,
        candidates,
        selection.tier,
        detect_machine(),
        draws=selection.draws,
        repeats=selection.repeats,
        patterns=selection.patterns,
        once=partial(any_loses_device, own_findings()),
    )
    return made, abilities


def refusal_of(name: str, have: Capabilities | str, case: Case) -> str | None:
    from loragate.run.trial import asking, refusal

    with asking(name, "Capabilities.refuses(case)"):
        return refusal(case, have)


def expected_results(
    made: Plan, *, leg: str, unusable: Collection[str], only: Collection[str] | None
) -> tuple[Expected, ...]:
    """One row for each site of a subject, in that order.

    unusable: subjects that can run nothing here. They were asked for, so all of their cases are
    expected: a missing package must not let a run pass.
    only: the run ids that count; None for all.
    """
    names: dict[tuple[str, str], dict[str, None]] = {}
    skipped = (skip for skip in made.skipped if skip.subject in unusable)
    items: tuple[CaseRun | SkippedCase, ...] = (*made.planned, *skipped)
    for item in items:
        run_id = item.run_id
        if only is None or run_id in only:
            names.setdefault((item.subject, item.case.site.value), {})[run_id] = None
    return tuple(
        Expected(leg=leg, subject=subject, site=site, count=len(found), run_ids=tuple(found))
        for (subject, site), found in sorted(names.items())
    )


def skipped_cases(
    made: Plan, *, unusable: Collection[str], only: Collection[str] | None
) -> tuple[Skipped, ...]:
    """The cases that the plan leaves out, with the reasons; arguments as above."""
    return tuple(
        Skipped(
            run_id=skip.run_id,
            subject=skip.subject,
            site=skip.case.site.value,
            reason=skip.reason,
        )
        for skip in made.skipped
        if skip.subject not in unusable and (only is None or skip.run_id in only)
    )
