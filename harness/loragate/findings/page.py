"""docs/findings.md from the ledger. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loragate.findings.ledger import Finding, Kind
from loragate.findings.pattern import CasePattern

_INTRO = """\
# Findings in released software

This page is written by `loragate docs` from `cases/findings/vllm.yaml`; edit that file instead.

Items with a probe are reproduced by

    ./ci/loragate findings

against the installed vLLM. The command prints what it observed and fails as soon as an item no
longer reproduces on a version of its range; its range is then closed with the version of the fix.
Without a GPU the Triton kernels of vLLM run in the interpreter, with a substitute for its compiled
alignment of routed pairs; items that need a GPU are reported as not run. Items with a case are
reproduced by

    loragate gate --subject vllm

Items whose cases are all nightly need `--tier nightly` as well. A case counts as known as long as
it fails in the listed way, up to the listed size, and in no other way. Any other failure fails
the gate. So does an item without a probe whose case no longer fails; where a case shows an item
in some draws of its data only, the item says in how many, and the gate fails once the draws
without it exclude that rate. The *size* is the largest value of each named metric that the oracle
may report, and the place of the worst element. `wrong_rows` are rows that are wrong by
themselves, `rest_ratio` is the error of all other rows over what is allowed.

A *defect* is a wrong result for an input that nothing forbids. A *hazard* is correct as long as
every caller knows of it. The items are about the operators: a server may prevent an item by what it
does before it calls them. A *pair* is one token and one of the experts that it was routed to."""

_HEADINGS = {Kind.DEFECT: "Defects", Kind.HAZARD: "Hazards"}


def render_page(findings: Sequence[Finding]) -> str:
    """The whole page, ending in a newline; defects first, else in the order of the ledger."""
    parts = [_INTRO]
    for kind, heading in _HEADINGS.items():
        chosen = [finding for finding in findings if finding.kind is kind]
        if chosen:
            parts += [f"## {heading}", *map(_section, chosen)]
    return "\n\n".join(parts) + "\n"


def _section(finding: Finding) -> str:
    lines = [
        f"### {finding.title}",
        "",
        finding.statement,
        "",
        f"* versions: {finding.subject} `{finding.versions}`",
        f"* seen on: {finding.seen_on}",
        f"* evidence: {finding.evidence}",
        *_ways(finding),
    ]
    if finding.upstream:
        lines.append(f"* upstream: {', '.join(finding.upstream)}")
    return "\n".join(lines)


def _ways(finding: Finding) -> Iterator[str]:
    """How it is reproduced, and what else may show it."""
    case = finding.case
    if finding.probe is not None:
        yield f"* reproduced by: `./ci/loragate findings`, probe `{finding.probe}`"
    if case is None:
        return
    verb = "may show in" if finding.probe is not None else "reproduced by"
    yield f"* {verb}: {_case_command(finding.subject, case)}"
    if finding.also:
        yield f"* shown by the same cases of: {', '.join(finding.also)}"
    if case.extent:
        yield f"* listed size: {case.extent}"
    if case.seen is not None:
        yield f"* shows in: {case.seen}"


def _case_command(subject: str, case: CasePattern) -> str:
    how = f"reported by the oracle {case.oracle} as {' or '.join(case.failure)}"
    if any(mark in case.run for mark in "*?["):
        return f"`loragate gate --subject {subject} --cases '{case.run}'`, {how}"
    return f"`./ci/loragate replay {case.run}`, {how}"
