"""A run with several attempts, looked at attempt by attempt: each draws data of its own for all
cases, so each is judged as if it were the whole run. Pure; imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from loragate.core.verdict import Verdict, worst
from loragate.events.model import CaseFinished, CaseStarted, Event, RunStarted
from loragate.report.counts import Count, count_results
from loragate.report.outcomes import CaseOutcome, case_outcomes

_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOutcome:
    """All cases with the data of one attempt; `counts` is one row a site of a subject."""

    attempt: int
    counts: tuple[Count, ...]
    cases: tuple[CaseOutcome, ...]

    @property
    def verdict(self) -> Verdict:
        """PASS only if each expected case was judged, and passed or failed as listed."""
        verdicts = [case.verdict for case in self.cases if case.verdict is not Verdict.SKIP]
        if any(count.missing for count in self.counts):
            verdicts.append(Verdict.INCONCLUSIVE)
        return worst(verdicts)

    @property
    def troubles(self) -> tuple[CaseOutcome, ...]:
        return tuple(case for case in self.cases if case.verdict is not Verdict.PASS)

    def has(self, verdict: Verdict) -> bool:
        return any(case.verdict is verdict for case in self.cases)


def attempt_outcomes(events: Iterable[Event]) -> tuple[AttemptOutcome, ...]:
    """In the order of their numbers; none where the plan does not ask for several attempts."""
    events = tuple(events)
    plans = [event for event in events if isinstance(event, RunStarted)]
    wanted = {attempt for plan in plans for attempt in plan.attempts}
    if len(wanted) < 2:
        return ()
    of_cases: dict[int, list[Event]] = defaultdict(list)
    shared: list[Event] = []
    for event in events:
        if isinstance(event, CaseStarted | CaseFinished):
            of_cases[event.attempt].append(event)
        elif not isinstance(event, RunStarted):
            shared.append(event)
    plan = max(plans, key=repr)
    return tuple(_outcome(plan, number, [*shared, *of_cases[number]]) for number in sorted(wanted))


def in_attempts(numbers: Iterable[int]) -> str:
    """Which attempts, as the end of a sentence; nothing without any."""
    names = [str(number) for number in sorted(numbers)]
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f", in {'attempt' if len(names) == 1 else 'attempts'} {', '.join(names[:_NAMED])}{more}"


def _outcome(plan: RunStarted, attempt: int, events: list[Event]) -> AttemptOutcome:
    # what has no run ids, such as compiling, does not depend on the data
    expected = tuple(row for row in plan.expected if row.run_ids)
    alone = replace(plan, attempts=(attempt,), expected=expected)
    cases = case_outcomes([alone, *events])
    return AttemptOutcome(attempt=attempt, counts=count_results(alone, cases, ()), cases=cases)
