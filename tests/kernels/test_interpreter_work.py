"""What the interpreter is spared changes no result, and is spared."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loragate.core.machine import select_interpreter

select_interpreter()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from lorakernels.runtime import interpreter  # noqa: E402
from lorakernels.runtime.interpreter_work import _leave_out_overflow  # noqa: E402

from ..far_memory import copied_memory, far  # noqa: E402, F401

pytestmark = pytest.mark.skipif(
    not interpreter.is_on(), reason="this process runs compiled kernels"
)

N = 4
# prints every attribute of types and values, with and without the repair
_ATTRIBUTES = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
if sys.argv[1] == "repaired":
    import lorakernels
import triton.language as tl
kinds = [tl.int1, tl.int32, tl.float32, tl.bfloat16, tl.pointer_type(tl.float16)]
kinds += [tl.pointer_type(tl.float16, const=True)]
for again in range(2):
    for kind in kinds:
        values = [tl.tensor("handle", kind)]
        for shape in ([16], [tl.constexpr(16)], [16, 1], tl.tuple([4, 4])):
            block = tl.block_type(kind, shape)
            values.append(tl.tensor(shape, block))
            print(type(block.shape).__name__, sorted((k, str(v)) for k, v in vars(block).items()))
        for value in values:
            print(type(value.shape).__name__, sorted((k, str(v)) for k, v in vars(value).items()))
"""


