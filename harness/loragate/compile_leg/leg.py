"""The compile leg: labels -> a pool of compiling processes -> results -> one verdict."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import product
from pathlib import Path
from typing import Protocol

from loragate.compile_leg.baseline import (
    Baseline,
    BaselineError,
    Record,
    load_baseline,
    save_baseline,
)
from loragate.compile_leg.dry_launch import (
    Compiled,
    ProviderError,
    compile_launch,
    list_labels,
    settle_process,
    triton_version,
)
from loragate.compile_leg.judge import judge_all
from loragate.core.verdict import Verdict, worst
from loragate.events.model import CompileResult, Event, Note
from loragate.subjects.registry import SUBJECTS

ARCHS = (80, 90, 100)
BASELINE = Path(__file__).resolve().parents[3] / "ci" / "baselines" / "resources.json"
_WORKERS = 2


class Writer(Protocol):
    def write(self, event: Event) -> None: ...


def run(
    writer: Writer,
    *,
    subject: str = "lorakernels",
    provider: str | None = None,
    archs: Sequence[int] = ARCHS,
    baseline: Path = BASELINE,
) -> Verdict:
    """Compile every kernel and write one CompileResult for each. Any verdict but PASS is explained
    by a result or a note. A kernel that crashes the compiler costs no other kernel its result."""
    provider = provider or _provider_of(subject)
    try:
        records = load_baseline(baseline)
        triton, compiled = compile_all(provider, archs)
    except (BaselineError, ProviderError) as error:
        writer.write(Note(text=f"compile leg: {error}"))
        return Verdict.INFRA
    record = _restrict(records.find(triton), archs)
    if record is None:
        recorded = ", ".join(sorted(records.records)) or "none"
        text = f"compile leg: Triton {triton} has no baseline (recorded: {recorded})"
        writer.write(Note(text=text))
    results = tuple(judge_all(compiled, record, subject=subject, triton=triton))
    for result in results:
        writer.write(result)
    return worst(result.verdict for result in results)


def record(
    *,
    subject: str = "lorakernels",
    provider: str | None = None,
    archs: Sequence[int] = ARCHS,
    baseline: Path = BASELINE,
) -> tuple[CompileResult, ...]:
    """Record what the installed Triton compiles now as the baseline of its minor release.

    Returns the results of a comparison with the old baseline. Raises ValueError if a kernel does
    not compile and BaselineError if the file is damaged; the file is then unchanged.
    """
    old = load_baseline(baseline) if baseline.exists() else Baseline()
    triton, compiled = compile_all(provider or _provider_of(subject), archs)
    entries = {}
    for item in compiled:
        if item.resources is None:
            where = f"{item.kernel} for {item.arch} ({item.specialisation})"
            raise ValueError(f"{where} does not compile: {item.error}")
        entries[item.arch, item.kernel, item.specialisation] = item.resources
    save_baseline(old.with_record(Record(triton, entries)), baseline)
    return tuple(judge_all(compiled, old.find(triton), subject=subject, triton=triton))


def expected_count(baseline: Path = BASELINE) -> int:
    """The number of results of a complete leg: all kernels on record, under any release of Triton.
    Imports neither torch nor Triton. Raises BaselineError."""
    return len(load_baseline(baseline).keys)


def compile_all(provider: str, archs: Sequence[int]) -> tuple[str, tuple[Compiled, ...]]:
    """Triton's version, and all kernels that `provider` launches. Raises ProviderError."""
    with _pool(_WORKERS) as pool:
        triton = pool.submit(triton_version).result()
        units = tuple(product(pool.submit(list_labels, provider).result(), archs))
        futures = [_submit(pool, provider, *unit) for unit in units]
        found = [
            _result(future, provider, *unit) for future, unit in zip(futures, units, strict=True)
        ]
    return triton, tuple(item for items in found for item in items)


def _provider_of(subject: str) -> str:
    provider = SUBJECTS[subject].launches
    assert provider is not None, f"{subject} has no launches to compile"
    return provider


def _submit(
    pool: ProcessPoolExecutor, provider: str, label: str, arch: int
) -> Future[tuple[Compiled, ...]] | None:
    try:
        return pool.submit(compile_launch, provider, label, arch)
    except BrokenProcessPool:
        return None


def _result(
    future: Future[tuple[Compiled, ...]] | None, provider: str, label: str, arch: int
) -> tuple[Compiled, ...]:
    try:
        if future is not None:
            return future.result()
    except BrokenProcessPool:
        # any of the launches in flight may have crashed the pool: each is tried alone
        pass
    with _pool(1) as pool:
        try:
            return pool.submit(compile_launch, provider, label, arch).result()
        except BrokenProcessPool:
            error = "the compiler crashed its process"
            return (Compiled("unknown", label, f"sm_{arch}", None, error),)


def _pool(workers: int) -> ProcessPoolExecutor:
    # a forked process would inherit a Triton that has read its environment variables
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=settle_process)


def _restrict(record: Record | None, archs: Sequence[int]) -> Record | None:
    if record is None:
        return None
    wanted = {f"sm_{arch}" for arch in archs}
    kept = {key: value for key, value in record.entries.items() if key[0] in wanted}
    return Record(record.triton, kept)


def describe(results: Sequence[CompileResult]) -> Iterator[str]:
    """One line for each result that has a message."""
    for result in results:
        if result.message:
            where = f"{result.kernel} for {result.arch} ({result.specialisation})"
            yield f"{result.verdict}: {where}: {result.message}"
