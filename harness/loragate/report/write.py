"""The reports of a run, made from its events alone."""

from __future__ import annotations

from pathlib import Path

from loragate.core.files import write_atomically
from loragate.events.log import read_events
from loragate.report.html import render_html
from loragate.report.junit import render_junit
from loragate.report.summary import Summary, summarize

JUNIT_NAME = "junit.xml"
HTML_NAME = "index.html"


def write_report(events_path: Path, out_dir: Path) -> Summary:
    """Judge the events and write the pages. Raises EventsError if there are no events, OSError."""
    summary = summarize(read_events(events_path))
    write_pages(summary, out_dir)
    return summary


def write_pages(summary: Summary, out_dir: Path) -> None:
    """Write junit.xml and index.html to `out_dir`. Raises OSError."""
    write_atomically(out_dir / JUNIT_NAME, render_junit(summary))
    write_atomically(out_dir / HTML_NAME, render_html(summary))
