"""Generated cases as the text of a case file. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any

import yaml

from loragate.matrix.case import AXES, Case, Site
from loragate.matrix.expand import MAX_PRODUCT

_AS_LONG_AS_IT_IS = 10_000


def file_text(site: Site, cases: Sequence[Case], comment: str) -> str:
    """A case file of cases of one tier. `comment`: one line."""
    by_oracles = sorted(cases, key=lambda case: case.oracles)
    lines = [f"# {comment}", f"site: {site}", "groups:"]
    groups = [
        members[start : start + MAX_PRODUCT]
        for _, same in groupby(by_oracles, key=lambda case: case.oracles)
        for members in [list(same)]
        for start in range(0, len(members), MAX_PRODUCT)
    ]
    for number, group in enumerate(groups, 1):
        lines += [
            f"  part_{number}:",
            f"    tier: {group[0].tier}",
            f"    timeout_s: {group[0].timeout_s:g}",
            f"    oracles: [{', '.join(group[0].oracles)}]",
            "    rows:",
            *(f"      - {_row(case)}" for case in group),
        ]
    return "\n".join([*lines, ""])


def _row(case: Case) -> str:
    """The axes that the case must name, or that do not have their default."""
    values = {
        name: _plain(getattr(case, name))
        for name, axis in AXES.items()
        if axis.at(case.site)
        and (axis.is_required_at(case.site) or getattr(case, name) != axis.default)
    }
    text = yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=_AS_LONG_AS_IT_IS)
    return str(text).strip()


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return value.value
    return list(value) if isinstance(value, tuple) else value
