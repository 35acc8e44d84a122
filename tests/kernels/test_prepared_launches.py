"""Launches that are prepared once for all operands that are alike."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lorakernels.runtime import prepared
from lorakernels.runtime.launching import noted_launches, start
from lorakernels.runtime.prepared import FixedTensors, Operand, launch_prepared
from lorakernels.runtime.tuning import DEFAULT, Tuning

Made = tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]


class Kernel:
    """Keeps the grid, the arguments and the options of its launches."""

    def __init__(self) -> None:
        self.made: list[Made] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.made.append((grid, args, options))


class Operation:
    """A plan that launches one kernel with its operands; `calls` are those of the plan."""

    def __init__(self, kernel: Any | None = None) -> None:
        self.kernel, self.calls = Kernel() if kernel is None else kernel, 0

    def plan(self, *operands_and_constants: Any) -> None:
        self.calls += 1
        start(self.kernel, (3, 2))(*operands_and_constants, NUMBER=self.calls)

    def __call__(
        self, *operands: Operand, constants: Sequence[int] = (), tuning: Tuning = DEFAULT
    ) -> Made:
        launch_prepared(self.plan, operands, tuple(constants), tuning)
        made: Made = self.kernel.made[-1]
        return made


def aligned(rows: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, 4], at an address that is a multiple of 16."""
    tensor = torch.zeros(rows, 4, dtype=dtype)
    assert tensor.data_ptr() % 16 == 0
    return tensor


def test_operands_that_are_alike_are_planned_once_and_each_launch_gets_its_own() -> None:
    operation = Operation()
    for x, out in [(aligned(), aligned()) for _ in range(3)]:
        grid, args, options = operation(x, out, constants=(7,))
        assert args[0] is x
        assert args[1] is out
        assert (grid, args[2], options) == ((3, 2), 7, {"NUMBER": 1})
    assert operation.calls == 1
    assert len(operation.kernel.made) == 3


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "rows": lambda: {"x": aligned(5)},
    # of other distances between rows, and of other ones between columns alone
    "strides": lambda: {"x": aligned().T},
    "columns": lambda: {"x": torch.zeros(32).as_strided((4, 4), (4, 2))},
    "dtype": lambda: {"x": aligned(dtype=torch.int32)},
    "device": lambda: {"x": aligned().to("meta")},
    "alignment": lambda: {"x": torch.zeros(17)[1:].view(4, 4)},
    "none": lambda: {"x": None},
    "constant": lambda: {"constants": (8,)},
    "tuning": lambda: {"tuning": replace(DEFAULT)},
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("place", [0, 1])
def test_operands_that_differ_in_anything_that_a_plan_reads_are_planned_anew(
    other: str, place: int
) -> None:
    operation = Operation()
    first: dict[str, Any] = {"constants": (7,), "tuning": DEFAULT}
    change = OTHERS[other]()
    operands: list[Tensor | None] = [aligned(), aligned()]
    operation(*operands, **first)
    changed = list(operands)
    if "x" in change:
        changed[place] = change.pop("x")
    operation(*changed, **first | change)
    assert operation.calls == 2
    operation(*operands, **first)
    assert operation.calls == 2


def test_the_address_of_an_operand_decides_and_not_its_place_in_its_memory() -> None:
    operation, memory = Operation(), torch.zeros(32)
    for x in (aligned(), memory[4:20].view(4, 4), memory[8:24].view(4, 4)):
        operation(x)
    assert operation.calls == 1
    # its memory begins with it
    elsewhere = torch.from_numpy(memory.numpy()[1:17]).view(4, 4)
    operation(elsewhere)
    assert (operation.calls, elsewhere.storage_offset()) == (2, 0)


def test_another_plan_of_the_same_operands_is_another_operation() -> None:
    first, second = Operation(), Operation()
    x = aligned()
    first(x)
    second(x)
    assert (first.calls, second.calls) == (1, 1)


def test_a_plan_gets_fixed_tensors_one_by_one_where_they_stand_among_the_operands() -> None:
    operation = Operation()
    for x, out in [(aligned(), aligned()) for _ in range(2)]:
        fixed = FixedTensors([aligned(3), aligned(5)])
        _, args, _ = operation(x, fixed, None, out, constants=(7,))
        wanted = (x, *fixed.tensors, None, out)
        assert len(args) == len(wanted) + 1
        assert all(have is want for have, want in zip(args, wanted, strict=False))
    # tensors of one layout, if other ones
    assert operation.calls == 1


