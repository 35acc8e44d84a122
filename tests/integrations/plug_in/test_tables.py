"""The mapping of a step from the ids that vLLM passes: of any type, and of any value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.integrations.vllm.tables import StepTables, host_value  # noqa: E402

SLOTS, ROWS = 3, 8
# whose last 32 bits are those of a slot, or of a base row
BEYOND = (1 << 32, (1 << 32) + 2, (1 << 33) - 1, -(1 << 32), 1 - (1 << 32), (1 << 63) - 1)


def tables() -> StepTables:
    return StepTables(max_tokens=ROWS, max_slots=SLOTS, device="cpu")


def contents(step: StepTables) -> list[Tensor]:
    return [tensor.clone() for tensor in (*step.tensors, step.live, step.row_slots)]


def test_before_the_first_mapping_all_rows_are_base_rows_and_none_is_live() -> None:
    step = tables()
    assert host_value(step.live) == 0
    assert step.row_slots.tolist() == [-1] * ROWS
    # of each height: slots of tiles, rows of tiles, and how many tiles there are
    for tile_slots, tile_rows, num_tiles in zip(*[iter(step.tensors)] * 3, strict=True):
        assert num_tiles.item() == 0
        assert (tile_slots == -1).all()
        assert (tile_rows == -1).all()


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mappings are taken for those of a device, whose values the host does not read."""
    monkeypatch.setattr(BatchMetadata, "check", lambda self, token_slots: True)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("beyond", BEYOND)
def test_an_id_beyond_32_bits_on_a_device_counts_as_a_base_row(beyond: int) -> None:
    step, same = tables(), tables()
    step.prepare(torch.tensor([1, beyond, 2, beyond, -1]))
    same.prepare(torch.tensor([1, -1, 2, -1, -1]))
    assert step.row_slots.tolist() == [1, -1, 2] + [-1] * 5
    assert all(torch.equal(*both) for both in zip(contents(step), contents(same), strict=True))


@pytest.mark.parametrize("beyond", BEYOND)
def test_an_id_beyond_32_bits_on_the_host_is_refused_like_others_that_do_not_exist(
    beyond: int,
) -> None:
    step = tables()
    step.prepare(torch.tensor([1, 2]))
    before = contents(step)
    with pytest.raises(ValueError, match="token_slots must be -1 to 2"):
        step.prepare(torch.tensor([0, beyond]))
    assert all(torch.equal(*both) for both in zip(contents(step), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_ids_may_be_integers_of_any_size(dtype: torch.dtype) -> None:
    step = tables()
    step.prepare(torch.tensor([2, -1, 0], dtype=dtype))
    assert step.row_slots.tolist() == [2, -1, 0] + [-1] * 5


def test_bytes_without_a_sign_may_be_ids() -> None:
    step = tables()
    step.prepare(torch.tensor([2, 0], dtype=torch.uint8))
    assert step.row_slots.tolist() == [2, 0] + [-1] * 6


# of uint64, values have no number in int64
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.uint64])
def test_ids_that_are_no_numbers_of_slots_are_refused(dtype: torch.dtype) -> None:
    step = tables()
    step.prepare(torch.tensor([1, 2]))
    before = contents(step)
    with pytest.raises(
        ValueError, match=rf"token_slots must be uint8 or int8 to int64 \(got {dtype}\)"
    ):
        step.prepare(torch.tensor([1, 0]).to(dtype))
    assert all(torch.equal(*both) for both in zip(contents(step), before, strict=True))


class Called(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    ("dtype", "queued"), [(torch.int64, ["clamp", "_to_copy"]), (torch.int32, [])]
)
def test_ids_are_converted_without_a_wait_by_as_few_operators_as_there_are(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, queued: list[str]
) -> None:
    monkeypatch.setattr(BatchMetadata, "install", lambda self, token_slots, num_live: None)
    step, ids = tables(), torch.tensor([1, 1 << 20], dtype=dtype)
    with Called() as called:
        step.prepare(ids)
    # the number of rows is filled into a tensor of the host
    assert called.names == [*queued, "fill_"]
