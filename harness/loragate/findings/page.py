"""docs/findings.md from the ledger. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loragate.findings.ledger import CasePattern, Finding, Kind

_INTRO = """\
# Findings in released software

Made from `cases/findings/vllm.yaml` by `loragate findings --page`; edit that file instead.

The items with a probe are tried again by

    loragate findings

against the vLLM that is installed. It prints what it saw, and fails as soon as an item stops
reproducing on a version of its range: then the item is closed here with the version that fixed it.
Without a GPU the kernels of vLLM run in Triton's interpreter, behind a stand-in for its compiled
alignment of routed pairs; an item that was seen on a GPU alone needs one, and is told as not run
without it. The items with a case are tried by

    loragate gate --subject vllm

where the case counts as known as long as it fails in the listed way alone. Any other failure is
red as ever, and so is an item whose case has stopped to fail.

A *defect* gives a wrong result for an input that nothing forbids. A *hazard* is right as long as
every caller knows of it. What vLLM does before it calls its kernels may keep a server from ever
meeting an item; the items are about the operators."""

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
    how = finding.probe and f"`loragate findings`, probe `{finding.probe}`"
    if finding.case is not None:
        how = _case_command(finding.subject, finding.case)
    lines = [
        f"### {finding.title}",
        "",
        finding.statement,
        "",
        f"* versions: {finding.subject} `{finding.versions}`",
        f"* seen on: {finding.seen_on}",
        f"* evidence: {finding.evidence}",
        f"* reproduced by: {how}",
    ]
    if finding.upstream:
        lines.append(f"* upstream: {', '.join(finding.upstream)}")
    return "\n".join(lines)


def _case_command(subject: str, case: CasePattern) -> str:
    told = f"told by the oracle {case.oracle} as {' or '.join(case.failure)}"
    if any(mark in case.run for mark in "*?["):
        return f"`loragate gate --subject {subject} --cases '{case.run}'`, {told}"
    return f"`loragate replay {case.run}`, {told}"
