"""Which adapters' kernels were launched in this process, captured into a CUDA graph, or left out.

A run of vLLM that gives right answers proves nothing about these kernels: a graph from its compile
cache may hold vLLM's own. These counts are of the operators here and of nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Operator(StrEnum):
    """What calls the kernels."""

    LINEAR = "linear"
    LOGITS = "logits"
    EXPERTS = "experts"


@dataclass(slots=True)
class LaunchCounts:
    """Calls of one operator. A replay of a graph calls nothing: `captured` counts calls whose
    kernels are in a graph."""

    launched: int = 0
    captured: int = 0
    # of a step without adapters
    left_out: int = 0


_COUNTS = {operator: LaunchCounts() for operator in Operator}


def count(operator: Operator, *, runs: bool, captures: bool) -> None:
    """Note a call of an operator."""
    counts = _COUNTS[operator]
    if not runs:
        counts.left_out += 1
    elif captures:
        counts.captured += 1
    else:
        counts.launched += 1


def launch_counts() -> dict[str, LaunchCounts]:
    """The counts of this process so far, by the name of the operator. Each worker of vLLM is a
    process of its own: ask it by `LLM.collective_rpc`."""
    return {operator.value: replace(counts) for operator, counts in _COUNTS.items()}


def reset_launch_counts() -> None:
    """Start counting anew."""
    for operator in Operator:
        _COUNTS[operator] = LaunchCounts()
