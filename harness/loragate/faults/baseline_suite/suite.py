"""All tests of the baseline suite, and which of them run for a fault."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch

from loragate.core.verdict import Failure, Verdict
from loragate.faults.baseline_suite import dense, moe
from loragate.faults.baseline_suite.data import SEED
from loragate.faults.compiling import check_compiles, check_experts_compile
from loragate.faults.model import Check, Sighting

_FILE_TESTS = ("adapter file", "adapter manager")
# what linear and MoE layers have in common
_SHARED = ("lorakernels.common.", "lorakernels.runtime.")


def _assert_silent(check: Callable[[], str | None]) -> None:
    wrong = check()
    assert wrong is None, wrong


# upstream tests low ranks on a GPU, where they have to compile
_COMPILE_TESTS: Mapping[Check, str] = MappingProxyType(
    {
        Check.COMPILES: "low ranks compile",
        Check.EXPERT_COMPILES: "low MoE ranks compile",
    }
)
TESTS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        **dense.TESTS,
        **moe.TESTS,
        _COMPILE_TESTS[Check.COMPILES]: partial(_assert_silent, check_compiles),
        _COMPILE_TESTS[Check.EXPERT_COMPILES]: partial(_assert_silent, check_experts_compile),
    }
)


def tests_of(module: str | None, checks: Sequence[Check]) -> tuple[str, ...]:
    """The tests that run for a planted module: those of MoE and of adapter files for MoE modules,
    those of linear layers and adapter files for other modules, every test for modules that both
    kinds of layers use and without a module."""
    compiling = [name for check, name in _COMPILE_TESTS.items() if check in checks]
    linear, of_moe = list(dense.TESTS), list(moe.TESTS)
    if module is None or module.startswith(_SHARED):
        return (*linear, *of_moe, *compiling)
    is_moe = "moe" in module or "expert" in module
    return (*([*of_moe, *_FILE_TESTS] if is_moe else linear), *compiling)


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
