"""The state of a GPU while something runs: clocks, temperature, throttling, error counters. Imports
no torch.

What a GPU does not report is left out: a reading never fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pynvml


class HealthReader(Protocol):
    def read(self, gpu: str) -> Mapping[str, float]:
        """Numbers by name, of the GPU that CUDA_VISIBLE_DEVICES would name `gpu`. Of errors, how
        many there were since the reader was opened."""

    def close(self) -> None:
        """Nothing is read after this."""


class NoHealth:
    """On a machine without a GPU."""

    def read(self, gpu: str) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


class NvmlHealth:
    """As NVML reports it. Raises pynvml.NVMLError where there is no driver."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._handles: dict[str, Any] = {}
        self._events: dict[str, Any] = {}
        self._first: dict[str, Mapping[str, float]] = {}
        self._xids: dict[str, tuple[int, int]] = {}

    def read(self, gpu: str) -> Mapping[str, float]:
        try:
            handle = self._handle(gpu)
        except pynvml.NVMLError:
            return {}
        found = {name: value for name, ask in _STATE.items() if (value := _asked(ask, handle)) >= 0}
        counts = {n: value for n, ask in _ERRORS.items() if (value := _asked(ask, handle)) >= 0}
        first = self._first.setdefault(gpu, counts)
        found |= {name: value - first.get(name, 0) for name, value in counts.items()}
        return {**found, **self._xid(gpu)}

    def close(self) -> None:
        for events in self._events.values():
            pynvml.nvmlEventSetFree(events)
        pynvml.nvmlShutdown()

    def _handle(self, gpu: str) -> Any:
        if gpu not in self._handles:
            by_uuid = not gpu.isdecimal()
            find = pynvml.nvmlDeviceGetHandleByUUID if by_uuid else _by_index
            self._handles[gpu] = find(gpu)
            self._listen(gpu)
        return self._handles[gpu]

    def _listen(self, gpu: str) -> None:
        """Xid errors are told as events, and not counted anywhere."""
        self._xids[gpu] = (0, 0)
        try:
            events = pynvml.nvmlEventSetCreate()
            kind = pynvml.nvmlEventTypeXidCriticalError
            pynvml.nvmlDeviceRegisterEvents(self._handles[gpu], kind, events)
        except pynvml.NVMLError:
            return
        self._events[gpu] = events

    def _xid(self, gpu: str) -> Mapping[str, float]:
        if gpu not in self._events:
            return {}
        count, last = self._xids[gpu]
        while True:
            try:
                told = pynvml.nvmlEventSetWait_v2(self._events[gpu], 0)
            except pynvml.NVMLError:
                # a timeout: there is none
                break
            count, last = count + 1, int(told.eventData)
        self._xids[gpu] = count, last
        return {"xid_errors": float(count), **({"last_xid": float(last)} if count else {})}


def open_health(*, has_gpu: bool) -> HealthReader:
    """The reader for this machine."""
    if has_gpu:
        try:
            return NvmlHealth()
        except pynvml.NVMLError:
            return NoHealth()
    return NoHealth()


def _by_index(gpu: str) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(int(gpu))


def _asked(ask: Callable[[Any], float], handle: Any) -> float:
    """-1 for what the GPU does not report, or what this release of NVML does not know."""
    try:
        return float(ask(handle))
    except (pynvml.NVMLError, AttributeError):
        return -1.0


_STATE: Mapping[str, Callable[[Any], float]] = {
    "sm_clock_mhz": lambda h: pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda h: pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_MEM),
    "temperature_c": lambda h: pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU),
    # a set of bits; 1 is an idle GPU
    "throttle_reasons": lambda h: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(h),
    "free_gib": lambda h: pynvml.nvmlDeviceGetMemoryInfo(h).free / (1 << 30),
}
_ERRORS: Mapping[str, Callable[[Any], float]] = {
    "ecc_corrected": lambda h: pynvml.nvmlDeviceGetTotalEccErrors(
        h, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC
    ),
    "ecc_uncorrected": lambda h: pynvml.nvmlDeviceGetTotalEccErrors(
        h, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    ),
}
