"""Implementations under test, each behind the interface of `loragate.protocol`."""

from __future__ import annotations

from loragate.subjects.registry import SUBJECTS, find_subject, unusable

__all__ = ["SUBJECTS", "find_subject", "unusable"]
