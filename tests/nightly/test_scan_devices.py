"""Where a scan runs: workers of each GPU and what they share of its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loragate.core.gpus import ListedGpu, share_of_gpu
from loragate.nightly.conditions import Conditions
from loragate.scan import child, devices
from loragate.scan.devices import Devices
from loragate.scan.messages import Order

GIB = 1 << 30
_LISTED = (ListedGpu("0", "GPU-a", 139 * GIB), ListedGpu("1", "GPU-b", 79 * GIB))


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 16)
    monkeypatch.setattr(devices, "free_host_bytes", lambda: 128 * GIB)


@pytest.mark.parametrize(
    ("gpus", "largest", "workers"),
    [
        ((), 50, 16),
        (("0",), 50, 10),
        # the smaller one decides, because all have the same number
        (("0", "1"), 50, 3),
        (("GPU-b",), 8, 8),
        # one that the driver does not list
        (("7",), 8, 1),
    ],
)
def test_there_are_as_many_workers_as_fit_beside_the_largest_case(
    gpus: tuple[str, ...], largest: int, workers: int
) -> None:
    assert Devices(gpus, _LISTED, largest * GIB).workers() == workers


def test_all_gpus_together_have_no_more_workers_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 6)
    assert Devices(("0", "1"), _LISTED, 8 * GIB).workers() == 3
    monkeypatch.setattr(devices, "usable_cores", lambda: 1)
    assert Devices(("0", "1"), _LISTED, 8 * GIB).workers() == 1


def test_workers_of_a_gpu_share_what_was_free_on_it() -> None:
    found = Devices(("GPU-a", "1"), _LISTED, 50 * GIB).shares(3)
    assert found == {
        "GPU-a": share_of_gpu(139 * GIB, 3, 50 * GIB),
        "1": share_of_gpu(79 * GIB, 3, 50 * GIB),
    }


def test_a_worker_that_is_alone_and_one_whose_memory_is_unknown_have_no_limit() -> None:
    assert Devices(("0",), _LISTED, 8 * GIB).shares(1) == {}
    assert Devices(("7",), _LISTED, 8 * GIB).shares(2) == {}
    assert Devices().shares(2) == {}


def test_cases_that_do_not_fit_into_the_memory_of_a_worker_are_named() -> None:
    sizes = {"small": GIB, "fits": 26 * GIB, "b": 40 * GIB, "c": 50 * GIB}
    (own,) = {share.own_bytes for share in Devices(("0",), _LISTED, 50 * GIB).shares(3).values()}
    assert 26 * GIB < own < 44 * GIB
    assert Devices(("0",), _LISTED, 50 * GIB).too_large(3, sizes) == {
        name for name, size in sizes.items() if size > own
    }
    # the GPU with the least memory decides
    assert Devices(("0", "1"), _LISTED, 50 * GIB).too_large(3, sizes) >= {"fits", "b", "c"}
    # without others there is nobody to wait for
    assert Devices(("0",), _LISTED, 50 * GIB).too_large(1, sizes) == frozenset()
    assert Devices().too_large(8, sizes) == frozenset()


class _Memory:
    """Records what trials reserve, and where the lock of the reserve is."""

    taken: list[tuple[object, ...]]

    def __init__(self, share: object, lock: object, allocator: object) -> None:
        self._of = (share, str(lock), allocator)

    @contextmanager
    def reserve(self, case_bytes: int) -> Iterator[None]:
        _Memory.taken.append((*self._of, case_bytes))
        yield


def test_trials_of_one_gpu_and_scan_wait_for_the_same_reserve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _Memory.taken = []
    monkeypatch.setattr(child, "WorkerMemory", _Memory)
    monkeypatch.setattr(child, "TorchAllocator", lambda: "torch")
    monkeypatch.setattr(child, "lock_of", lambda path: path)
    share = share_of_gpu(139 * GIB, 8, 50 * GIB)
    for number, gpu in enumerate(("GPU-a", "GPU-b")):
        order = Order(
            steps=(),
            conditions=Conditions(gpu=gpu),
            folder=tmp_path,
            wave=tmp_path,
            number=number,
            peers=2,
            run="night-1",
            share=share,
        )
        with child._reserve(order)(7):
            pass
    assert _Memory.taken == [
        (share, "night-1/GPU-a", "torch", 7),
        (share, "night-1/GPU-b", "torch", 7),
    ]


def test_a_trial_without_a_share_reserves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _Memory.taken = []
    monkeypatch.setattr(child, "WorkerMemory", _Memory)
    order = Order(
        steps=(), conditions=Conditions(), folder=tmp_path, wave=tmp_path, number=0, peers=1
    )
    with child._reserve(order)(7):
        pass
    assert not _Memory.taken
