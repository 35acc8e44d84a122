"""Keep what a gate run showed in a results file, next to the benchmarks of the same machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loragate.report.attempts import AttemptOutcome
from loragate.report.counts import Count
from loragate.report.summary import Summary
from loragate.results import read_section, update_section


def add_record_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="keep counts, verdict and times in FILE"
    )
    parser.add_argument(
        "--commit", help="what to record as the commit where the tree has no history"
    )


def section_of(attempts: int) -> str:
    """A scan over many seeds does not replace the record of the plain run."""
    return "gate" if attempts == 1 else "gate_seeds"


def check_record(path: Path) -> None:
    """Raises ResultsError for a file that could not be added to: not after a long run."""
    read_section(path, section_of(1))


def record_gate(summary: Summary, path: Path, *, commit: str | None) -> str:
    """Write the section of this run and return its name. Raises ResultsError or OSError."""
    # asks torch for the device, which the gate itself leaves to its legs
    from loragate.machine import detect_machine
    from loragate.results import provenance

    assert summary.plan is not None, "a run that was judged has a plan"
    name = section_of(len(summary.plan.attempts))
    update_section(path, name, provenance(detect_machine(), commit=commit) | outcome(summary))
    return name


def outcome(summary: Summary) -> dict[str, Any]:
    """Expected and executed counts, the verdict and the times of a run, as JSON."""
    plan, finished = summary.plan, summary.finished
    return {
        "tier": plan.tier if plan else "",
        "subjects": list(plan.subjects) if plan else [],
        "attempts": len(plan.attempts) if plan else 0,
        "verdict": summary.verdict.value,
        "exit_code": summary.exit_code.value,
        "reasons": list(summary.reasons),
        "duration_s": round(finished.duration_s, 1) if finished else None,
        "counts": [asdict(count) for count in summary.counts],
        **({"seeds": [*map(_seed, summary.attempts)]} if summary.attempts else {}),
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


def _seed(attempt: AttemptOutcome) -> dict[str, Any]:
    """One attempt: its verdict, what each site owed and gave, and how to run again what did not
    pass."""
    return {
        "attempt": attempt.attempt,
        "verdict": attempt.verdict.value,
        "counts": {f"{row.subject}/{row.site}": _figures(row) for row in attempt.counts},
        "replays": [case.replay for case in attempt.troubles],
    }


def _figures(row: Count) -> dict[str, int]:
    figures = asdict(row)
    kept = ("expected", "executed", "passed")
    return {k: v for k, v in figures.items() if k in kept or (isinstance(v, int) and v)}
