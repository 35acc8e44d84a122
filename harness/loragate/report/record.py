"""What a results file keeps of a gate run, next to the benchmarks of the same machine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loragate.core.checkout import project_root
from loragate.report.counts import Count
from loragate.report.draws import DrawOutcome
from loragate.report.summary import Summary


def section_of(*, draws: int, repeats: int) -> str:
    """A run of several draws or repeats does not replace the record of the plain run."""
    return "gate" if draws * repeats == 1 else "gate_seeds"


def outcome(summary: Summary, *, matrix: Sequence[Path] = ()) -> dict[str, Any]:
    """Expected and executed counts, the verdict and the times of a run, as JSON.

    matrix: the case files that were named; without any, they were those of the project.
    """
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
        **({"matrix": [*map(_file_name, matrix)]} if matrix else {}),
    }


def _file_name(file: Path) -> str:
    # the path of the project on this disk is left out: the file is published
    path, root = file.resolve(), project_root().resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _seed(outcome: DrawOutcome) -> dict[str, Any]:
    """One draw: its verdict, expected and executed counts of each site, and how to replay what
    did not pass."""
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
