"""The GPUs that NVML lists, and the error for a driver that does not answer."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from loragate.core.gpus import (
    WITHOUT_MPS,
    DriverError,
    ListedGpu,
    cuda_is_initialised,
    driver_version,
    list_gpus,
    mps_runs,
)


class Nvml:
    """A driver that lists `gpus`, each a uuid with its free bytes or the code of an error."""

    def __init__(self, gpus: list[tuple[str, int]], *, init_error: int | None = None) -> None:
        self.gpus = gpus
        self.init_error = init_error
        self.open_sessions = 0
        self.inits = 0

    def init(self) -> None:
        self.inits += 1
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.open_sessions += 1

    def shutdown(self) -> None:
        self.open_sessions -= 1

    def memory(self, gpu: tuple[str, int]) -> SimpleNamespace:
        if gpu[1] < 0:
            raise pynvml.NVMLError(-gpu[1])
        return SimpleNamespace(free=gpu[1])


@pytest.fixture
def install(monkeypatch):
    # other tests of this process may have switched it on
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def install(nvml: Nvml) -> Nvml:
        functions = {
            "nvmlInit": nvml.init,
            "nvmlShutdown": nvml.shutdown,
            "nvmlSystemGetDriverVersion": lambda: "580.95.05",
            "nvmlDeviceGetCount": lambda: len(nvml.gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: nvml.gpus[index],
            "nvmlDeviceGetUUID": lambda gpu: gpu[0],
            "nvmlDeviceGetMemoryInfo": nvml.memory,
        }
        for name, function in functions.items():
            monkeypatch.setattr(pynvml, name, function)
        return nvml

    return install


def test_gpus_are_listed_in_the_order_of_the_driver_with_their_free_memory(install):
    nvml = install(Nvml([("GPU-aaa", 1000 << 20), ("GPU-bbb", 7)]))
    assert list_gpus({}) == (
        ListedGpu("0", "GPU-aaa", 1000 << 20),
        ListedGpu("1", "GPU-bbb", 7),
    )
    assert nvml.open_sessions == 0


@pytest.mark.parametrize(
    "error", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION]
)
def test_a_gpu_that_reports_no_memory_is_listed_with_none(install, error):
    install(Nvml([("GPU-aaa", -error)]))
    assert list_gpus({}) == (ListedGpu("0", "GPU-aaa", 0),)


def test_a_machine_without_a_driver_has_no_gpus(install):
    install(Nvml([], init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert list_gpus({}) == ()
    assert driver_version() is None


@pytest.mark.parametrize(
    ("nvml", "problem"),
    [
        (
            Nvml([], init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
            "NVML/RM version mismatch",
        ),
        (
            Nvml([], init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
            "NVML reports: Driver Not Loaded",
        ),
        (Nvml([("GPU-aaa", -pynvml.NVML_ERROR_GPU_IS_LOST)]), "NVML reports: GPU is lost"),
        (Nvml([]), "NVML lists no GPUs"),
    ],
)
def test_a_driver_that_fails_is_an_error_and_not_a_machine_without_gpus(install, nvml, problem):
    install(nvml)
    with pytest.raises(DriverError, match=f"fix that, or set CUDA_VISIBLE_DEVICES= .*{problem}"):
        list_gpus({})
    assert nvml.open_sessions == 0


def test_the_driver_is_not_asked_where_all_gpus_are_hidden(install):
    nvml = install(Nvml([("GPU-aaa", 1)]))
    assert list_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert nvml.inits == 0


@pytest.mark.parametrize("value", ["1", "True", "yes"])
def test_the_driver_is_not_asked_by_the_interpreter(install, monkeypatch, value):
    nvml = install(Nvml([("GPU-aaa", 1)]))
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert list_gpus({}) == ()
    assert nvml.inits == 0


def test_the_version_of_the_driver_is_known_where_it_answers(install):
    nvml = install(Nvml([]))
    assert driver_version() == "580.95.05"
    assert nvml.open_sessions == 0


def test_processes_share_gpus_where_the_daemon_has_its_pipe(tmp_path: Path) -> None:
    here = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not mps_runs(here)
    (tmp_path / "control").touch()
    assert mps_runs(here)
    assert not mps_runs(here | WITHOUT_MPS)


@pytest.mark.parametrize(("result", "is_initialised"), [(0, True), (3, False)])
def test_a_driver_that_answers_has_been_initialised(
    monkeypatch: pytest.MonkeyPatch, result: int, is_initialised: bool
) -> None:
    # 3 is CUDA_ERROR_NOT_INITIALIZED
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: result)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert cuda_is_initialised() is is_initialised