@pytest.mark.parametrize("other", ["rows", "strides", "columns", "dtype", "device", "alignment"])
@pytest.mark.parametrize("place", [0, 1])
def test_fixed_tensors_that_differ_in_anything_that_a_plan_reads_are_planned_anew(
    other: str, place: int
) -> None:
    operation = Operation()
    tensors = [aligned(), aligned()]
    operation(aligned(), FixedTensors(tensors))
    tensors[place] = OTHERS[other]()["x"]
    operation(aligned(), FixedTensors(tensors))
    assert operation.calls == 2


def test_tensors_are_told_apart_from_fixed_ones_beside_them() -> None:
    operation = Operation()
    x, y = aligned(), aligned(5)
    operation(FixedTensors([x, y]))
    _, args, _ = operation(FixedTensors([x]), y)
    assert args[0] is x
    assert args[1] is y


def test_the_layout_of_fixed_tensors_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    layout = prepared._layout
    monkeypatch.setattr(prepared, "_layout", lambda each: (seen.append(each), layout(each))[1])
    operation, fixed = Operation(), FixedTensors([aligned()])
    for _ in range(3):
        operation(aligned(), fixed)
    assert len([each for each in seen if each is fixed.tensors[0]]) == 1


class Group(NamedTuple):
    first: Tensor
    second: Tensor


class Sizes(NamedTuple):
    rows: int
    columns: int


def test_named_tuples_of_tensors_get_those_of_the_step_and_others_stay() -> None:
    kernel = Kernel()

    def plan(x: Tensor, y: Tensor) -> None:
        start(kernel, (1,))(Group(y, x), Sizes(*x.shape))

    for x, y in [(aligned(), aligned()) for _ in range(2)]:
        launch_prepared(plan, (x, y), (), DEFAULT)
        group, sizes = kernel.made[-1][1]
        assert isinstance(group, Group)
        assert group.first is y
        assert group.second is x
        assert sizes == Sizes(4, 4)


def test_what_a_plan_allocates_is_new_in_each_step_and_the_same_for_its_launches() -> None:
    kernel, calls = Kernel(), []

    def plan(x: Tensor) -> None:
        calls.append(x)
        scratch = torch.empty(3, x.shape[0], dtype=torch.float64)
        start(kernel, (1,))(x, scratch)
        start(kernel, (1,))(scratch, torch.empty(2, dtype=torch.int32))

    kept = []
    for _ in range(3):
        launch_prepared(plan, (aligned(5),), (), DEFAULT)
        (_, (_, written), _), (_, (read, other), _) = kernel.made[-2:]
        assert written is read
        assert (written.shape, written.dtype) == ((3, 5), torch.float64)
        assert (other.shape, other.dtype) == ((2,), torch.int32)
        kept += [written.data_ptr(), other.data_ptr()]
    assert len(calls) == 1
    # kernel.made keeps them all
    assert len(set(kept)) == len(kept)


def test_what_a_plan_allocates_is_where_it_was_whatever_the_default_device_is() -> None:
    kernel = Kernel()

    def plan(x: Tensor) -> None:
        start(kernel, (1,))(x, torch.empty(3, device=x.device))

    for _ in range(2):
        x = aligned()
        with torch.device("meta"):
            launch_prepared(plan, (x,), (), DEFAULT)
        assert kernel.made[-1][1][1].device == x.device


@pytest.mark.parametrize("operand", [None, torch.empty(0)], ids=["absent", "empty"])
@pytest.mark.parametrize("shape", [(3, 2), (0, 2)], ids=["values", "no values"])
def test_launches_beside_an_operand_without_memory_are_kept(
    operand: Tensor | None, shape: tuple[int, ...]
) -> None:
    kernel, calls = Kernel(), []

    def plan(x: Tensor, other: Tensor | None) -> None:
        calls.append(x)
        start(kernel, (1,))(x, other, torch.empty(shape))

    for _ in range(2):
        launch_prepared(plan, (aligned(), operand), (), DEFAULT)
        _, given, allocated = kernel.made[-1][1]
        assert given is operand
        assert allocated.shape == shape
    assert len(calls) == 1


