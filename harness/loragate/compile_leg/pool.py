"""Compile all launches of a provider in parallel, in processes that may crash."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import product

from loragate.compile_leg.baseline import Baseline, Record
from loragate.compile_leg.dry_launch import (
    Compiled,
    Contents,
    compile_launch,
    list_labels,
    settings,
    settle_process,
    triton_version,
)
from loragate.core.host import free_host_bytes, usable_cores

# 400 MB for torch, Triton and a kernel in the compiler, and as much for the assembler it starts
_WORKER_BYTES = 3 << 28


@dataclass(frozen=True, slots=True)
class Compilation:
    """What `triton` made of all launches. Because of `settings`, if any, no record was trusted."""

    triton: str
    settings: tuple[str, ...]
    kernels: tuple[Compiled, ...]


@dataclass(frozen=True, slots=True)
class _Unit:
    """One launch for one GPU, and what is on record for it."""

    provider: str
    label: str
    arch: int
    recorded: Contents

    def compile(self) -> tuple[Compiled, ...]:
        return compile_launch(self.provider, self.label, self.arch, self.recorded)


def compile_all(provider: str, archs: Sequence[int], trusted: Baseline) -> Compilation:
    """Compile all kernels that `provider` launches, except those with the content that `trusted`
    has for this release of Triton. Raises ProviderError."""
    with _pool(_worker_count()) as pool:
        version, found = pool.submit(triton_version), pool.submit(settings)
        labels = pool.submit(list_labels, provider).result()
        triton, variables = version.result(), found.result()
        record = None if variables else trusted.find(triton)
        units = [
            _Unit(provider, label, arch, _contents(record, label, arch))
            for label, arch in product(labels, archs)
        ]
        futures = [_submit(pool, unit) for unit in units]
        found_of = [_result(future, unit) for future, unit in zip(futures, units, strict=True)]
    return Compilation(triton, variables, tuple(item for items in found_of for item in items))


def compiler_settings() -> tuple[str, ...]:
    """Variables that change what the compiler makes of a kernel, as a process of the pool sees
    them."""
    with _pool(1) as pool:
        return pool.submit(settings).result()


def _worker_count() -> int:
    return max(1, min(usable_cores(), free_host_bytes() // _WORKER_BYTES))


def _contents(record: Record | None, label: str, arch: int) -> Contents:
    """What is on record for the launch called `label`."""
    return {
        (kernel, specialisation): content
        for (name, kernel, specialisation), content in (record.contents if record else {}).items()
        if name == f"sm_{arch}" and specialisation.partition("#")[0] == label
    }


def _submit(pool: ProcessPoolExecutor, unit: _Unit) -> Future[tuple[Compiled, ...]] | None:
    try:
        return pool.submit(unit.compile)
    except BrokenProcessPool:
        return None


def _result(future: Future[tuple[Compiled, ...]] | None, unit: _Unit) -> tuple[Compiled, ...]:
    try:
        if future is not None:
            return future.result()
    except BrokenProcessPool:
        # any of the launches in flight may have crashed the pool: each is tried alone
        pass
    with _pool(1) as pool:
        try:
            return pool.submit(unit.compile).result()
        except BrokenProcessPool:
            error = "the compiler crashed its process"
            return (Compiled("unknown", unit.label, f"sm_{unit.arch}", None, error),)


def _pool(workers: int) -> ProcessPoolExecutor:
    # forks of a process that has imported torch, which takes seconds, and what a task names, but
    # not Triton, which would have read its environment variables
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])
    # starts no more processes than there is work for
    return ProcessPoolExecutor(
        workers, mp_context=context, initializer=_settle, initargs=(dict(os.environ),)
    )


def _settle(environment: Mapping[str, str]) -> None:
    # the process that forks has the variables of its start
    os.environ.clear()
    os.environ.update(environment)
    settle_process()
