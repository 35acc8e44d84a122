"""The table of docs/coverage.md: how many cases of each tier take each branch of the plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from loragate.matrix.case import Case, Site, Tier
from loragate.matrix.load import load_cases
from loragate.subjects.lorakernels.branches import all_branches, branches

# one table for each operator; a linear layer calls that of the dense delta
_OPERATORS = (
    ("Dense delta and linear layer", (Site.DENSE_DELTA, Site.LORA_LINEAR)),
    ("Embedding", (Site.EMBEDDING,)),
    ("Input projections of a gated delta net", (Site.GDN_IN_PROJ,)),
    ("MoE delta", (Site.MOE_DELTA,)),
    ("MoE layer", (Site.MOE_LAYER,)),
)


def coverage_tables(root: Path) -> str:
    """The tables for the case files of a checkout."""
    files = sorted((root / "cases").glob("*.yaml"))
    # loading takes seconds: what was rendered stands while no file changes
    return _rendered(tuple(files), tuple(path.read_bytes() for path in files))


@cache
def _rendered(files: tuple[Path, ...], contents: tuple[bytes, ...]) -> str:
    cases = load_cases(files)
    return "\n\n".join(_table(title, sites, cases) for title, sites in _OPERATORS)


def _table(title: str, sites: Sequence[Site], cases: Sequence[Case]) -> str:
    counts = {tier: Counter[str]() for tier in Tier}
    for case in cases:
        if case.site in sites:
            counts[case.tier].update(branches(case))
    lines = [f"| {title} | {' | '.join(Tier)} |", f"| --- |{' --: |' * len(Tier)}"]
    lines += [
        f"| {branch} | {' | '.join(str(counts[tier][branch]) for tier in Tier)} |"
        for branch in all_branches(sites[0])
    ]
    return "\n".join(lines)
