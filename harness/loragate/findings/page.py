"""docs/findings.md from the ledger. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loragate.findings.ledger import Finding, Kind

_INTRO = """\
# Findings in released software

Made from `cases/findings/vllm.yaml` by `loragate findings --page`; edit that file instead.

Every item below is tried again by

    loragate findings

against the vLLM that is installed. It prints what it saw, and fails as soon as an item stops
reproducing on a version of its range: then the item is closed here with the version that fixed it.
Without a GPU the kernels of vLLM run in Triton's interpreter; items that need a GPU say so.

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
        how = f"`loragate gate --subject {finding.subject}`, cases `{finding.case.run}`"
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
