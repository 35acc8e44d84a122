"""The one id function and the one seed function. Pure; both are pinned by literal tests."""

from __future__ import annotations

import hashlib
from functools import cache

from loragate.matrix.axis import DeclaredAxis
from loragate.matrix.case import AXES, Case, Site


def case_id(case: Case) -> str:
    """Stable, readable, unique: the site, then sorted `axis-value` parts joined by dots."""
    given = ((axis, getattr(case, axis.name)) for axis in _axes_of(case.site))
    parts = (f"{axis.label}-{axis.text(value)}" for axis, value in given if axis.enters_id(value))
    return ".".join([case.site.value, *parts])


@cache
def _axes_of(site: Site) -> tuple[DeclaredAxis, ...]:
    """The axes of a site in the order of its ids."""
    return tuple(sorted((a for a in AXES.values() if a.at(site)), key=lambda axis: axis.label))


def run_id(subject: str, case: Case) -> str:
    """Id of one case of one subject, as pytest and `loragate replay` know it."""
    return f"{subject}.{case_id(case)}"


def seed_of(case: Case, draw: int) -> int:
    """63-bit seed of a draw. Every subject sees the same data for a case."""
    text = f"{case_id(case)}#{draw}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
