"""JUnit XML (xunit2) for CI systems that read it. An export, never the source of truth. Pure.

One suite for every (subject, site), one for the compiled kernels of a subject, one for the legs.
A wrong answer is a failure; one that is listed as a finding passes and names the finding. What was
not judged is an error, so that no reader shows it as passed.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from loragate.core.verdict import Judgement, Verdict
from loragate.events.model import COMPILE_SITE, CompileResult, Skipped
from loragate.report.outcomes import CaseOutcome, LegOutcome
from loragate.report.summary import Summary
from loragate.report.wording import figures, headline, outcome_name, place, printable

_LEGS = "gate.legs"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    suite: str
    name: str
    verdict: Verdict
    message: str = ""
    kind: str = ""
    detail: str = ""
    time_s: float = 0.0
    properties: Mapping[str, str] = field(default_factory=dict)


def render_junit(summary: Summary) -> str:
    """The document as text, with its declaration."""
    root = ElementTree.Element("testsuites", name="loragate")
    totals: dict[str, int] = defaultdict(int)
    for name, entries in _by_suite(_entries(summary)).items():
        tallies = _tallies(entries)
        for key, number in tallies.items():
            totals[key] += number
        time_s = sum(entry.time_s for entry in entries)
        suite = ElementTree.SubElement(root, "testsuite", name=name, time=f"{time_s:.3f}")
        suite.attrib.update(_texts(tallies))
        if summary.plan:
            suite.set("timestamp", printable(summary.plan.started_at))
        for entry in entries:
            _add(suite, entry)
    root.attrib.update(_texts(totals))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, "unicode")}\n'


def _entries(summary: Summary) -> Iterable[_Entry]:
    yield from map(_case, summary.cases)
    yield from map(_compile, summary.compiles)
    yield from map(_leg, summary.legs)
    if summary.plan:
        owners = {i: row for row in summary.plan.expected for i in row.run_ids}
        for run_id in summary.missing:
            row = owners[run_id]
            yield _Entry(
                suite=f"{row.subject}.{row.site}",
                name=_short(run_id, row.subject, row.site),
                verdict=Verdict.INCONCLUSIVE,
                message="planned, but never started",
            )
        yield from map(_skipped, summary.plan.skipped)


def _case(case: CaseOutcome) -> _Entry:
    verdict = outcome_name(case) if case.is_known else case.verdict.value
    properties = {"verdict": verdict, "subject": case.subject}
    if case.known:
        properties["finding"] = ", ".join(finding.id for finding in case.known)
    if case.shown:
        properties |= {
            "seed": str(case.shown.seed),
            "draw": str(case.shown.draw),
            "repeat": str(case.shown.repeat),
            "worker": case.shown.worker,
        }
    detail = [case.message, *map(_evidence, case.evidence), f"replay: {case.replay}"]
    return _Entry(
        suite=f"{case.subject}.{case.site}",
        name=_short(case.run_id, case.subject, case.site),
        verdict=case.verdict,
        message=headline(case.message),
        kind=case.failure or case.verdict,
        detail="\n".join(part for part in detail if part),
        time_s=case.shown.duration_s if case.shown else 0.0,
        properties=properties,
    )


def _evidence(judgement: Judgement) -> str:
    parts = (figures(judgement), place(judgement), judgement.message)
    return f"{judgement.oracle}: {judgement.verdict}: " + "; ".join(part for part in parts if part)


def _compile(result: CompileResult) -> _Entry:
    return _Entry(
        suite=f"{result.subject}.{COMPILE_SITE}",
        name=f"{result.kernel}.{result.specialisation}.{result.arch}",
        verdict=result.verdict,
        message=headline(result.message),
        kind=result.verdict,
        detail=result.message,
        properties={
            "verdict": result.verdict.value,
            "subject": result.subject,
            "compiled": str(result.compiled).lower(),
        },
    )


def _leg(leg: LegOutcome) -> _Entry:
    return _Entry(
        suite=_LEGS,
        name=leg.name,
        verdict=leg.verdict,
        message=headline(leg.message),
        kind=leg.verdict,
        detail=leg.message,
        time_s=leg.finished.duration_s if leg.finished else 0.0,
        properties={"verdict": leg.verdict.value},
    )


def _skipped(skipped: Skipped) -> _Entry:
    return _Entry(
        suite=f"{skipped.subject}.{skipped.site}",
        name=_short(skipped.run_id, skipped.subject, skipped.site),
        verdict=Verdict.SKIP,
        message=headline(skipped.reason),
        properties={"verdict": Verdict.SKIP.value, "subject": skipped.subject},
    )


def _short(run_id: str, subject: str, site: str) -> str:
    # the name of the suite holds the rest
    return run_id.removeprefix(f"{subject}.{site}.")


def _by_suite(entries: Iterable[_Entry]) -> Mapping[str, list[_Entry]]:
    suites: dict[str, list[_Entry]] = defaultdict(list)
    for entry in entries:
        suites[entry.suite].append(entry)
    return {suite: suites[suite] for suite in sorted(suites)}


def _tallies(entries: Iterable[_Entry]) -> dict[str, int]:
    tally = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for entry in entries:
        tally["tests"] += 1
        element = _ELEMENTS.get(entry.verdict)
        if element is not None:
            tally[_COUNTERS[element]] += 1
    return tally


_ELEMENTS: Mapping[Verdict, str] = {
    Verdict.FAIL: "failure",
    Verdict.INFRA: "error",
    Verdict.INCONCLUSIVE: "error",
    Verdict.SKIP: "skipped",
}
_COUNTERS = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def _add(suite: ElementTree.Element, entry: _Entry) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=printable(entry.suite),
        name=printable(entry.name),
        time=f"{entry.time_s:.3f}",
    )
    if entry.properties:
        properties = ElementTree.SubElement(case, "properties")
        for name, value in entry.properties.items():
            ElementTree.SubElement(properties, "property", name=name, value=printable(value))
    element = _ELEMENTS.get(entry.verdict)
    if element is not None:
        outcome = ElementTree.SubElement(case, element, message=entry.message)
        if element != "skipped":
            outcome.set("type", printable(entry.kind))
            outcome.text = printable(entry.detail)


def _texts(numbers: Mapping[str, int]) -> dict[str, str]:
    return {key: str(number) for key, number in numbers.items()}
