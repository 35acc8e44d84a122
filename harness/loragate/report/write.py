"""The reports of a run, made from its events alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from loragate.core.files import write_atomically
from loragate.events.log import read_events
from loragate.report.html import render_html
from loragate.report.junit import render_junit
from loragate.report.step_summary import cut_to, render_step_summary
from loragate.report.summary import Summary, summarize
from loragate.report.text import one_line

JUNIT_NAME = "junit.xml"
HTML_NAME = "index.html"

_STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
# GitHub refuses the summaries of a whole step if they are larger
_STEP_SUMMARY_LIMIT = 1024 * 1024


def write_report(events_path: Path, out_dir: Path) -> Summary:
    """Judge the events and write the pages. Raises EventsError if there are no events, OSError."""
    summary = summarize(read_events(events_path))
    write_pages(summary, out_dir)
    return summary


def write_pages(summary: Summary, out_dir: Path) -> None:
    """Write junit.xml and index.html to `out_dir`. Raises OSError."""
    write_atomically(out_dir / JUNIT_NAME, render_junit(summary))
    write_atomically(out_dir / HTML_NAME, render_html(summary))


def append_step_summary(summary: Summary, report: Path, environ: Mapping[str, str]) -> None:
    """Add the page of a run to the summary of the step of GitHub Actions, if there is one."""
    append_to_step(lambda: render_step_summary(summary, report), environ)


def append_to_step(render: Callable[[], str], environ: Mapping[str, str]) -> None:
    """Add what `render` gives to the summary of the step of GitHub Actions, if this process is part
    of one.

    Others write to the same file. A page that cannot be written costs a line on stderr only.
    """
    name = environ.get(_STEP_SUMMARY)
    if not name:
        return
    try:
        problem = _append(Path(name), render())
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        print(f"{_STEP_SUMMARY}: {one_line(name)}: no page was added: {problem}", file=sys.stderr)


def _append(path: Path, page: str) -> str:
    """Why nothing was written, "" if it was."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    with open(descriptor, "wb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        # what others wrote may not end with a line, where a heading would be text
        fitting = cut_to(f"\n\n{page}", _STEP_SUMMARY_LIMIT - size)
        if not fitting:
            return f"it already holds {size} of {_STEP_SUMMARY_LIMIT} bytes"
        data = fitting.encode()
        written = file.write(data)
        return "" if written == len(data) else f"{written} of {len(data)} bytes were written"
