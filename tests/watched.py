"""A kernel in the interpreter that leaves its tensors, or whose threads lack a barrier, fails a
test, whatever that compares."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest


@pytest.fixture
def stacked() -> Collection[tuple[str, str]]:
    """Kernels, and arguments of theirs that are the first slot of more."""
    return ()


@pytest.fixture(autouse=True)
def watched_kernels(stacked: Collection[tuple[str, str]]) -> Iterator[None]:
    # imports torch, which reads the environment
    from loragate.execution.watched_launches import watched_launches

    with watched_launches(stacked):
        yield
