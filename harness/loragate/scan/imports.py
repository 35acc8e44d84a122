"""What a trial imports when it first runs, imported before."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import suppress

# an operator imports torch's compiler when it is first called
_COMPILER = ("torch._dynamo", "triton.compiler.code_generator")


def import_subjects(subjects: Iterable[str]) -> None:
    """The modules of `subjects`, and what their operators need."""
    from loragate.subjects import find_subject

    for name in _COMPILER:
        importlib.import_module(name)
    for name in subjects:
        # the trials of a subject that cannot be imported report the error
        with suppress(Exception):
            find_subject(name)
