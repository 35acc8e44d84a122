"""Which pointer arguments a kernel reads and writes, from the text of its TTIR."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

from loragate.execution.trace.ttir import PointerUse, pointer_use

FUNCTION = """
module {{
  tt.func public @kernel(%x: !tt.ptr<f16>, %n: i32, %y: !tt.ptr<f16>, %z: !tt.ptr<i64>) {{
{body}
    tt.return
  }}
}}
"""


def use(*lines: str) -> PointerUse:
    """Of a kernel that never waits, so that all it uses is used early."""
    found = pointer_use(text(*lines))
    assert found.early_reads == found.reads | found.through_reads
    assert found.early_writes == found.writes | found.through_writes
    return replace(found, early_reads=frozenset(), early_writes=frozenset())


def text(*lines: str) -> str:
    return FUNCTION.format(body="\n".join(f"    {line}" for line in lines))


def sets(reads: set[int], writes: set[int], *through: set[int]) -> PointerUse:
    return PointerUse(frozenset(reads), frozenset(writes), *map(frozenset, through))


def test_loads_read_stores_write_and_atomics_do_both() -> None:
    assert use(
        "%0 = tt.addptr %x, %n : !tt.ptr<f16>, i32",
        "%1 = tt.load %0 : !tt.ptr<f16>",
        "tt.store %y, %1 : !tt.ptr<f16>",
        "%2 = tt.atomic_rmw add, acq_rel, gpu, %z, %c1, %true : (!tt.ptr<i64>, i64, i1) -> i64",
    ) == sets({0, 2}, {1, 2})


def test_an_offset_that_was_loaded_is_no_pointer() -> None:
    assert use(
        "%0 = tt.load %z : !tt.ptr<i64>",
        "%1 = tt.addptr %x, %0 : !tt.ptr<f16>, i64",
        "%2 = tt.load %1 : !tt.ptr<f16>",
    ) == sets({0, 2}, set())


def test_a_pointer_is_followed_through_a_loop_and_its_results() -> None:
    assert use(
        "%0:2 = scf.for %i = %n to %n step %n iter_args(%a = %x, %b = %y) -> (t, t)  : i32 {",
        "  %1 = tt.load %a : !tt.ptr<f16>",
        "  scf.yield %b, %a : !tt.ptr<f16>, !tt.ptr<f16>",
        "}",
        "tt.store %0#1, %n : !tt.ptr<f16>",
    ) == sets({0, 1}, {0, 1})


def test_a_pointer_of_either_branch_may_be_the_one() -> None:
    assert use(
        "%0 = scf.if %c -> (!tt.ptr<f16>) {",
        "  scf.yield %x : !tt.ptr<f16>",
        "} else {",
        "  scf.yield %y : !tt.ptr<f16>",
        "}",
        "tt.store %0, %n : !tt.ptr<f16>",
    ) == sets(set(), {0, 1})


def test_regions_side_by_side_use_the_same_names_for_other_values() -> None:
    assert use(
        "scf.if %c {",
        "  %7 = tt.addptr %x, %n : !tt.ptr<f16>, i32",
        "  %8 = tt.load %7 : !tt.ptr<f16>",
        "}",
        "scf.if %c {",
        "  %7 = tt.addptr %y, %n : !tt.ptr<f16>, i32",
        "  tt.store %7, %n : !tt.ptr<f16>",
        "}",
    ) == sets({0}, {1})


def test_what_is_reached_through_loaded_addresses_is_told_apart() -> None:
    assert use(
        "%0 = tt.load %z : !tt.ptr<i64>",
        "%1 = tt.int_to_ptr %0 : i64 -> !tt.ptr<f16>",
        "%2 = tt.load %1 : !tt.ptr<f16>",
        "tt.store %1, %2 : !tt.ptr<f16>",
    ) == sets({2}, set(), {2}, {2})


def test_an_address_that_is_no_pointer_is_named_and_an_offset_or_a_choice_is_not() -> None:
    found = use(
        "%0 = tt.int_to_ptr %n : i32 -> !tt.ptr<f16>",
        "%1 = tt.load %0 : !tt.ptr<f16>",
        "%2 = arith.cmpi sgt, %m, %n : i32",
        "%3 = arith.select %2, %x, %y : !tt.ptr<f16>",
        "%4 = tt.addptr %3, %m : !tt.ptr<f16>, i32",
        "tt.store %4, %1 : !tt.ptr<f16>",
    )
    assert found == replace(sets(set(), {0, 1}), by_value=frozenset({"n"}))


def test_waiting_for_the_kernel_before_is_no_access_and_a_pointer_in_assembly_is() -> None:
    wait = '%0 = tt.elementwise_inline_asm "griddepcontrol.wait; // dummy $0" {pure = false} -> i32'
    assert use(wait) == sets(set(), set())
    other = '%0 = tt.elementwise_inline_asm "ld.global $0, [$1];" {pure = false} %x : !tt.ptr<f16>'
    assert use(other) == sets({0}, {0})


COMPILED = """
import json
from loragate.compile_leg import dry_launch
dry_launch.settle_process()
from triton.runtime import JITFunction, driver
from loragate.execution.streams.arguments import tensors_of
from loragate.execution.trace.ttir import pointer_use
driver.set_active(dry_launch._Driver(90))
run, found = JITFunction.run, {}
def compile_only(kernel, *args, grid, warmup, **options):
    name = kernel.fn.__name__
    if name not in found:
        compiled = run(kernel, *args, grid=(1,), warmup=True, **options)
        use = pointer_use(compiled.asm["ttir"])
        names = [name for name, _ in tensors_of(kernel.arg_names, args, options)]
        sets = (use.reads, use.writes, use.through_reads, use.through_writes)
        found[name] = [sorted({names[i] for i in numbers}) for numbers in sets]
        found[name] += [sorted(use.by_value)]
JITFunction.run = compile_only
for _, launch in dry_launch._launches("lorakernels.specs:launches", 90):
    if not {"lora_shrink_kernel", "lora_expand_kernel", "sort_at_once_kernel"} <= found.keys():
        launch()
print(json.dumps(found))
"""


def test_the_kernels_of_a_linear_layer_with_dependent_launches_are_understood() -> None:
    compiled = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = (sys.executable, "-c", COMPILED)
    done = subprocess.run(command, env=compiled, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    tiles = ["num_tiles_ptr", "tile_rows_ptr", "tile_slots_ptr"]
    shrink_reads = sorted([*tiles, "a_ptr", "ranks_ptr", "x_ptr"])
    assert found["lora_shrink_kernel"] == [shrink_reads, ["shrunk_ptr"], [], [], []]
    expand_reads = sorted([*tiles, "b_ptr", "out_ptr", "ranks_ptr", "scales_ptr", "shrunk_ptr"])
    assert found["lora_expand_kernel"] == [expand_reads, ["out_ptr"], [], [], []]
    # its arguments are named tuples of tensors, of which one is absent
    assert found["sort_at_once_kernel"] == [["routes"], ["tables"], [], [], []]
