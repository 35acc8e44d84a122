from __future__ import annotations

import os
from types import MappingProxyType

import pytest

# also where a GPU is at hand; the switch must stand before lorakernels is imported
os.environ["TRITON_INTERPRET"] = "1"

from loragate.core.verdict import Verdict
from loragate.faults.baseline_suite import dense as upstream_style
from loragate.faults.baseline_suite import moe as upstream_moe
from loragate.faults.baseline_suite import suite as upstream_suite
from loragate.faults.model import Check

# some take their time; `loragate faults --stand-in` runs all of them on its controls
SLOW = ("shrink kernel", "expand kernel", "sorted kernels of experts", "MoE layer")
QUICK = [name for name in upstream_suite.tests_of(None, ()) if name not in SLOW]


@pytest.mark.parametrize("name", QUICK)
def test_the_stand_in_passes_on_sound_code(name: str) -> None:
    sighting = upstream_suite.run_test(name)
    assert sighting.verdict is Verdict.PASS, sighting.message


def test_whatever_is_thrown_counts_as_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise TypeError("out of order")

    monkeypatch.setattr(upstream_suite, "TESTS", MappingProxyType({"broken": fail}))
    sighting = upstream_suite.run_test("broken")
    assert sighting.verdict is Verdict.FAIL
    assert "TypeError: out of order" in sighting.message


def test_a_fault_of_experts_meets_the_tests_of_experts_and_of_files() -> None:
    linear, experts = set(upstream_style.TESTS), set(upstream_moe.TESTS)
    met = set(upstream_suite.tests_of("lorakernels.moe.delta.kernels", ()))
    assert met == experts | {"adapter file", "adapter manager"}
    assert set(upstream_suite.tests_of("lorakernels.dense.kernels", ())) == linear
    assert set(upstream_suite.tests_of(None, ())) == linear | experts
    assert set(upstream_suite.tests_of("lorakernels.common.jit", ())) == linear | experts


def test_what_must_compile_is_compiled_for_the_faults_that_are_about_it() -> None:
    tests = upstream_suite.tests_of("lorakernels.moe.delta.plan", (Check.EXPERT_COMPILES,))
    assert tests[-1] == "low ranks of experts compile"
