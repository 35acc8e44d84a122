"""Runs host tests of a planted checkout in this process and writes how each ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest
from _pytest.runner import runtestprotocol

from loragate.core.deadline import deadline
from loragate.core.verdict import Failure, Verdict
from loragate.events.model import HOST_LEG
from loragate.mutants.units import Ended, Transcript
from loragate.plugin.ordinary_tests import Report, event_of

COLLECTION = "collection of "


def run_tests(
    paths: Sequence[Path], root: Path, plugin: SelectedTests | TracedTests
) -> int | pytest.ExitCode:
    """A session of pytest as the host leg has it, but for its workers."""
    options = [f"--rootdir={root}", f"--config-file={root / 'pyproject.toml'}"]
    return pytest.main([*map(str, paths), *options, "-q", "-p", "no:cacheprovider"], [plugin])


def ended_well(code: int | pytest.ExitCode) -> bool:
    """Whether a session went to its end. A module that is skipped as a whole has no tests."""
    return code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


class SelectedTests:
    """Runs the tests of `deadlines` in their order, and those that are not in `known`, which sound
    code does not have. Ends the session with the first failure, and then has `failed`."""

    def __init__(
        self,
        deadlines: Mapping[str, float],
        least_deadline_s: float,
        known: frozenset[str],
        transcript: Transcript,
        stacks: IO[bytes],
        root: Path,
    ) -> None:
        self._deadlines, self._least, self._known = deadlines, least_deadline_s, known
        self._transcript, self._stacks, self._root = transcript, stacks, root
        self._reports: list[Report] = []
        self.failed = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_name = {item.nodeid: item for item in items}
        new = [item for name, item in by_name.items() if name not in self._known]
        items[:] = [by_name[name] for name in self._deadlines if name in by_name] + new

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._end(COLLECTION + report.nodeid, [report])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._transcript.begin(item.nodeid)
        self._reports = []
        with deadline(self._deadlines.get(item.nodeid, self._least), self._stacks):
            result = yield
        self._end(item.nodeid, self._reports)
        if self.failed:
            item.session.shouldfail = "a test failed"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def _end(self, name: str, reports: Sequence[Report]) -> None:
        ended = _ended(name, reports, self._root)
        self._transcript.end(ended)
        self.failed = self.failed or ended.fails_gate

    def conclude(self, code: int | pytest.ExitCode) -> None:
        """A session that broke off by itself has failed, although no test has."""
        if not self.failed and not ended_well(code):
            message = f"pytest ended with exit code {int(code)}"
            name = "host tests"
            self._transcript.end(
                Ended(unit=name, verdict=Verdict.INFRA, judge=name, message=message)
            )
            self.failed = True


class TracedTests:
    """Runs every test in a fork of its own, with `trace(name)` called within; what a fork wrote
    stands in the transcript. What a module runs when it is collected is traced by `collect`."""

    def __init__(self, transcript: Transcript, root: Path, trace: Callable[[str], str]) -> None:
        self._transcript, self._root, self._trace = transcript, root, trace

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        if isinstance(collector, pytest.Module):
            self._trace(COLLECTION + collector.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._transcript.end(_ended(COLLECTION + report.nodeid, [report], self._root))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        process = os.fork()
        if process == 0:
            self._run(item)
        _, status = os.waitpid(process, 0)
        if status:
            # or the test would be missing from the reach, and nobody would know
            message = f"its process ended with {os.waitstatus_to_exitcode(status)}"
            self._transcript.end(Ended(unit=item.nodeid, verdict=Verdict.INFRA, message=message))
        return True

    def _run(self, item: pytest.Item) -> None:
        code = 1
        try:
            begin = time.monotonic()
            trace = self._trace(item.nodeid)
            reports = runtestprotocol(item, log=False)
            ended = _ended(item.nodeid, reports, self._root)
            self._transcript.end(
                Ended(
                    unit=item.nodeid,
                    verdict=ended.verdict,
                    message=ended.message,
                    seconds=time.monotonic() - begin,
                    trace=trace,
                )
            )
            code = 0
        finally:
            # a fork must not go on with the session
            os._exit(code)


def _ended(name: str, reports: Sequence[Report], root: Path) -> Ended:
    event = event_of(HOST_LEG, reports, root)
    failed = event.verdict is Verdict.FAIL
    return Ended(
        unit=name,
        verdict=event.verdict,
        judge="host test",
        kind=Failure.EXCEPTION.value if failed else "",
        message=f"{event.message} ({event.place})" if event.message else "",
        seconds=event.duration_s,
    )
