"""How the ordinary tests of a run ended, derived from events alone. Pure; imports no torch.

Invariant: a test that was collected and has not ended is inconclusive, and no event can improve a
verdict that another event has worsened.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence

from loragate.core.verdict import Verdict, worst
from loragate.events.model import Event, HostTestFinished, HostTestsCollected
from loragate.report.known import HARMLESS

_ORDER = (Verdict.FAIL, Verdict.INFRA, Verdict.INCONCLUSIVE)


def host_test_outcomes(events: Iterable[Event]) -> tuple[HostTestFinished, ...]:
    """The worst end of each test, sorted by leg and test."""
    ends: dict[tuple[str, str], list[HostTestFinished]] = defaultdict(list)
    collected: set[tuple[str, str]] = set()
    for event in events:
        if isinstance(event, HostTestFinished):
            ends[event.leg, event.test].append(event)
        elif isinstance(event, HostTestsCollected):
            collected.update((event.leg, test) for test in event.tests)
    return tuple(
        _shown(ends[key]) if key in ends else _lost(*key) for key in sorted(ends.keys() | collected)
    )


def bad_host_tests(tests: Iterable[HostTestFinished]) -> tuple[HostTestFinished, ...]:
    """Those that neither passed nor were skipped, failures first."""
    bad = [test for test in tests if test.verdict not in HARMLESS]
    return tuple(sorted(bad, key=lambda test: _ORDER.index(test.verdict)))


def rerun_command(test: HostTestFinished) -> str:
    """Runs the test again, in the root of the project."""
    return test.rerun or f"python -m pytest {shlex.quote(test.test)}"


def _shown(ends: Sequence[HostTestFinished]) -> HostTestFinished:
    verdict = worst(end.verdict for end in ends)
    return next(end for end in sorted(ends, key=repr) if end.verdict is verdict)


def _lost(leg: str, test: str) -> HostTestFinished:
    return HostTestFinished(
        leg=leg,
        test=test,
        verdict=Verdict.INCONCLUSIVE,
        duration_s=0.0,
        message="collected, but never ended",
    )
