"""All tests of the baseline suite, and which of them run for a fault."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from loragate.core.child_process import run_module
from loragate.core.verdict import Failure, Verdict
from loragate.faults.baseline_suite import dense, moe
from loragate.faults.baseline_suite.data import SEED
from loragate.faults.model import Sighting

_FILE_TESTS = ("adapter file", "adapter manager")
# what linear and MoE layers have in common
_SHARED = ("lorakernels.common.", "lorakernels.runtime.")


TESTS: Mapping[str, Callable[[], None]] = MappingProxyType({**dense.TESTS, **moe.TESTS})
_COMPILES = "compiles: "


def tests_of(module: str | None, launches: Sequence[str]) -> tuple[str, ...]:
    """The tests that run for a planted module: those of MoE and of adapter files for MoE modules,
    those of linear layers and adapter files for other modules, every test for modules that both
    kinds of layers use and without a module. Where a fault is about what a compiler accepts, its
    launches are compiled: upstream tests low ranks on a GPU."""
    compiling = [f"{_COMPILES}{label}" for label in launches]
    linear, of_moe = list(dense.TESTS), list(moe.TESTS)
    if module is None or module.startswith(_SHARED):
        return (*linear, *of_moe, *compiling)
    is_moe = "moe" in module or "expert" in module
    return (*([*of_moe, *_FILE_TESTS] if is_moe else linear), *compiling)


def run_test(name: str) -> Sighting:
    torch.manual_seed(SEED)
    try:
        if name.startswith(_COMPILES):
            _compile(name.removeprefix(_COMPILES))
        else:
            TESTS[name]()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {str(error).strip()[:400]} ({last.name})"
        failure = Failure.WRONG_ANSWER
        return Sighting(judge=name, case="", verdict=Verdict.FAIL, failure=failure, message=message)
    return Sighting(judge=name, case="", verdict=Verdict.PASS)


def _compile(label: str) -> None:
    # the interpreter must be off before a kernel is imported
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    answer = run_module("loragate.faults.launches", "--label", label, env=environment)
    answer.check_returncode()
    message = answer.stdout.decode().strip()
    assert not message, message
