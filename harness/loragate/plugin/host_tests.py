"""Records every test of the host leg of the gate, which alone loads this module.

Invariant: the leg exits with 0 only if each test that was collected has ended, none of them failed,
and none was skipped for lack of a package.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from loragate.core.deadline import deadline
from loragate.core.verdict import EXIT_CODES, Verdict, worst
from loragate.events.model import HOST_LEG, HostTestsCollected, Note
from loragate.plugin.crash_report import read_stacks
from loragate.plugin.options import SETTINGS, Role, Settings
from loragate.plugin.ordinary_tests import Report, event_of, skip_reason
from loragate.plugin.watchdog import stacks_of
from loragate.run.run_record import RunRecord

# far above what the slowest test takes, and below the patience of the gate with a silent leg
DEADLINE_S = 600.0
_ENDED = ("passed", "failed", "error", "xfailed", "xpassed")
# pytest's own ways to end that the verdicts of the tests explain
_OF_TESTS = frozenset(
    {
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    }
)


def pytest_configure(config: pytest.Config) -> None:
    settings = replace(config.stash[SETTINGS], leg=HOST_LEG)
    config.stash[SETTINGS] = settings
    if settings.role is not Role.WORKER and not config.option.collectonly:
        config.pluginmanager.register(HostTests(config, settings), "loragate-host-tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with deadline(DEADLINE_S, stacks_of(item.config)):
        return (yield)


class HostTests:
    """Lives in the process that sees the reports of all workers, or runs the tests alone."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._record = RunRecord(settings.report, run=settings.run)
        self._collected: set[str] = set()
        self._started: dict[str, float] = {}
        self._phases: dict[str, list[Report]] = defaultdict(list)
        self._verdicts: dict[str, Verdict] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self._expect(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # every worker collects, and reports the same
        if not report.passed and report.nodeid not in self._verdicts:
            self._end([report])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._phases[report.nodeid].append(report)
        # a test whose worker died has no teardown
        if report.when not in ("setup", "call"):
            self._end(self._phases.pop(report.nodeid))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        worker = str(report.node.gateway.id)
        hung, frames = read_stacks(self._settings.stack_file(worker))
        what = f"no end within {DEADLINE_S:g} s" if hung else f"worker {worker} died"
        report.longrepr = "\n".join([what, *frames])
        now = time.monotonic()
        report.duration = now - self._started.get(crashitem, now)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            self._record.write([Note(text=_counts(terminal.stats))])
        verdicts = list(self._verdicts.values())
        if not self._record.is_whole:
            verdicts.append(Verdict.INFRA)
        if self._collected - self._verdicts.keys():
            verdicts.append(Verdict.INCONCLUSIVE)
        # where every test was skipped, nothing was judged
        found = worst(verdict for verdict in verdicts if verdict is not Verdict.SKIP)
        # a failure counts for more than how the session ended
        if found is Verdict.FAIL or (session.exitstatus in _OF_TESTS and found is not Verdict.PASS):
            session.exitstatus = EXIT_CODES[found].value

    def _expect(self, tests: Iterable[str]) -> None:
        fresh = tuple(test for test in tests if test not in self._collected)
        self._collected.update(fresh)
        if fresh:
            self._record.write([HostTestsCollected(leg=HOST_LEG, tests=fresh)])

    def _end(self, reports: Sequence[Report]) -> None:
        ended = event_of(HOST_LEG, reports, self._config.rootpath)
        self._verdicts[ended.test] = worst(
            [ended.verdict, self._verdicts.get(ended.test, ended.verdict)]
        )
        self._record.write([ended])


def _counts(stats: dict[str, list[Report]]) -> str:
    """Counts, and the reasons of the skips; a module that skips itself as a whole counts as one."""
    skips = Counter(skip_reason(report) for report in stats.get("skipped", ()))
    executed = sum(len(stats.get(end, ())) for end in _ENDED)
    reasons = "; ".join(f"{reason} ({number})" for reason, number in sorted(skips.items()))
    counts = f"host tests: {executed} executed, {skips.total()} skipped"
    return f"{counts}: {reasons}" if reasons else counts
