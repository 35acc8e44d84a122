"""JUnit XML (xunit2) for CI systems that read it. An export, never the source of truth. Pure.

One suite for every (subject, site), one for the compiled kernels of a subject, one for the host
tests, one for legs that broke by themselves and one for what is wrong with the run as a whole.
A wrong answer is a failure; one that is listed as a finding passes and names the finding. What was
not judged is an error, so that no reader shows it as passed.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping

from loragate.core.clipped import clipped
from loragate.core.verdict import Verdict
from loragate.report.junit_entries import Entry, entries_of
from loragate.report.summary import Summary
from loragate.report.text import one_line, printable

# of one element; readers of these documents load them as a whole
_TEXT_LIMIT = 20_000

_ELEMENTS: Mapping[Verdict, str] = {
    Verdict.FAIL: "failure",
    Verdict.INFRA: "error",
    Verdict.INCONCLUSIVE: "error",
    Verdict.SKIP: "skipped",
}
_COUNTERS = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def render_junit(summary: Summary) -> str:
    """The document as text, with its declaration."""
    root = ElementTree.Element("testsuites", name="loragate")
    totals: dict[str, int] = defaultdict(int)
    for name, entries in _by_suite(entries_of(summary)).items():
        tallies = _tallies(entries)
        for key, number in tallies.items():
            totals[key] += number
        suite = ElementTree.SubElement(root, "testsuite", name=name)
        suite.set("time", _seconds(sum(entry.time_s for entry in entries)))
        suite.attrib.update(_texts(tallies))
        if summary.plan:
            suite.set("timestamp", one_line(summary.plan.started_at))
        for entry in entries:
            _add(suite, entry)
    # the schema has no count of skipped tests here
    root.attrib.update(_texts({key: totals[key] for key in ("tests", "failures", "errors")}))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, "unicode")}\n'


def _by_suite(entries: Iterable[Entry]) -> Mapping[str, list[Entry]]:
    suites: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        suites[one_line(entry.suite)].append(entry)
    return {suite: suites[suite] for suite in sorted(suites)}


def _tallies(entries: Iterable[Entry]) -> dict[str, int]:
    tally = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for entry in entries:
        tally["tests"] += 1
        element = _ELEMENTS.get(entry.verdict)
        if element is not None:
            tally[_COUNTERS[element]] += 1
    return tally


def _add(suite: ElementTree.Element, entry: Entry) -> None:
    """A test case; the schema wants its children in this order."""
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=one_line(entry.suite),
        name=one_line(entry.name),
        time=_seconds(entry.time_s),
    )
    if entry.properties:
        properties = ElementTree.SubElement(case, "properties")
        for name, value in entry.properties.items():
            ElementTree.SubElement(properties, "property", name=name, value=one_line(value))
    element = _ELEMENTS.get(entry.verdict)
    if element is not None:
        outcome = ElementTree.SubElement(case, element, message=one_line(entry.message))
        if element != "skipped":
            outcome.set("type", one_line(entry.kind))
            outcome.text = _body(entry.detail)
    if entry.output:
        ElementTree.SubElement(case, "system-out").text = _body(entry.output)


def _body(text: str) -> str:
    return clipped(printable(text), _TEXT_LIMIT)


def _seconds(seconds: float) -> str:
    # an event may hold any float, -0.0 too
    return f"{seconds:.3f}" if 0 < seconds < math.inf else "0.000"


def _texts(numbers: Mapping[str, int]) -> dict[str, str]:
    return {key: str(number) for key, number in numbers.items()}
