"""Keep what a gate run showed in a results file, next to the benchmarks of the same machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loragate.core.checkout import project_root
from loragate.records.results import ResultsError, read_section, update_section
from loragate.report.counts import Count
from loragate.report.draws import DrawOutcome
from loragate.report.summary import Summary


def add_record_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="keep counts, verdict and times in FILE"
    )
    parser.add_argument(
        "--commit", help="what to record as the commit where the tree has no history"
    )


def section_of(draws: int) -> str:
    """A scan over many seeds does not replace the record of the plain run."""
    return "gate" if draws == 1 else "gate_seeds"


def check_record(arguments: argparse.Namespace) -> None:
    """Raises ResultsError for what could not be kept: before a long run, not after it."""
    if arguments.record is None:
        return
    if arguments.cases:
        raise ResultsError("--record takes every case; leave out --cases")
    if arguments.draw is not None:
        raise ResultsError("--record takes draws from 0 on; leave out --draw")
    read_section(arguments.record, section_of(1))


def record_gate(summary: Summary, arguments: argparse.Namespace) -> str:
    """Write the section of this run and return its name. Raises ResultsError or OSError."""
    # asks torch for the device, which the gate itself leaves to its legs
    from loragate.core.machine import detect_machine
    from loragate.records.results import provenance

    assert summary.plan is not None, "a run that was judged has a plan"
    name = section_of(len(summary.plan.draws))
    # as it was when the run began
    checkout = (summary.plan.commit, summary.plan.tree)
    origin = provenance(detect_machine(), commit=arguments.commit, checkout=checkout)
    files = [_file_name(file) for file in arguments.matrix or ()]
    # without the key they were those of the project
    matrix = {"matrix": files} if files else {}
    update_section(arguments.record, name, origin | outcome(summary) | matrix)
    return name


def _file_name(file: Path) -> str:
    """Where on somebody's disk the project lies is nobody's business."""
    path, root = file.resolve(), project_root().resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def outcome(summary: Summary) -> dict[str, Any]:
    """Expected and executed counts, the verdict and the times of a run, as JSON."""
    plan, finished = summary.plan, summary.finished
    return {
        "tier": plan.tier if plan else "",
        "subjects": list(plan.subjects) if plan else [],
        "draws": len(plan.draws) if plan else 0,
        "repeats": plan.repeats if plan else 0,
        "verdict": summary.verdict.value,
        "exit_code": summary.exit_code.value,
        "reasons": list(summary.reasons),
        "duration_s": round(finished.duration_s, 1) if finished else None,
        "counts": [asdict(count) for count in summary.counts],
        "oracles": [asdict(count) for count in summary.oracles],
        **({"seeds": [*map(_seed, summary.draws)]} if summary.draws else {}),
        "legs": [
            {
                "name": leg.name,
                "verdict": leg.verdict.value,
                "duration_s": round(leg.finished.duration_s, 1) if leg.finished else None,
            }
            for leg in summary.legs
        ],
        "known": sorted({case.run_id for case in summary.known}),
    }


def _seed(outcome: DrawOutcome) -> dict[str, Any]:
    """One draw: its verdict, the counts of each site, and how to run again what did not pass."""
    return {
        "draw": outcome.draw,
        "verdict": outcome.verdict.value,
        "counts": {f"{row.subject}/{row.site}": _figures(row) for row in outcome.counts},
        "replays": [case.replay for case in outcome.troubles],
    }


def _figures(row: Count) -> dict[str, int]:
    figures = asdict(row)
    kept = ("expected", "executed", "passed")
    return {k: v for k, v in figures.items() if k in kept or (isinstance(v, int) and v)}
