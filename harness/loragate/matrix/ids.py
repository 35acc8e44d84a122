"""The one id function and the one seed function. Pure; both are pinned by literal tests."""

from __future__ import annotations

import hashlib

from loragate.matrix.case import AXES, Case


def case_id(case: Case) -> str:
    """Stable, readable, unique: the site, then sorted `axis-value` parts joined by dots."""
    given = ((axis, getattr(case, name)) for name, axis in AXES.items())
    parts = {
        axis.label: axis.text(value) for axis, value in given if axis.enters_id(case.site, value)
    }
    return ".".join([case.site.value, *(f"{name}-{parts[name]}" for name in sorted(parts))])


def run_id(subject: str, case: Case) -> str:
    """Id of one case of one subject, as pytest and `loragate replay` know it."""
    return f"{subject}.{case_id(case)}"


def seed_of(case: Case, attempt: int) -> int:
    """63-bit seed of an attempt. Every subject sees the same data for a case."""
    text = f"{case_id(case)}#{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
