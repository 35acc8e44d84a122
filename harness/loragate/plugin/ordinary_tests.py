"""Pytest's reports of one ordinary test -> the event that records how it ended."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from loragate.core.clipped import RECORD_LIMIT, clipped
from loragate.core.verdict import Verdict, worst
from loragate.events.model import Event, HostTestFinished, RunStarted

# how the reasons of pytest.importorskip begin, of a package that is missing and of one that is old
_LACKING = re.compile(r"could not import |module '.*' has __version__ ")
_UNCALLED = "was set up and never called"
# how pytest marks the lines of an error, and the line of a file that raised it
_ERROR_LINE = re.compile(r"^E +(\S.*)$", re.MULTILINE)
_PLACE = re.compile(r"^(\S.*?:\d+): ", re.MULTILINE)

Report = pytest.CollectReport | pytest.TestReport


def event_of(leg: str, reports: Sequence[Report], root: Path) -> HostTestFinished:
    """The end of a test with reports of one or more phases, or of a module with a report of its
    collection. Places are given relative to `root`."""
    verdict = worst(map(verdict_of, reports))
    decisive = next(report for report in reports if verdict_of(report) is verdict)
    uncalled = verdict is Verdict.PASS and not any(map(_is_judged, reports))
    if uncalled:
        verdict = Verdict.INCONCLUSIVE
    good = verdict is Verdict.PASS
    # the last phase has what all of them have printed
    output = "" if good else _output(reports[-1])
    return HostTestFinished(
        leg=leg,
        test=decisive.nodeid,
        verdict=verdict,
        duration_s=sum(getattr(report, "duration", 0.0) for report in reports),
        message=""
        if good
        else _UNCALLED
        if uncalled
        else clipped(_message(decisive), RECORD_LIMIT),
        place="" if good else _place(decisive, root),
        detail=clipped(_text(decisive), RECORD_LIMIT) if decisive.failed else "",
        output=clipped(output, RECORD_LIMIT),
        rerun="" if good else shlex.join([_interpreter(root), "-m", "pytest", decisive.nodeid]),
    )


def failures_in_run(
    reports: Iterable[Report], events: Iterable[Event], root: Path
) -> tuple[HostTestFinished, ...]:
    """What failed besides the cases, as ordinary tests of the leg that runs the cases."""
    legs = [leg for event in events if isinstance(event, RunStarted) for leg in event.legs[:1]]
    return tuple(event_of(legs[0] if legs else "", [report], root) for report in reports)


def verdict_of(report: Report) -> Verdict:
    """A test that is skipped for lack of a package, or of a new enough one, was not judged, unlike
    other skips."""
    if report.failed:
        return Verdict.FAIL
    # an expected failure is reported as skipped
    if report.skipped and not hasattr(report, "wasxfail"):
        return Verdict.INCONCLUSIVE if _LACKING.match(skip_reason(report)) else Verdict.SKIP
    return Verdict.PASS


def _is_judged(report: Report) -> bool:
    """Whether a phase that passed says something of its test, as set-up and teardown do not."""
    return report.when in ("call", "collect") or hasattr(report, "wasxfail")


def skip_reason(report: Report) -> str:
    longrepr = report.longrepr
    # file, line and reason; a list if it came from a worker
    reason = str(longrepr[2]) if isinstance(longrepr, (tuple, list)) else report.longreprtext
    return reason.removeprefix("Skipped: ")


def _message(report: Report) -> str:
    """One line: the error, and the phase unless it is the test itself."""
    if report.skipped:
        return skip_reason(report)
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else _first_error(_text(report))
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    phase = {"collect": "collection", "setup": "setup", "teardown": "teardown"}.get(report.when)
    return f"error in {phase}: {line}" if phase else line


def _text(report: Report) -> str:
    # what pytest prints of a plain text begins with a line about the worker
    return report.longrepr if isinstance(report.longrepr, str) else report.longreprtext


def _first_error(text: str) -> str:
    found = _ERROR_LINE.search(text)
    return found[1] if found else text


def _place(report: Report, root: Path) -> str:
    """File and line of the error; those of the test where the error names none."""
    if isinstance(report.longrepr, (tuple, list)):
        return _relative(f"{report.longrepr[0]}:{report.longrepr[1]}", root)
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return _relative(f"{crash.path}:{crash.lineno}", root)
    frames = _PLACE.findall(_text(report))
    if frames:
        return _relative(frames[-1], root)
    file, line, _ = report.location or (report.nodeid, None, "")
    return file if line is None else f"{file}:{line + 1}"


def _interpreter(root: Path) -> str:
    # not resolved: the interpreter of an environment is a link that leads out of it
    return _relative(sys.executable, root)


def _relative(place: str, root: Path) -> str:
    return place.removeprefix(f"{root}/")


def _output(report: Report) -> str:
    parts = (f"{title}:\n{text.rstrip()}" for title, text in report.sections if text.strip())
    return "\n".join(parts)
