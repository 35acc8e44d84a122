"""Trees of Python from several threads."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from loragate.core.syntax import parse


@pytest.fixture
def busy_collector() -> Iterator[None]:
    """The collector calls back, as hypothesis lets it, and so lets threads take turns within a
    tree."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()

    def called(phase: str, info: dict[str, int]) -> None:
        for _ in range(3):
            pass

    gc.callbacks.append(called)
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)
    gc.callbacks.remove(called)


def test_several_threads_parse_at_the_same_time(busy_collector: None) -> None:
    text = "\n".join(f"def f{k}(a, b=({k}, [a + 1])):\n    return {{a: b}}" for k in range(300))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(parse, [text] * 12))
    assert {len(tree.body) for tree in found} == {300}
    assert isinstance(found[0].body[0], ast.FunctionDef)


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        parse("def")
