"""Programmatic dependent launch is used only where its preconditions hold."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from triton.runtime.jit import KernelInterface

import lorakernels
from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.specs import launches  # noqa: E402

# the kernels that read before they wait, and those whose wait each of them trusts
TRUSTS = {
    "lora_expand_kernel": ("lora_shrink_kernel", "lora_lookup_kernel"),
    "moe_expand_kernel": ("moe_shrink_kernel",),
    "moe_gemm_kernel": ("moe_shrink_kernel",),
}
# reads tables before it waits, which are older than the base product that comes before it
BEHIND_BASE_ALONE = "lora_add_kernel"
LOADS = ("tl.load", "load_shrunk", "load_output")
ACCESSES = {"load", "store", "atomic_add"}


def modules() -> Iterator[Any]:
    for info in pkgutil.walk_packages(lorakernels.__path__, "lorakernels."):
        try:
            yield importlib.import_module(info.name)
        except ModuleNotFoundError as missing:
            # of an extra; what needs it holds no kernel
            if missing.name not in ("transformers", "vllm"):
                raise


def kernels() -> dict[str, Any]:
    """Every kernel that can be launched dependently."""
    found = {}
    for module in modules():
        for name, value in vars(module).items():
            if isinstance(value, KernelInterface):
                function: Any = value.fn  # type: ignore[attr-defined]
                if "PDL" in inspect.signature(function).parameters:
                    found[name] = function
    return found


def accesses() -> set[str]:
    """Calls that access memory: Triton's own, and device functions that make one of them."""
    made = {
        value.fn.__name__: set(calls(value.fn))  # type: ignore[attr-defined]
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, KernelInterface)
    }
    helpers = {name: within for name, within in made.items() if name not in kernels()}
    found = set(ACCESSES)
    while more := {name for name, within in helpers.items() if within & found} - found:
        found |= more
    return found


def calls(function: Callable[..., Any]) -> list[str]:
    """The calls of a kernel in the order of its text; a wait under a condition on more than PDL
    is not certain, and is left out."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    uncertain = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and not (isinstance(branch.test, ast.Name))
        for node in ast.walk(branch)
    }
    found = [
        (node.lineno, node.col_offset, getattr(node.func, "attr", getattr(node.func, "id", "")))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and not (id(node) in uncertain and getattr(node.func, "id", "") == "gdc_wait")
    ]
    return [name for *_, name in sorted(found)]


def reads_before_the_wait(function: Callable[..., Any], **constants: Any) -> set[str]:
    """The pointers that a specialisation of a kernel loads from before its first certain wait,
    itself or with a function that loads."""
    found: set[str] = set()

    def visit(nodes: Sequence[ast.AST]) -> bool:
        """Whether the wait was reached."""
        for node in nodes:
            if isinstance(node, ast.If):
                names = {name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)}
                if names <= constants.keys():
                    test = eval(compile(ast.Expression(node.test), "kernel", "eval"), {}, constants)
                    if visit(node.body if test else node.orelse):
                        return True
                    continue
            for call in ast.walk(node.iter if isinstance(node, ast.For) else node):
                if isinstance(call, ast.Call) and "gdc_wait" in ast.unparse(call.func):
                    return True
                if isinstance(call, ast.Call) and ast.unparse(call.func) in LOADS:
                    found.add(ast.unparse(call.args[0]).partition(" ")[0])
            if isinstance(node, ast.For) and visit(node.body):
                return True
        return False

    body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(body, ast.FunctionDef)
    assert visit(body.body)
    return found


@pytest.mark.parametrize("group", [1, 2])
def test_behind_the_base_product_an_expand_reads_nothing_that_is_younger_before_it_waits(
    group: int,
) -> None:
    tables = {"tile_slots_ptr", "tile_rows_ptr", "num_tiles_ptr"}
    function = kernels()["lora_expand_kernel"]
    constants = {"PDL": True, "GROUP": group, "STORE": False}
    reads = reads_before_the_wait(function, BEHIND_BASE=True, **constants)
    assert reads <= tables | {"ranks_ptr", "scales_ptr", "b_ptrs"}
    alone = reads_before_the_wait(function, BEHIND_BASE=False, **constants)
    assert ("out_ptrs" in alone) == (group == 1)
    assert "h_ptrs" not in alone


def test_what_adds_a_stored_delta_reads_its_tables_alone_before_it_waits() -> None:
    reads = reads_before_the_wait(kernels()[BEHIND_BASE_ALONE], PDL=True)
    assert reads == {"tile_rows_ptr", "num_tiles_ptr"}


def test_all_kernels_wait_before_they_access_memory_but_those_that_trust_another_one() -> None:
    trusting, noted = set(), accesses() | {"gdc_wait"}
    assert {"bucket_of", "fill", "reset", "reset_before_tiles", "cut_into_tiles"} <= noted
    for name, function in kernels().items():
        order = [call for call in calls(function) if call in noted]
        if order[0] != "gdc_wait":
            trusting.add(name)
    assert trusting == TRUSTS.keys() | {BEHIND_BASE_ALONE}
    assert len(kernels()) > 12


class Launch:
    """Takes the place of a kernel and notes its launches."""

    def __init__(self, name: str, log: list[tuple[str, bool]]) -> None:
        self.name, self.log = name, log

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: object, **options: Any) -> None:
            dependent = options.get("PDL", False)
            assert options.get("launch_pdl", False) == dependent
            # without adapters a product waits at its start
            trusts = self.name != "moe_gemm_kernel" or options["LORA"]
            name = self.name if trusts else f"{self.name} without adapters"
            behind_base = options.get("BEHIND_BASE", False)
            self.log.append((f"{name} behind the base product" if behind_base else name, dependent))

        return launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    log: list[tuple[str, bool]] = []
    for module in modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, KernelInterface):
                monkeypatch.setattr(module, name, Launch(name, log))
    return log


def test_a_kernel_that_trusts_another_one_follows_it_directly(
    launched: list[tuple[str, bool]],
) -> None:
    seen = set()
    for label, launch in launches(90):
        launched.clear()
        launch()
        for before, (name, dependent) in zip([("", False), *launched], launched, strict=False):
            if name in TRUSTS and dependent:
                seen.add(name)
                # one that was launched dependently has waited; any other one did not have to
                assert before[0] in TRUSTS[name], label
    assert seen == TRUSTS.keys()


def test_a_shrink_beside_the_base_product_is_not_launched_dependently(
    launched: list[tuple[str, bool]],
) -> None:
    expand = "lora_expand_kernel behind the base product"
    seen = 0
    for label, launch in launches(90):
        launched.clear()
        launch()
        for before, after in pairwise(launched):
            if after[0] == expand:
                seen += 1
                assert (before, after) == (("lora_shrink_kernel", False), (expand, True)), label
    assert seen


def test_the_shrink_of_a_stored_delta_is_not_launched_dependently_and_its_expand_is(
    launched: list[tuple[str, bool]],
) -> None:
    stored = [launch for label, launch in launches(90) if label.startswith("stored-")]
    assert stored
    for launch in stored:
        launched.clear()
        launch()
        # nothing says what runs before the shrink on its stream
        assert launched[:2] == [("lora_shrink_kernel", False), ("lora_expand_kernel", True)]


def test_nothing_is_launched_dependently_on_a_gpu_without_it(
    launched: list[tuple[str, bool]],
) -> None:
    for _, launch in launches(80):
        launch()
    assert launched
    assert not any(dependent for _, dependent in launched)
