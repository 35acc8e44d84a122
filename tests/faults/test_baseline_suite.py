from __future__ import annotations

import os
from types import MappingProxyType

import pytest

# on a machine with a GPU as well; it must be set before lorakernels is imported
os.environ["TRITON_INTERPRET"] = "1"

from loragate.core.verdict import Verdict
from loragate.faults.baseline_suite import dense, moe, suite

# `loragate faults --baseline-suite` runs these on its controls
SLOW = ("shrink kernel", "expand kernel", "sorted MoE kernels", "MoE layer")
QUICK = [name for name in suite.tests_of(None, ()) if name not in SLOW]


def test_the_slow_tests_are_tests_of_the_suite() -> None:
    assert set(SLOW) <= set(suite.TESTS)


@pytest.mark.parametrize("name", QUICK)
def test_the_baseline_suite_passes_on_sound_code(name: str) -> None:
    sighting = suite.run_test(name)
    assert sighting.verdict is Verdict.PASS, sighting.message


def test_any_exception_counts_as_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise TypeError("out of order")

    monkeypatch.setattr(suite, "TESTS", MappingProxyType({"broken": fail}))
    sighting = suite.run_test("broken")
    assert sighting.verdict is Verdict.FAIL
    assert "TypeError: out of order" in sighting.message


def test_an_moe_fault_meets_the_tests_of_moe_and_of_adapter_files() -> None:
    linear, of_moe = set(dense.TESTS), set(moe.TESTS)
    met = set(suite.tests_of("lorakernels.moe.delta.kernels", ()))
    assert met == of_moe | {"adapter file", "adapter manager"}
    assert set(suite.tests_of("lorakernels.dense.kernels", ())) == linear
    assert set(suite.tests_of(None, ())) == linear | of_moe
    assert set(suite.tests_of("lorakernels.common.jit", ())) == linear | of_moe


def test_low_ranks_are_compiled_for_the_faults_about_compiling() -> None:
    tests = suite.tests_of("lorakernels.moe.delta.plan", ("moe-low-r1-t33-two_kernel",))
    assert tests[-1] == "compiles: moe-low-r1-t33-two_kernel"
    assert suite.run_test(tests[-1]).verdict is Verdict.PASS
