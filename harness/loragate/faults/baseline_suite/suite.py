"""All tests of the stand-in, and which of them meet a fault; see upstream_style.py."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch

from loragate.core.verdict import Failure, Verdict
from loragate.faults.baseline_suite import dense as upstream_style
from loragate.faults.baseline_suite import moe as upstream_moe
from loragate.faults.baseline_suite.data import SEED
from loragate.faults.compiling import check_compiles, check_experts_compile
from loragate.faults.model import Check, Sighting

_OF_FILES = ("adapter file", "adapter manager")
# what linear and MoE layers have in common
_SHARED = ("lorakernels.common.", "lorakernels.runtime.")


def _assert_silent(check: Callable[[], str | None]) -> None:
    wrong = check()
    assert wrong is None, wrong


# low ranks are tested there on a GPU, where they have to compile
_OF_CHECKS: Mapping[Check, str] = MappingProxyType(
    {
        Check.COMPILES: "low ranks compile",
        Check.EXPERT_COMPILES: "low ranks of experts compile",
    }
)
TESTS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        **upstream_style.TESTS,
        **upstream_moe.TESTS,
        _OF_CHECKS[Check.COMPILES]: partial(_assert_silent, check_compiles),
        _OF_CHECKS[Check.EXPERT_COMPILES]: partial(_assert_silent, check_experts_compile),
    }
)


def tests_of(module: str | None, checks: Sequence[Check]) -> tuple[str, ...]:
    """The tests that meet a planted module: those of experts for what only experts have, those
    of linear layers for the rest, all of them without a module."""
    compiling = [name for check, name in _OF_CHECKS.items() if check in checks]
    linear, experts = list(upstream_style.TESTS), list(upstream_moe.TESTS)
    if module is None or module.startswith(_SHARED):
        return (*linear, *experts, *compiling)
    of_experts = "moe" in module or "expert" in module
    return (*([*experts, *_OF_FILES] if of_experts else linear), *compiling)


def run_test(name: str) -> Sighting:
    torch.manual_seed(SEED)
    try:
        TESTS[name]()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {str(error).strip()[:400]} ({last.name})"
        failure = Failure.WRONG_ANSWER
        return Sighting(judge=name, case="", verdict=Verdict.FAIL, failure=failure, message=message)
    return Sighting(judge=name, case="", verdict=Verdict.PASS)
