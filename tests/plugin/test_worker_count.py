"""How many workers a session gets on a machine with a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loragate.core.gpus import ListedGpu
from loragate.matrix.case import Tier
from loragate.matrix.selection import Selection
from loragate.plugin import pinning
from loragate.run.legs import GateSetup, legs_of

ROOT = Path(__file__).parents[2]
_GIB = 1 << 30


@pytest.fixture
def count_workers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int | None]:
    """Of a session with these arguments on 16 cores and a GPU of 140 GiB, where the largest of all
    cases needs most of it."""
    gpu = ListedGpu("0", "GPU-one", 140 * _GIB)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pinning, "list_gpus", lambda environ: (gpu,))
    monkeypatch.setattr(pinning, "usable_cores", lambda: 16)
    monkeypatch.setattr(pinning, "free_host_bytes", lambda: 100 * _GIB)
    monkeypatch.setattr(pinning, "all_cases", lambda config: ())
    monkeypatch.setattr(pinning, "selection_of", lambda config: SimpleNamespace())
    monkeypatch.setattr(pinning, "replace", lambda selection, **changes: selection)
    runs = [SimpleNamespace(case=None)] * 100
    monkeypatch.setattr(pinning, "select_runs", lambda selection, cases: runs)
    monkeypatch.setattr(pinning, "footprint_bytes", lambda case: 118 * _GIB)

    def count(path: str, *plugins: str) -> int | None:
        config: Any = SimpleNamespace(
            pluginmanager=SimpleNamespace(hasplugin=lambda name: name in plugins),
            rootpath=ROOT,
            args=[path],
            invocation_params=SimpleNamespace(dir=ROOT),
            stash=pytest.Stash(),
        )
        return pinning.pytest_xdist_auto_num_workers(config)

    return count


@pytest.mark.parametrize("path", ["cases", "cases/test_cases.py::test_case", ".", "gate_tests"])
def test_memory_for_the_largest_case_is_kept(
    path: str, count_workers: Callable[..., int | None]
) -> None:
    assert count_workers(path) == 2


def test_host_tests_keep_no_memory_for_a_case(count_workers: Callable[..., int | None]) -> None:
    assert count_workers("tests/kernels", *_plugins_of_the_host_leg()) == 8


def _plugins_of_the_host_leg() -> list[str]:
    """As the gate starts it."""
    selection = Selection(matrix=(), subjects=("lorakernels",), tier=Tier.SMOKE)
    setup = GateSetup(run="r", report=Path("report"), selection=selection, has_gpu=True)
    (leg,) = (leg for leg in legs_of(setup) if leg.name == "host")
    return [name for flag, name in zip(leg.command, leg.command[1:], strict=False) if flag == "-p"]
