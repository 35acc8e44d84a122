"""What a results file keeps of a gate run, next to the benchmarks of the same machine. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from loragate.core.versions import utc_now
from loragate.events.model import RunStarted
from loragate.report.counts import Count
from loragate.report.draws import DrawOutcome
from loragate.report.summary import Summary

# what sections of runs with several draws begin with
SEEDS = "gate_seeds"


def section_of(subjects: Collection[str], *, draws: int, repeats: int) -> str:
    """A run of several draws or repeats does not replace the record of the plain run. It takes
    long, and so other subjects may have one of their own."""
    return "gate" if draws * repeats == 1 else "_".join([SEEDS, *sorted(subjects)])


def origin(plan: RunStarted) -> dict[str, Any]:
    """Where a run comes from by its own plan, with the fields of `records.results.provenance`: for
    a run of another process, and perhaps of another machine."""
    facts = plan.machine
    capability = facts.get("compute_capability", "")
    return {
        "commit": plan.commit,
        "tree": plan.tree.value,
        "recorded_at": utc_now(),
        "versions": dict(plan.versions),
        "machine": {
            **{name: facts.get(name, "") for name in ("system", "processor", "cores", "device")},
            "name": facts.get("device_name", ""),
            "driver": facts.get("driver") or None,
            "compute_capability": [*map(int, capability.split("."))] if capability else None,
            "num_sms": int(facts.get("num_sms", 0)),
            "memory_bytes": int(facts.get("device_memory_bytes", 0)),
        },
    }


def outcome(summary: Summary) -> dict[str, Any]:
    """Expected and executed counts, the verdict and the times of a run, as JSON."""
    plan, finished = summary.plan, summary.finished
    return {
        "tier": plan.tier if plan else "",
        "subjects": list(plan.subjects) if plan else [],
        "draws": len(plan.draws) if plan else 0,
        "repeats": plan.repeats if plan else 0,
        "mps": bool(plan and plan.machine.get("mps")),
        "gpus": int((plan and plan.machine.get("gpus")) or 0),
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
        **({"matrix": list(plan.matrix)} if plan and plan.matrix else {}),
    }


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
