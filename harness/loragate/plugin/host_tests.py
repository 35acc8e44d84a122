"""Records how many host tests ran and were skipped. Loaded by the host leg of the gate only.

Invariant: if tests were skipped because a package is missing, the leg is incomplete.
"""

from __future__ import annotations

from collections import Counter

import pytest

from loragate.core.verdict import ExitCode
from loragate.events.log import EventWriter
from loragate.events.model import Note
from loragate.plugin.options import SETTINGS, Role

# how the reason of pytest.importorskip begins
_MISSING = "could not import"
_ENDED = ("passed", "failed", "error", "xfailed", "xpassed")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    settings = session.config.stash[SETTINGS]
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if settings.role is Role.WORKER or terminal is None:
        return
    skips = Counter(_reason(report) for report in terminal.stats.get("skipped", ()))
    executed = sum(len(terminal.stats.get(end, ())) for end in _ENDED)
    with EventWriter(settings.events, run=settings.run) as writer:
        writer.write(Note(text=summary_of(executed, skips)))
    if session.exitstatus == ExitCode.OK and any(_MISSING in reason for reason in skips):
        session.exitstatus = ExitCode.INCOMPLETE.value


def summary_of(executed: int, skips: Counter[str]) -> str:
    """Counts, and the reasons of the skips; a module that skips itself as a whole counts as one."""
    reasons = "; ".join(f"{reason} ({number})" for reason, number in sorted(skips.items()))
    counts = f"host tests: {executed} executed, {skips.total()} skipped"
    return f"{counts}: {reasons}" if reasons else counts


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    longrepr = report.longrepr
    # file, line and reason; a list if it came from a worker
    reason = str(longrepr[2]) if isinstance(longrepr, (tuple, list)) else report.longreprtext
    return reason.removeprefix("Skipped: ")