def test_a_view_that_begins_where_an_operand_does_becomes_the_operand_of_the_step() -> None:
    kernel, calls = Kernel(), []

    def plan(x: Tensor, out: Tensor) -> None:
        calls.append(x)
        start(kernel, (1,))(x[:2].view(-1), out)

    for x, out in [(aligned(), aligned()) for _ in range(2)]:
        launch_prepared(plan, (x, out), (), DEFAULT)
        assert kernel.made[-1][1][0].data_ptr() == x.data_ptr()
    assert len(calls) == 1


def test_a_view_that_begins_elsewhere_is_taken_anew_in_each_step() -> None:
    kernel, calls = Kernel(), []

    def plan(x: Tensor) -> None:
        calls.append(x)
        start(kernel, (1,))(x[1:])

    for x in (aligned(), aligned()):
        launch_prepared(plan, (x,), (), DEFAULT)
        assert kernel.made[-1][1][0].data_ptr() == x[1:].data_ptr()
    assert len(kernel.made) == 2


def test_a_view_that_begins_before_an_operand_is_taken_anew_in_each_step() -> None:
    kernel = Kernel()

    def plan(x: Tensor) -> None:
        start(kernel, (1,))(x.as_strided((4, 4), (4, 1), 0))

    for _ in range(2):
        whole = aligned(8)
        launch_prepared(plan, (whole[4:],), (), DEFAULT)
        assert kernel.made[-1][1][0].data_ptr() == whole.data_ptr()


def test_a_view_of_a_view_s_bits_as_another_dtype_is_taken_anew_in_each_step() -> None:
    kernel = Kernel()

    def plan(x: Tensor) -> None:
        start(kernel, (1,))(x.view(torch.int32))

    for x in (aligned(), aligned()):
        launch_prepared(plan, (x,), (), DEFAULT)
        (found,) = kernel.made[-1][1]
        assert (found.data_ptr(), found.dtype) == (x.data_ptr(), torch.int32)


@pytest.mark.parametrize("shared", ["tensor", "address"])
def test_operands_that_were_one_tensor_at_first_are_told_apart_later(shared: str) -> None:
    operation = Operation()
    x = aligned()
    operation(x, x if shared == "tensor" else x.view(4, 4))
    first, second = aligned(), aligned()
    _, args, _ = operation(first, second)
    assert args[0] is first
    assert args[1] is second


def test_parts_of_one_buffer_that_a_plan_allocates_stay_parts_of_one_buffer() -> None:
    kernel = Kernel()

    def plan(x: Tensor) -> None:
        buffer = torch.empty(8)
        start(kernel, (1,))(x, buffer[:4], buffer[4:])

    for _ in range(2):
        launch_prepared(plan, (aligned(),), (), DEFAULT)
        _, first, second = kernel.made[-1][1]
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_an_operand_may_be_absent_and_another_one_in_its_place() -> None:
    kernel = Kernel()

    def plan(x: Tensor, weights: Tensor | None) -> None:
        start(kernel, (1,))(x, x if weights is None else weights)

    for weights in (None, aligned(), None):
        x = aligned()
        launch_prepared(plan, (x, weights), (), DEFAULT)
        assert kernel.made[-1][1][1] is (x if weights is None else weights)


def test_a_plan_that_raises_launches_nothing_and_is_asked_again() -> None:
    kernel = Kernel()
    calls: list[Tensor] = []

    def plan(x: Tensor) -> None:
        calls.append(x)
        start(kernel, (1,))(x)
        raise ValueError("x must be square")

    for _ in range(2):
        with pytest.raises(ValueError, match=r"^x must be square$"):
            launch_prepared(plan, (aligned(),), (), DEFAULT)
    assert not kernel.made
    assert len(calls) == 2


@pytest.mark.parametrize("work", [Tensor.zero_, Tensor.clone, Tensor.sum])
def test_a_plan_that_computes_something_is_refused(work: Callable[[Tensor], Tensor]) -> None:
    kernel = Kernel()

    def plan(x: Tensor) -> None:
        start(kernel, (1,))(x[1:].T)
        work(torch.empty_like(x))

    with pytest.raises(AssertionError, match=r"^a plan must not call aten::"):
        launch_prepared(plan, (aligned(),), (), DEFAULT)
    assert not kernel.made


