"""What a trial imports when it first runs, imported before."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from loragate.core.first_calls import import_for_first_calls


def import_subjects(subjects: Iterable[str]) -> None:
    """The modules of `subjects`, and what their operators need."""
    from loragate.subjects import find_subject

    import_for_first_calls()
    for name in subjects:
        # the trials of a subject that cannot be imported report the error
        with suppress(Exception):
            find_subject(name)
