"""A plan as text for people and as JSON for programs. Pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from itertools import groupby
from typing import Any

from loragate.core.verdict import OracleName
from loragate.matrix.case_run import CaseRun
from loragate.matrix.plan import Plan

# 2: `draw` and `repeat` in the place of `attempt`
SCHEMA = 2


def render_plan(plan: Plan) -> str:
    """Counts by subject and site, then what runs with which oracles, then what is skipped."""
    where = f"{plan.machine.device} ({plan.machine.name or 'unknown'})"
    if plan.machine.interpreted:
        where += ", Triton interpreter"
    lines = [f"tier {plan.tier} on {where}", "", *_counts(plan)]
    for oracles, runs in sorted(_by_oracles(plan).items()):
        lines += ["", f"runs, judged by {', '.join(oracles)}:", *(f"  {run}" for run in runs)]
    for reason, names in sorted(_by_reason(plan).items()):
        lines += ["", f"skipped, {reason}:", *(f"  {name}" for name in names)]
    return "\n".join(lines) + "\n"


def plan_json(plan: Plan) -> str:
    """One JSON document with sorted keys; enums as they are spelled in YAML."""
    document = {
        "schema": SCHEMA,
        "tier": plan.tier,
        "machine": asdict(plan.machine),
        "expected": [
            {"subject": subject, "site": site, "count": len(names)}
            for (subject, site), names in plan.expected.items()
        ],
        "planned": [_planned(run) for run in plan.planned],
        "skipped": [asdict(skipped) for skipped in plan.skipped],
    }
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _planned(run: CaseRun) -> dict[str, Any]:
    document = asdict(run) | {"run_id": run.run_id, "seed": run.seed}
    # the plan is of all its files
    del document["matrix"]
    return document


def _counts(plan: Plan) -> list[str]:
    skipped = Counter((s.subject, s.case.site) for s in plan.skipped)
    expected = plan.expected
    rows = [
        (subject, site.value, str(len(expected.get((subject, site), ()))), str(count))
        for (subject, site), count in sorted({**dict.fromkeys(expected, 0), **skipped}.items())
    ]
    table = [("subject", "site", "runs", "skipped"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    return [
        f"{subject:{widths[0]}}  {site:{widths[1]}}  {runs:>{widths[2]}}  {left:>{widths[3]}}"
        for subject, site, runs, left in table
    ]


def _by_oracles(plan: Plan) -> dict[tuple[OracleName, ...], list[str]]:
    names: dict[tuple[OracleName, ...], list[str]] = {}
    for name, group in groupby(plan.planned, key=lambda run: run.run_id):
        runs = list(group)
        names.setdefault(runs[0].case.oracles, []).append(f"{name}{_draws(runs)}")
    return names


def _draws(runs: list[CaseRun]) -> str:
    """The draws and repeats of one case; nothing if there is only the first of each."""
    draws = sorted({run.draw for run in runs})
    repeats = len(runs) // len(draws)
    text = "" if draws == [0] else f"  draws {', '.join(map(str, draws))}"
    return text if repeats == 1 else f"{text}  {repeats} repeats"


def _by_reason(plan: Plan) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for skipped in plan.skipped:
        reasons.setdefault(skipped.reason, []).append(skipped.run_id)
    return reasons
