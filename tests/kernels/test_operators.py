"""Operators that are registered without `torch.library.custom_op`, and what they keep of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import pytest
import torch
from torch import Tensor

from lorakernels.runtime.operators import register_operator

callers: list[str] = []


def modules_of_callers() -> Iterator[str]:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        yield str(frame.f_globals.get("__name__"))


@register_operator("test_adds", mutates=("out", "others"))
def adds(x: Tensor, by: list[int], out: Tensor, others: list[Tensor], none: Tensor | None) -> None:
    callers[:] = modules_of_callers()
    for each in (out, *others):
        # as a kernel writes it, of which torch knows nothing
        each.detach().numpy()[:] += x.detach().numpy() * sum(by)


def call(x: Tensor, out: Tensor, *others: Tensor) -> None:
    torch.ops.lorakernels.test_adds(x, [1, 2], out, list(others), None)


@pytest.mark.parametrize("inference", [False, True])
def test_an_operator_runs_without_the_functions_of_a_custom_operator(inference: bool) -> None:
    with torch.inference_mode(inference):
        out = torch.ones(3)
        call(torch.ones(3), out)
    assert out.tolist() == [4, 4, 4]
    assert "torch._ops" in callers
    assert not [name for name in callers if name.startswith("torch._library")]


def test_a_graph_of_torch_holds_an_operator_and_knows_what_it_writes() -> None:
    def doubled(x: Tensor) -> Tensor:
        out = torch.zeros(3)
        before = out.clone()
        call(x, out)
        return out + before

    traced = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    assert traced(torch.ones(3)).tolist() == [3, 3, 3]


class Entered:
    """A context that the compiler does not know, so that a break within leaves the frame to it."""

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def test_the_compiler_does_not_look_into_an_operator_that_runs_behind_a_break() -> None:
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()

    def broken(x: Tensor, out: Tensor) -> None:
        with Entered():
            torch._dynamo.graph_break()
            torch.ops.lorakernels.test_adds(x, [1, 2], out, [], None)

    compiled = torch.compile(broken, backend="eager")
    for size in (2, 3, 4):
        out = torch.zeros(size)
        compiled(torch.ones(size), out)
        assert out.tolist() == [3] * size
    assert counters["stats"]["unique_graphs"] == 0


def test_an_operator_passes_the_checks_of_torch() -> None:
    operands = torch.ones(3), [1], torch.ones(3), [torch.ones(3)], None
    torch.library.opcheck(torch.ops.lorakernels.test_adds, operands)


def saved_for_a_gradient(is_result: bool) -> tuple[Tensor, Tensor]:
    """A result with a gradient, and what that needs: the result itself, or a factor that needs no
    gradient."""
    x, factor = torch.ones(3, requires_grad=True), torch.ones(3)
    result = torch.exp(x) if is_result else x * factor
    return result, result if is_result else factor


@pytest.mark.parametrize("is_result", [True, False], ids=["result", "factor"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_gradient_that_needs_what_an_operator_has_changed_is_refused(
    place: int, is_result: bool
) -> None:
    result, saved = saved_for_a_gradient(is_result)
    other = torch.zeros(3)
    with torch.no_grad():
        call(torch.ones(3), *((saved, other) if place == 0 else (other, saved)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@register_operator("test_multiplies", mutates=("out",))
def multiplies(x: Tensor, out: Tensor) -> None:
    out.mul_(x)


def test_nothing_in_an_operator_is_recorded_for_gradients() -> None:
    x, out = torch.full((3,), 4.0, requires_grad=True), torch.ones(3)
    torch.ops.lorakernels.test_multiplies(x, out)
    assert not out.requires_grad
    leaf = torch.ones(3, requires_grad=True)
    torch.ops.lorakernels.test_multiplies(torch.full((3,), 4.0), leaf)
    assert leaf.tolist() == [4, 4, 4]


def _as_many(x: Tensor, shrunk: list[Tensor]) -> Tensor:
    return torch.empty_like(x)


@register_operator("test_returns", mutates=("shrunk",), fake=_as_many)
def returns(x: Tensor, shrunk: list[Tensor]) -> Tensor:
    callers[:] = modules_of_callers()
    shrunk[0].copy_(x)
    return x * 2


@register_operator("test_sums", mutates=(), fake=lambda parts: torch.empty_like(parts[0]))
def sums(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def doubled(x: Tensor, shrunk: Tensor) -> Tensor:
    result: Tensor = torch.ops.lorakernels.test_returns(x, [shrunk])
    return result


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_an_operator_that_returns_runs_without_the_functions_of_a_custom_operator(
    mode: Callable[[], AbstractContextManager[None]],
) -> None:
    with mode():
        shrunk = torch.zeros(3)
        assert doubled(torch.ones(3), shrunk).tolist() == [2, 2, 2]
    assert shrunk.tolist() == [1, 1, 1]
    assert not [name for name in callers if name.startswith("torch._library")]


def test_what_an_operator_returns_has_no_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    result = doubled(x, torch.zeros(3))
    assert result.requires_grad
    with pytest.raises(RuntimeError, match="lorakernels::test_returns has no gradient"):
        result.sum().backward()
    with torch.no_grad():
        assert not doubled(x, torch.zeros(3)).requires_grad
    assert not doubled(torch.ones(3), torch.zeros(3)).requires_grad
    # one of a list counts as well
    result = torch.ops.lorakernels.test_sums([torch.ones(3), x])
    with pytest.raises(RuntimeError, match="lorakernels::test_sums has no gradient"):
        result.sum().backward()


def test_a_graph_of_torch_holds_an_operator_that_returns() -> None:
    def step(x: Tensor) -> Tensor:
        shrunk = torch.zeros(3)
        before = shrunk.clone()
        return doubled(x, shrunk) + shrunk + before

    traced = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert traced(torch.ones(3)).tolist() == [3, 3, 3]
    with torch.inference_mode():
        assert traced(torch.ones(3)).tolist() == [3, 3, 3]


def test_an_operator_that_returns_passes_the_checks_of_torch() -> None:
    for grad in (False, True):
        operands = torch.ones(3, requires_grad=grad), [torch.ones(3)]
        # a gradient is what it refuses
        tests = (
            "test_schema",
            "test_faketensor",
            *(() if grad else ("test_aot_dispatch_dynamic",)),
        )
        torch.library.opcheck(torch.ops.lorakernels.test_returns, operands, test_utils=tests)


@pytest.mark.parametrize("is_result", [True, False], ids=["result", "factor"])
def test_a_gradient_that_needs_what_an_operator_that_returns_has_changed_is_refused(
    is_result: bool,
) -> None:
    result, saved = saved_for_a_gradient(is_result)
    with torch.no_grad():
        doubled(torch.ones(3), saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_an_operator_may_be_registered_again() -> None:
    for by in (2, 3):

        @register_operator("test_again", mutates=("out",))
        def again(out: Tensor, by: int = by) -> None:
            out.mul_(by)

        out = torch.ones(2)
        torch.ops.lorakernels.test_again(out)
        assert out.tolist() == [by, by]


@register_operator("test_product", mutates=(), fake=lambda x, y: x.new_empty(x.shape[0], 2))
def product(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_autocast_does_not_change_what_an_operator_returns(backend: str | None) -> None:
    # 257 is no number of bf16
    x, y = torch.full((3, 1), 257.0, requires_grad=backend is None), torch.ones(1, 2)

    def step(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.lorakernels.test_product(x, y)
        return result

    run = step if backend is None else torch.compile(step, backend=backend, fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = run(x)
        # only within the operator
        assert (x @ y).dtype is torch.bfloat16
    assert result.dtype is torch.float32
    assert result.tolist() == [[257, 257]] * 3
