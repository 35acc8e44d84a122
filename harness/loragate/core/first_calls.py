"""What torch and Triton import when an operator or a kernel is first called: seconds, once in each
process, unless the process that forks them all has imported it."""

from __future__ import annotations

import importlib

_IMPORTED = ("torch._dynamo", "triton.compiler.code_generator")


def import_for_first_calls() -> None:
    """Call it after `select_interpreter`: it imports Triton."""
    for name in _IMPORTED:
        importlib.import_module(name)
