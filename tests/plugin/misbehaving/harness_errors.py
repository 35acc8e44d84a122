"""A plugin that plants errors in the harness itself; the number of tokens of a case says where."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

ORACLE, INPUTS = 22, 23


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    from loragate.inputs import pool
    from loragate.oracles.numeric import reference

    plant(reference, "golden_of", ORACLE)
    plant(pool, "live_ranks", INPUTS)


def plant(module: ModuleType, name: str, tokens: int) -> None:
    """`module.name` fails for cases of that many tokens; its first argument is the case."""
    sound = getattr(module, name)

    def planted(case: Any, *arguments: Any, **options: Any) -> Any:
        assert case.tokens != tokens, "planted in the harness"
        return sound(case, *arguments, **options)

    setattr(module, name, planted)
