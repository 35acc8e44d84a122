"""`loragate findings`: try to reproduce every listed finding, and every unlisted probe.

Exit codes: 0 all entries that can be tried here reproduce, 1 one no longer reproduces, 2 nothing
could be tried or no entry is about the installed version, 3 an attempt failed or the subject does
not run here, 4 the ledger is not valid.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from loragate.core.checkout import commit_and_tree, project_root
from loragate.core.verdict import EXIT_CODES, ExitCode, Verdict
from loragate.events.log import EventWriter
from loragate.events.model import Note
from loragate.findings.ledger import (
    Finding,
    Line,
    Observation,
    Seen,
    State,
    audit,
    verdict_of,
)
from loragate.findings.load import ledger_path, load_ledger
from loragate.findings.page import render_page
from loragate.records.results import provenance, update_section

SECTION = "findings"
_BY_THE_GATE = Observation(Seen.NOT_TRIED, "its cases are judged by the gate")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "findings", help="check that what is listed about the installed vLLM still reproduces"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was seen to FILE")
    parser.add_argument("--commit", help="what to record where the tree has no history")
    parser.add_argument("--page", action="store_true", help="print docs/findings.md, run nothing")
    parser.add_argument("--events", type=Path, metavar="FILE", help="the record of a gate's run")
    parser.add_argument("--run", dest="run_name", default="", metavar="NAME", help="of that run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    try:
        findings = load_ledger(ledger_path())
    except ValueError as error:
        return _complain(str(error), ExitCode.USAGE)
    if arguments.page:
        print(render_page(findings), end="")
        return ExitCode.OK

    from loragate.core.machine import detect_machine, select_interpreter

    # before anything with a kernel is imported
    select_interpreter()
    from loragate.findings.probing import Package
    from loragate.findings.vllm_probes import PROBES, observe
    from loragate.subjects.vllm.moe_package import load_vllm_moe
    from loragate.subjects.vllm.package import load_vllm

    complaint = check_probes(findings, PROBES)
    if complaint:
        return _complain(complaint, ExitCode.USAGE)
    machine = detect_machine()
    # before anything runs: code may be edited during a run
    checkout = commit_and_tree(project_root(), ignoring=arguments.record)
    ops = load_vllm(machine)
    if isinstance(ops, str):
        return _complain(ops, ExitCode.INFRASTRUCTURE)
    package = Package(ops, load_vllm_moe(machine))
    tried = {name: observe(name, package, machine.device) for name in PROBES}
    observed = {f.id: tried[f.probe] if f.probe else _BY_THE_GATE for f in findings}
    lines = audit(findings, ops.version, observed)
    suspicions = unlisted(findings, tried)
    print(render(ops.version, lines, suspicions))
    code = EXIT_CODES[verdict_of(lines)]
    if arguments.events:
        with EventWriter(arguments.events, run=arguments.run_name) as writer:
            writer.write(Note(text=probes_note(ops.version, lines)))
    if arguments.record:
        origin = provenance(machine, commit=arguments.commit, checkout=checkout)
        try:
            update_section(arguments.record, SECTION, origin | payload(lines, suspicions))
        except (ValueError, OSError) as error:
            return _complain(str(error), ExitCode.INFRASTRUCTURE)
    return code


def check_probes(findings: Sequence[Finding], probes: Mapping[str, object]) -> str | None:
    """A sentence about the first entry whose probe does not exist."""
    for finding in findings:
        if finding.probe is not None and finding.probe not in probes:
            near = get_close_matches(finding.probe, probes, n=1)
            hint = f"; nearest: {near[0]}" if near else ""
            allowed = ", ".join(probes)
            return f"{finding.id}: given probe {finding.probe!r}; allowed: {allowed}{hint}"
    return None


def unlisted(
    findings: Sequence[Finding], tried: Mapping[str, Observation]
) -> dict[str, Observation]:
    """Probes of suspicions that no entry claims: shown, never judged."""
    listed = {finding.probe for finding in findings}
    return {name: seen for name, seen in tried.items() if name not in listed}


def render(version: str, lines: Sequence[Line], suspicions: Mapping[str, Observation]) -> str:
    listed = [_row(line.state, line.finding.id, line.observation) for line in lines]
    open_ones = [_row("unlisted", name, seen) for name, seen in suspicions.items()]
    head = f"vllm {version}: {len(lines)} listed findings ({_counts(lines)})"
    tail = []
    if verdict_of(lines) is Verdict.SKIP:
        tail = ["nothing was tried: no listed finding is about this version and can be tried here"]
    return "\n".join([head, *listed, *open_ones, *tail])


def probes_note(version: str, lines: Sequence[Line]) -> str:
    """One sentence for the report of the gate, which judges the entries about cases itself."""
    probed = [line for line in lines if line.finding.probe is not None]
    rest = [line.finding.id for line in probed if line.state is not State.KNOWN]
    names = f"; {', '.join(rest)}" if rest else ""
    return f"vllm {version}: {len(probed)} listed findings with a probe ({_counts(probed)}){names}"


def _counts(lines: Sequence[Line]) -> str:
    tally = Counter(line.state for line in lines)
    return ", ".join(f"{tally[s]} {s.value}" for s in State if tally[s]) or "none"


def _row(state: str, name: str, observation: Observation) -> str:
    return f"{state:<12} {name}: {observation.seen.value}: {observation.text}"


def payload(lines: Sequence[Line], suspicions: Mapping[str, Observation]) -> dict[str, Any]:
    return {
        "expected": len(lines),
        "executed": sum(line.state in (State.KNOWN, State.STALE) for line in lines),
        "findings": {
            line.finding.id: {
                "state": line.state.value,
                "seen": line.observation.seen.value,
                "text": line.observation.text,
            }
            for line in lines
        },
        "unlisted": {
            name: {"seen": seen.seen.value, "text": seen.text} for name, seen in suspicions.items()
        },
    }


def _complain(message: str, code: ExitCode) -> ExitCode:
    print(f"loragate findings: {message}", file=sys.stderr)
    return code
