"""Accounts for the cases of a session: which were collected, which ended, and the exit code.

Invariant: a session exits with 0 only if every collected case was judged and passed, and pytest
itself has no failure to report. The controller of a distributed session does this, or the only
process of a session without workers, but never a worker.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from loragate.core.early_exit import early_exit_is
from loragate.core.verdict import ExitCode
from loragate.matrix.case_run import CaseRun
from loragate.plugin.collection import (
    case_run_of,
    case_run_of_id,
    paths_hold_cases,
    selected_runs,
    stands_for_no_case,
    without_cases,
)
from loragate.plugin.crash_report import crash_report
from loragate.plugin.judging import failed_as_judged, mark_judged, unrecorded
from loragate.plugin.options import SETTINGS, Ownership, Role, Settings
from loragate.plugin.ordinary_tests import Report, failures_in_run
from loragate.plugin.session_run import INTERRUPTED, SessionRun
from loragate.plugin.sticky import lost_device
from loragate.report.evidence import render_evidence
from loragate.report.terminal import Colour, render_summary

# a case may die of what an earlier one on its worker has broken (wandb #12152)
_RAN_BEFORE_SHOWN = 5
# without a limit, workers that die before they have collected would be replaced forever
_MAX_EARLY_DEATHS = 3


def pytest_configure(config: pytest.Config) -> None:
    settings = config.stash[SETTINGS]
    if settings.role is not Role.WORKER and not config.option.collectonly:
        config.pluginmanager.register(Accounting(config, settings), "loragate-accounting")


class Accounting:
    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._run = SessionRun(settings)
        self._collected: dict[str, CaseRun] = {}
        self._lost_device: set[str] = set()
        # of fixtures, of modules that cannot be collected, and of ordinary tests
        self._other_failures: list[Report] = []
        self._started: dict[str, float] = {}
        self._recent: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_RAN_BEFORE_SHOWN))
        self._ready_nodes: set[str] = set()
        self._early_deaths = 0
        # whether there are tests of cases of which none was selected, and whether that was all
        self._lacks_cases = self._without_cases = False
        # whether the session ended itself, and why it ended before its tests did
        self._stopped = False
        self._interruption = ""
        # run ids that pytest shows itself
        self._shown: set[str] = set()

    # not when the collection finishes, as it also does where it fails for a mistake of the user
    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        # without workers a subject is imported, and runs, in this process
        with early_exit_is(ExitCode.WRONG):
            self._expect((item.nodeid, case_run_of(item)) for item in session.items)
            return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self._ready_nodes.add(node.gateway.id)
        self._expect((nodeid, case_run_of_id(self._config, nodeid)) for nodeid in ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        if error is None or node.gateway.id in self._ready_nodes:
            return
        self._early_deaths += 1
        if self._early_deaths >= _MAX_EARLY_DEATHS:
            self._stop(f"{self._early_deaths} workers died before they could run anything: {error}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        run = self._collected.get(report.nodeid)
        # what the events hold of a case is judged from them alone
        if report.failed and not failed_as_judged(report):
            self._other_failures.append(report)
        if run is None:
            return
        if report.failed:
            self._shown.add(run.run_id)
        if report.when == "call":
            self._recent[_worker_of(report)].append(run.id)
        if lost_device(report):
            self._lost_device.add(report.nodeid)
        problem = unrecorded(report)
        if problem is not None:
            # nothing that runs from here on could be judged
            self._stop(problem)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # with --continue-on-collection-errors the cases of other modules still run
        if report.failed:
            self._other_failures.append(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        run = self._collected.get(crashitem)
        if run is None:
            return
        if crashitem in self._lost_device:
            # the case was reported before its worker exited on purpose
            report.outcome, report.when, report.longrepr = "passed", "teardown", None
            return
        worker = _worker_of(report)
        finished = crash_report(
            run,
            worker=worker,
            gpu=_gpu_of(report),
            duration_s=time.monotonic() - self._started.get(crashitem, time.monotonic()),
            stacks=self._settings.stack_file(worker),
            ran_before=tuple(self._recent[worker]),
        )
        self._run.record.write([finished])
        file, _, test = crashitem.partition("::")
        report.when, report.location = "call", (file, None, test)
        report.longrepr = render_evidence(finished)
        mark_judged(report)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # pytest calls it for each early end, as after a number of failures; Ctrl-C gives no reason
        self._interruption = str(excinfo.value) or INTERRUPTED

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.INTERNAL_ERROR:
            return
        is_owned = self._settings.ownership is Ownership.OWNED
        if self._stopped and not (is_owned and self._run.begun):
            # there is no run to be closed, or the gate closes it
            session.exitstatus = ExitCode.INFRASTRUCTURE.value
            return
        if not self._run.begun:
            self._refuse_nothing(session)
            return
        others = failures_in_run(
            self._other_failures, self._run.record.read().events, self._config.rootpath
        )
        self._run.record.write(others)
        exit_code = self._run.finish(
            self._collected.values(), other_failures=len(others), stopped=self._interruption
        )
        # if all cases passed, failures that pytest has seen elsewhere still count
        if exit_code is not ExitCode.OK:
            session.exitstatus = exit_code.value

    def _refuse_nothing(self, session: pytest.Session) -> None:
        """A session that was asked for cases of which none was selected has judged nothing."""
        empty = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self._config.option.collectonly or not empty:
            return
        asked = self._lacks_cases or paths_hold_cases(self._config)
        if asked and not selected_runs(self._config):
            session.exitstatus = ExitCode.INCOMPLETE.value
            self._without_cases = True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._without_cases:
            terminalreporter.write_line(f"loragate: {without_cases(self._config)}")
        if self._run.summary is not None:
            colour = Colour.ON if terminalreporter.hasmarkup else Colour.OFF
            terminalreporter.section("loragate")
            # pytest has already shown most of the cases that did not pass
            troubles = self._run.summary.troubles
            unseen = tuple(case for case in troubles if case.run_id not in self._shown)
            summary = replace(self._run.summary, cases=unseen)
            terminalreporter.write_line(render_summary(summary, colour))
            terminalreporter.write_line(f"report: {self._settings.report}")

    def _stop(self, problem: str) -> NoReturn:
        """End the session for lack of what it needs to judge anything more."""
        self._stopped = True
        self._run.record.note_problem(problem)
        # with 3, which is an internal error to pytest, there would be no summary
        pytest.exit(problem)

    def _expect(self, found: Iterable[tuple[str, CaseRun | None]]) -> None:
        first = not self._collected
        for nodeid, run in found:
            if run is not None:
                self._collected[nodeid] = run
            self._lacks_cases = self._lacks_cases or stands_for_no_case(nodeid)
        if first and self._collected:
            self._run.start(self._collected.values())


def _worker_of(report: pytest.TestReport) -> str:
    node = getattr(report, "node", None)
    return str(node.gateway.id) if node is not None else "main"


def _gpu_of(report: pytest.TestReport) -> str:
    node = getattr(report, "node", None)
    return str(node.gateway.spec.env.get("CUDA_VISIBLE_DEVICES", "")) if node is not None else ""
