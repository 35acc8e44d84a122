"""A run with several draws or repeats, draw by draw: each draw is random data for all cases, and
is judged as if it were the whole run. Pure; imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from loragate.core.verdict import Verdict, worst
from loragate.events.model import CaseFinished, CaseStarted, Event, Expected, RunStarted
from loragate.report.counts import Count, count_results
from loragate.report.outcomes import CaseOutcome, case_outcomes

_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOutcome:
    """All cases with the data of one draw; `counts` has one row for each site of a subject.

    `repeats` is how often the plan runs each case with this data.
    """

    draw: int
    repeats: int
    counts: tuple[Count, ...]
    cases: tuple[CaseOutcome, ...]

    @property
    def verdict(self) -> Verdict:
        """PASS only if each expected case was judged in every repeat, and passed or failed as
        listed."""
        verdicts = [case.verdict for case in self.cases if case.verdict is not Verdict.SKIP]
        if any(count.missing for count in self.counts):
            verdicts.append(Verdict.INCONCLUSIVE)
        return worst(verdicts)

    @property
    def troubles(self) -> tuple[CaseOutcome, ...]:
        return tuple(case for case in self.cases if case.verdict is not Verdict.PASS)

    def has(self, verdict: Verdict) -> bool:
        return any(case.verdict is verdict for case in self.cases)


def draw_outcomes(events: Iterable[Event]) -> tuple[DrawOutcome, ...]:
    """In the order of their numbers; none where the plan runs each case once."""
    events = tuple(events)
    plans = [event for event in events if isinstance(event, RunStarted)]
    wanted = {draw for plan in plans for draw in plan.draws}
    if len(wanted) * max((plan.repeats for plan in plans), default=1) < 2:
        return ()
    of_cases: dict[int, list[Event]] = defaultdict(list)
    shared: list[Event] = []
    for event in events:
        if isinstance(event, CaseStarted | CaseFinished):
            of_cases[event.draw].append(event)
        elif not isinstance(event, RunStarted):
            shared.append(event)
    plan = max(plans, key=repr)
    return tuple(_outcome(plan, draw, [*shared, *of_cases[draw]]) for draw in sorted(wanted))


def in_draws(numbers: Iterable[int]) -> str:
    """Which draws, as the end of a sentence; nothing if there are none."""
    names = [str(number) for number in sorted(numbers)]
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f", in {'draw' if len(names) == 1 else 'draws'} {', '.join(names[:_NAMED])}{more}"


def _without(names: Collection[str], row: Expected) -> Expected:
    left = tuple(name for name in row.run_ids if name not in names)
    return replace(row, run_ids=left, count=row.count - len(row.run_ids) + len(left))


def _outcome(plan: RunStarted, draw: int, events: list[Event]) -> DrawOutcome:
    # results without run ids, such as those of the compiler, do not depend on the data
    expected = [row for row in plan.expected if row.run_ids]
    if draw != min(plan.draws):
        expected = [_without(plan.once, row) for row in expected]
    alone = replace(plan, draws=(draw,), expected=tuple(row for row in expected if row.run_ids))
    cases = case_outcomes([alone, *events])
    counts = count_results(alone, cases, ())
    return DrawOutcome(draw=draw, repeats=plan.repeats, counts=counts, cases=cases)
