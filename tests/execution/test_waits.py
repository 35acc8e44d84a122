"""What of a kernel runs ahead of its wait for the kernels before it, from the text of its TTIR."""

from __future__ import annotations

import pytest

from loragate.execution.trace.ttir import pointer_use, waits_of
from loragate.execution.trace.waits import WAITS_FIRST, Waits

FUNCTION = """
module {{
  tt.func public @kernel(%x: !tt.ptr<f16>, %n: i32, %y: !tt.ptr<f16>, %c: i1) {{
{body}
    tt.return
  }}
}}
"""
ASSEMBLY = 'tt.elementwise_inline_asm "griddepcontrol.{}; // dummy $0" {{pure = false}} -> i32'
WAIT, SIGNAL = (f"%w = {ASSEMBLY.format(name)}" for name in ("wait", "launch_dependents"))
LOAD, STORE = "%0 = tt.load %x : !tt.ptr<f16>", "tt.store %y, %n : !tt.ptr<f16>"
IF = ("scf.if %c {", WAIT, "}")
IF_ELSE = ("scf.if %c {", WAIT, "} else {", WAIT, "}")
FOR = ("scf.for %i = %n to %n step %n  : i32 {", WAIT, "} {tt.num_stages = 1 : i32}")
WHILE = ("scf.while : () -> () {", WAIT, "scf.condition(%c)", "} do {", "scf.yield", "}")
BODY_OF_WHILE = ("scf.while : () -> () {", "scf.condition(%c)", "} do {", WAIT, "scf.yield", "}")
UNWAITED = Waits(signals_early=True, ends_unwaited=True)


def found(*lines: str) -> tuple[set[int], set[int], Waits]:
    """Early reads and writes."""
    text = FUNCTION.format(body="\n".join(f"    {line} loc(#loc1)" for line in lines))
    use = pointer_use(text)
    assert (set(use.reads), set(use.writes)) == ({0}, {1})
    return set(use.early_reads), set(use.early_writes), waits_of(text)


def test_what_stands_ahead_of_the_wait_is_early() -> None:
    assert found(WAIT, LOAD, STORE) == (set(), set(), WAITS_FIRST)
    assert found(LOAD, WAIT, STORE) == ({0}, set(), WAITS_FIRST)
    assert found(STORE, WAIT, LOAD) == (set(), {1}, WAITS_FIRST)
    assert found(LOAD, STORE) == ({0}, {1}, UNWAITED)


def test_a_signal_ahead_of_the_wait_is_early() -> None:
    assert found(WAIT, SIGNAL, LOAD, STORE)[2] == WAITS_FIRST
    assert found(SIGNAL, WAIT, LOAD, STORE)[2] == Waits(signals_early=True)


def test_one_assembly_may_wait_and_signal() -> None:
    both = '%w = tt.elementwise_inline_asm "griddepcontrol.{}; griddepcontrol.{};" {{}} -> i32'
    after = both.format("wait", "launch_dependents")
    assert found(after, LOAD, STORE) == (set(), set(), WAITS_FIRST)
    before = both.format("launch_dependents", "wait")
    assert found(before, LOAD, STORE) == (set(), set(), Waits(signals_early=True))


def test_operations_that_wait_and_signal_count_as_their_assembly_does() -> None:
    wait, signal = (f"tt.grid_dependency_{name}" for name in ("wait", "launch_dependents"))
    assert found(wait, signal, LOAD, STORE) == (set(), set(), WAITS_FIRST)
    assert found(LOAD, wait, STORE) == ({0}, set(), WAITS_FIRST)
    assert found(signal, wait, LOAD, STORE)[2] == Waits(signals_early=True)


@pytest.mark.parametrize("waits", [IF_ELSE, WHILE])
def test_a_wait_on_every_path_is_one(waits: tuple[str, ...]) -> None:
    assert found(*waits, LOAD, STORE) == (set(), set(), WAITS_FIRST)


@pytest.mark.parametrize("waits", [IF, FOR, BODY_OF_WHILE])
def test_a_wait_on_some_path_is_none(waits: tuple[str, ...]) -> None:
    assert found(*waits, LOAD, STORE) == ({0}, {1}, UNWAITED)
    assert found(*waits, SIGNAL, WAIT, LOAD, STORE)[2] == Waits(signals_early=True)
    # and takes back none
    assert found(WAIT, *waits, LOAD, STORE) == (set(), set(), WAITS_FIRST)


def test_in_its_own_branch_a_wait_is_one() -> None:
    within = ("scf.if %c {", WAIT, LOAD, "} else {", STORE, "}")
    assert found(*within) == (set(), {1}, UNWAITED)


def test_a_branch_of_its_own_values_hides_no_wait() -> None:
    reduced = ('%1 = "tt.reduce"(%n) <{axis = 0 : i32}> ({', "^bb0(%a: i32, %b: i32):", "}) : i32")
    assert found(WAIT, *reduced, LOAD, STORE) == (set(), set(), WAITS_FIRST)


def test_an_early_return_ends_a_path() -> None:
    leaves = ("cf.cond_br %c, ^bb1, ^bb2", "^bb1:  // pred: ^bb0", "tt.return", "^bb2:")
    assert found(WAIT, *leaves, LOAD, STORE) == (set(), set(), WAITS_FIRST)
    assert found(*leaves, WAIT, LOAD, STORE) == (set(), set(), UNWAITED)
    waits_within = (*leaves[:2], WAIT, *leaves[2:])
    assert found(*waits_within, LOAD, STORE) == ({0}, {1}, UNWAITED)
    joined = ("cf.cond_br %c, ^bb1, ^bb2", "^bb1:", WAIT, "cf.br ^bb2", "^bb2:  // 2 preds")
    assert found(*joined, LOAD, STORE) == ({0}, {1}, UNWAITED)


def test_a_function_beside_the_kernel_has_waits_of_its_own() -> None:
    beside = ("tt.return", "}", "tt.func private @other() {", WAIT)
    assert found(LOAD, STORE, *beside) == ({0}, {1}, UNWAITED)
