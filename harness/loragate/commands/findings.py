"""`loragate findings`: run the probes of all listed findings, and those of open suspicions.

Exit codes: 0 all findings that can be tried here reproduce, 1 one no longer reproduces, 2 nothing
could be tried or no finding is about the installed version, 3 a probe failed to run or the subject
does not run here, 4 the ledger is not valid.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from loragate.commands.record_options import add_events_options, add_record_options, open_record
from loragate.core.errors import CommandError, usage_errors
from loragate.core.host import usable_cores
from loragate.core.output import say
from loragate.core.verdict import EXIT_CODES, ExitCode, Verdict
from loragate.events.log import EventTail, EventWriter
from loragate.events.model import LegFinished, Note, RunStarted
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

SECTION = "findings"
_CORES_OF_TWO_PARTS = 8
_BY_THE_GATE = Observation(Seen.NOT_TRIED, "its cases are judged by the gate")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "findings", help="check that what is listed about the installed vLLM still reproduces"
    )
    add_record_options(parser, "the observations")
    parser.add_argument(
        "--page", action="store_true", help="print docs/findings.md and try nothing"
    )
    add_events_options(parser)
    parser.add_argument(
        "--after-leg",
        metavar="LEG",
        help="of the run of --events: probes that access wrong addresses wait for its end",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    with usage_errors():
        if arguments.record and arguments.page:
            raise ValueError("--page tries nothing to record; leave out --record")
        findings = load_ledger(ledger_path())
        recorder = open_record(arguments, SECTION)
        if arguments.after_leg is not None and arguments.events is None:
            raise ValueError("--after-leg needs --events, which says when the leg has ended")
    if arguments.page:
        say(render_page(findings), end="")
        return ExitCode.OK
    version, observations = _try_probes(findings, _end_of_leg(arguments))
    observed = {f.id: observations[f.probe] if f.probe else _BY_THE_GATE for f in findings}
    lines = audit(findings, version, observed)
    suspicions = unlisted(findings, observations)
    if arguments.events:
        with EventWriter(arguments.events, run=arguments.run_name) as writer:
            writer.write(Note(text=probes_note(version, lines)))
    if recorder:
        recorder.save(payload(lines, suspicions))
    say(render(version, lines, suspicions))
    return EXIT_CODES[verdict_of(lines)]


def _end_of_leg(arguments: argparse.Namespace) -> Callable[[], bool]:
    """Whether the leg named by an option has ended, or the run has none of that name; True without
    the option."""
    leg = arguments.after_leg
    if leg is None:
        return lambda: True
    tail, ended = EventTail(arguments.events, run=arguments.run_name), set[str]()

    def has_ended() -> bool:
        for event in tail.poll():
            if isinstance(event, LegFinished):
                ended.add(event.name)
            elif isinstance(event, RunStarted) and leg not in event.legs:
                ended.add(leg)
        return leg in ended

    return has_ended


def _try_probes(
    findings: Sequence[Finding], may_lose_device: Callable[[], bool]
) -> tuple[str, dict[str, Observation]]:
    """The version of the installed package, and what each probe observed. Raises CommandError."""
    from loragate.core.machine import select_interpreter

    # before anything with a kernel is imported
    select_interpreter()
    from loragate.findings.probe_runner import run_probes
    from loragate.findings.vllm_probes import PROBES

    complaint = check_probes(findings, PROBES)
    if complaint:
        raise CommandError(complaint, ExitCode.USAGE)
    calm = [name for name, probe in PROBES.items() if not probe.wild]
    wild = [name for name, probe in PROBES.items() if probe.wild]
    # on few cores two imports of the package would take as long as one after the other
    parts = 2 if usable_cores() >= _CORES_OF_TWO_PARTS else 1
    # a process that loses its device may stop what another one runs on it
    groups = [calm[part::parts] for part in range(parts)]
    version, observed = run_probes(groups, last=wild, may_be_last=may_lose_device)
    return version, {name: observed[name] for name in PROBES}


def check_probes(findings: Sequence[Finding], probes: Mapping[str, object]) -> str | None:
    """A sentence about the first finding whose probe does not exist."""
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
    """Observations of probes that no finding names: open suspicions are shown, never judged."""
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
    """One sentence for the report of the gate, which judges the findings about cases itself."""
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