@triton.jit
def _add_one(x, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(x + offs, tl.load(x + offs) + 1)


@triton.jit
def _add_one_to_each(tensors, N: tl.constexpr):
    for place in tl.static_range(len(tensors)):
        _add_one(tensors[place], N)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("by_name", [False, True])
def test_memory_that_a_launch_has_used_is_free_when_its_caller_drops_it(
    uncollected: None, by_name: bool
) -> None:
    x = torch.zeros(2 * N)
    memory = StorageWeakRef(x.untyped_storage())
    view = x[N:]
    launch = _add_one[(1,)]
    launch(x=view, N=N) if by_name else launch(view, N)
    assert x.tolist() == [0] * N + [1] * N
    del x, view
    assert memory.expired()


@triton.jit
def _add_in_turn(x, SIZES: tl.constexpr, tensors):
    for place in tl.static_range(len(SIZES)):
        _add_one(x, SIZES[place])
        tl.debug_barrier()
    for place in tl.static_range(len(tensors)):
        _add_one(tensors[place], SIZES[0])


@pytest.mark.parametrize("has_tensors", [False, True])
def test_memory_is_free_behind_a_launch_that_has_tuples_as_well(
    uncollected: None, has_tensors: bool
) -> None:
    x, y = torch.zeros(N), torch.zeros(N)
    memories = [StorageWeakRef(each.untyped_storage()) for each in (x, y)]
    # numbers of a compiled kernel, and tensors
    _add_in_turn[(1,)](x, (N, N), (y,) if has_tensors else ())
    assert x.tolist() == [2] * N
    assert y.tolist() == [float(has_tensors)] * N
    del x, y
    assert [memory.expired() for memory in memories] == [True, True]


def test_tensors_in_a_tuple_are_written_where_they_are() -> None:
    x, y = torch.zeros(N), torch.ones(N)
    _add_one_to_each[(1,)]((x, y), N)
    assert (x.tolist(), y.tolist()) == ([1] * N, [2] * N)


@pytest.mark.usefixtures("copied_memory")
def test_tensors_that_are_not_on_the_host_are_copied_there_and_back() -> None:
    x = torch.zeros(N)
    _add_one[(1,)](far(x), N)
    assert x.tolist() == [1] * N


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes memory of a GPU to the host")
def test_tensors_of_a_gpu_are_written_there() -> None:
    x = torch.zeros(N, device="cuda")
    _add_one[(1,)](x, N)
    assert x.tolist() == [1] * N


@triton.jit
def _product_of_sums(x, y):
    return (x + y) * y


@triton.jit
def _nested(x, y):
    return _product_of_sums(x, y)


@triton.jit
def _map(x_ptr, y_ptr, out_ptr, N: tl.constexpr, OP: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, OP(tl.load(x_ptr + offs), tl.load(y_ptr + offs)))


def _run() -> torch.Tensor:
    x = torch.tensor([1, -2, 2**31 - 1, 7], dtype=torch.int32)
    y = torch.tensor([3, 5, 1, 2**30], dtype=torch.int32)
    out = torch.empty(N, dtype=torch.int32)
    _map[(1,)](x, y, out, N, _nested)
    assert torch.equal(out, (x + y) * y)
    return out


def test_each_sum_of_integers_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = triton.runtime.interpreter.InterpreterBuilder
    done = []
    for name in ("create_add", "create_mul"):
        compute = getattr(builder, name)

        def counted(self: Any, *args: Any, name: str = name, compute: Any = compute) -> Any:
            done.append(name)
            return compute(self, *args)

        monkeypatch.setattr(builder, name, counted)
    _run()
    assert done == ["create_add", "create_mul"]


@triton.jit
def _sort(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.sort(tl.load(x_ptr + offs)))


def test_a_sort_combines_no_two_elements_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(-9, 9, (64,), generator=torch.Generator().manual_seed(0)).int()
    out = torch.empty_like(x)
    monkeypatch.setattr(triton.runtime.interpreter.ReduceOps, "generic_reduce", None)
    _sort[(1,)](x, out, 64)
    assert torch.equal(out, x.sort().values)


def test_an_interpreter_that_asserts_still_looks_for_overflows() -> None:
    class Interpreter:
        interpreter_builder = triton.runtime.interpreter.InterpreterBuilder()

    built = Interpreter.interpreter_builder
    built.options = replace(built.options, debug=True)
    _leave_out_overflow(Interpreter)
    assert built.options.sanitize_overflow


def test_a_device_function_patches_nothing_within_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = triton.runtime.interpreter
    patch, scopes = module._patch_lang, []

    def noted(fn: Any) -> Any:
        scopes.append(patch(fn))
        return scopes[-1]

    monkeypatch.setattr(module, "_patch_lang", noted)
    changes: list[int] = []
    monkeypatch.setattr(
        module._LangPatchScope,
        "restore",
        _before(lambda: changes.extend(len(s._changes) for s in scopes), module),
    )
    _run()
    launch, *device_functions = changes
    assert launch > 0
    assert device_functions == [0, 0]


def test_a_kernel_that_cannot_see_the_language_is_refused_as_triton_does() -> None:
    with pytest.raises(AssertionError, match="must be visible"):
        triton.runtime.interpreter._patch_lang(FunctionType(_run.__code__, {}))


def _before(look: Any, module: Any) -> Any:
    restore = module._LangPatchScope.restore

    def restored(self: Any) -> None:
        look()
        restore(self)

    return restored


def test_a_launch_that_fails_leaves_the_language_as_it_was() -> None:
    before = (tl.load, tl.range, tl.tensor.__add__, tl.tensor.__str__)
    with pytest.raises(triton.runtime.errors.InterpreterError):
        _map[(1,)](torch.ones(N), torch.ones(N), torch.ones(N), N, None)
    _run()
    assert (tl.load, tl.range, tl.tensor.__add__, tl.tensor.__str__) == before


def test_types_and_values_have_the_attributes_that_triton_gives_them() -> None:
    def attributes(how: str) -> str:
        command = [sys.executable, "-c", _ATTRIBUTES, how]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True)
        return done.stdout.decode()

    assert attributes("repaired") == attributes("plain") != ""


def test_nothing_of_the_first_value_of_a_type_is_kept_for_the_others() -> None:
    class Handle:
        pass

    # no kernel has values of it
    kind = tl.block_type(tl.float8e5b16, [1, 2, 1, 4, 1])
    for _ in range(2):
        handle = Handle()
        known = weakref.ref(handle)
        assert tl.tensor(handle, kind).handle is handle
        del handle
        gc.collect()
        assert known() is None


def test_a_shape_that_triton_refuses_is_refused_beside_an_equal_one() -> None:
    for size in (16, tl.constexpr(16)):
        assert tl.block_type(tl.int32, [size]).shape == (16,)
    with pytest.raises(AssertionError):
        tl.block_type(tl.int32, (16,))
    for size in (16.0, tl.constexpr(16.0)):
        with pytest.raises(TypeError):
            tl.block_type(tl.int32, [size])