def test_launches_that_are_noted_are_not_made_and_their_operands_are_noted() -> None:
    operation = Operation()
    x = aligned()
    for _ in range(2):
        with noted_launches() as launches:
            launch_prepared(operation.plan, (x,), (), DEFAULT)
        (launch,) = launches
        assert launch.args[0] is x
    assert not operation.kernel.made
    operation(x)
    assert operation.calls == 3


def test_no_operand_is_kept_alive() -> None:
    class Forgetful(Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: None

    operation, kernel = Operation(Forgetful()), Forgetful()

    def plan(x: Tensor, y: Tensor) -> None:
        operation.plan(x)
        start(kernel, (1,))(Group(x, y), torch.empty(3))

    x, y = aligned(), aligned()
    launch_prepared(plan, (x, y), (), DEFAULT)
    seen = weakref.ref(x), weakref.ref(y)
    del x, y
    gc.collect()
    assert [each() for each in seen] == [None, None]


def test_the_oldest_layout_is_forgotten_where_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepared, "_MOST", 2)
    operation = Operation()
    for rows in (1, 2, 3):
        operation(aligned(rows))
    assert len(prepared._PREPARED) == 2
    operation(aligned(3))
    operation(aligned(2))
    assert operation.calls == 3
    operation(aligned(1))
    assert operation.calls == 4


OTHER_FORMS: dict[str, Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "tuple": lambda x: (((x, x),), {}),
    "tuple with a number": lambda x: ((Pair(x, 3),), {}),
    "option": lambda x: ((), {"X": x}),
    "other strides": lambda x: ((x, torch.empty(3, 2).T), {}),
}


class Pair(NamedTuple):
    tensor: Tensor
    number: int


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_a_launch_of_another_form_is_made_with_what_its_plan_gives_it(form: str) -> None:
    kernel = Kernel()

    def plan(x: Tensor) -> None:
        args, options = OTHER_FORMS[form](x)
        start(kernel, (1,))(*args, **options)

    for x in (aligned(), aligned()):
        launch_prepared(plan, (x,), (), DEFAULT)
        _, args, options = kernel.made[-1]
        tensors = [
            part
            for value in (*args, *options.values())
            for part in (value if isinstance(value, tuple) else (value,))
            if isinstance(part, Tensor)
        ]
        assert tensors[0] is x
        assert tensors[-1].stride() == ((1, 2) if form == "other strides" else x.stride())


class Compiled(Kernel):
    """Stands for a function of Triton that is compiled and for what it is compiled to."""

    arg_names = ("x", "out", "size", "BLOCK", "STAGES")

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Kernel:
        self.compiled.append((args, options))
        return self


@pytest.mark.parametrize(
    ("grid", "axes"), [((5,), (5, 1, 1)), ((5, 2), (5, 2, 1)), ((5, 2, 3), (5, 2, 3))]
)
def test_a_compiled_kernel_gets_all_arguments_in_their_order_and_a_grid_of_three_axes(
    grid: tuple[int, ...], axes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "JITFunction", Compiled)
    kernel = Compiled()

    def plan(x: Tensor, out: Tensor, size: int) -> None:
        start(kernel, grid)(x, out, size, num_warps=4, STAGES=3, BLOCK=64)

    steps = [(aligned(), aligned()) for _ in range(2)]
    for x, out in steps:
        launch_prepared(plan, (x, out), (9,), DEFAULT)
        launched, args, options = kernel.made[-1]
        assert launched == axes
        assert args[0] is x
        assert args[1] is out
        assert args[2:] == (9, 64, 3)
        # such as the number of warps: the kernel has been compiled for it
        assert options == {}
    ((args, options),) = kernel.compiled
    assert args[0] is steps[0][0]
    assert options == {"num_warps": 4, "STAGES": 3, "BLOCK": 64}


def test_a_kernel_that_is_still_being_compiled_is_launched_as_its_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Later(Compiled):
        def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
            return object()

    monkeypatch.setattr(prepared, "JITFunction", Compiled)
    kernel = Later()

    def plan(x: Tensor) -> None:
        start(kernel, (5,))(x, BLOCK=64)

    for x in (aligned(), aligned()):
        launch_prepared(plan, (x,), (), DEFAULT)
        grid, args, options = kernel.made[-1]
        assert args[0] is x
        assert (grid, options) == ((5,), {"BLOCK": 64})
