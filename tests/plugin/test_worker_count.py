"""How many workers a session gets on a machine with a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loragate.core.gpus import ListedGpu, list_gpus
from loragate.plugin import pinning
from loragate.plugin.options import SETTINGS

ROOT = Path(__file__).parents[2]
_GIB = 1 << 30


@pytest.fixture
def count_workers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int | None]:
    """Of a session with these arguments on 16 cores and a GPU of 140 GiB, where the largest of all
    cases needs most of it."""
    gpu = ListedGpu("0", "GPU-one", 140 * _GIB)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(pinning, "list_gpus", lambda environ: (gpu,))
    monkeypatch.setattr(pinning, "usable_cores", lambda: 16)
    monkeypatch.setattr(pinning, "free_host_bytes", lambda: 100 * _GIB)
    monkeypatch.setattr(pinning, "selection_of", lambda config: SimpleNamespace())
    monkeypatch.setattr(pinning, "replace", lambda selection, **changes: selection)
    runs = [SimpleNamespace(case=None)] * 100
    monkeypatch.setattr(pinning, "selected_trials", lambda config, selection: runs)
    monkeypatch.setattr(pinning, "footprint_bytes", lambda case: 118 * _GIB)

    return lambda path: pinning.pytest_xdist_auto_num_workers(_config(path))


def _config(path: str) -> Any:
    return SimpleNamespace(
        rootpath=ROOT,
        args=[path],
        invocation_params=SimpleNamespace(dir=ROOT),
        stash=pytest.Stash(),
    )


@pytest.mark.parametrize("path", ["cases", "cases/test_cases.py::test_case", ".", "gate_tests"])
def test_memory_for_the_largest_case_is_kept(
    path: str, count_workers: Callable[..., int | None]
) -> None:
    assert count_workers(path) == 2


@pytest.mark.parametrize("visible", [None, "0", "GPU-one"])
def test_where_the_interpreter_runs_the_kernels_each_core_has_a_worker(
    visible: str | None,
    count_workers: Callable[..., int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # as the tests of kernels set it, which are host tests of the gate
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(pinning, "list_gpus", list_gpus)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_workers("tests/kernels") == 16
    specs = [SimpleNamespace(env={}) for _ in range(16)]
    pinning.pytest_xdist_setupnodes(_config("tests/kernels"), specs)
    assert not any("CUDA_VISIBLE_DEVICES" in spec.env for spec in specs)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_worker_that_loses_its_device_first_takes_no_other_process_of_the_gpu_with_it(
    number: int, monkeypatch: pytest.MonkeyPatch, count_workers: Callable[..., int | None]
) -> None:
    monkeypatch.setattr(pinning, "num_first", lambda runs, config, workers: number)
    specs = [SimpleNamespace(env={}) for _ in range(4)]
    config = _config("cases")
    pinning.pytest_xdist_setupnodes(config, specs)
    apart = [spec for spec in specs if "CUDA_MPS_PIPE_DIRECTORY" in spec.env]
    # the first of what is dealt begins on the last worker
    assert apart == specs[4 - number :]
    settings = SimpleNamespace(run="a run")
    config.stash[SETTINGS] = settings
    for spec in specs:
        gateway, manager = SimpleNamespace(spec=spec), SimpleNamespace(specs=specs)
        node = SimpleNamespace(config=config, workerinput={}, gateway=gateway, nodemanager=manager)
        pinning.pytest_configure_node(node)
    # whoever replaces it begins with another case
    assert not any("CUDA_MPS_PIPE_DIRECTORY" in spec.env for spec in specs)
    assert all(spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-one" for spec in specs)
