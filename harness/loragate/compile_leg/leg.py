"""The compile leg: launches -> compiled kernels, or those on record -> results -> one verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from loragate.compile_leg.baseline import (
    Baseline,
    BaselineError,
    Key,
    Record,
    load_baseline,
    save_baseline,
)
from loragate.compile_leg.dry_launch import ProviderError
from loragate.compile_leg.judge import judge_all, key_of
from loragate.compile_leg.pool import Compilation, compile_all, compiler_settings
from loragate.core.checkout import data_root
from loragate.core.files import lock_of
from loragate.core.resources import Resources
from loragate.core.verdict import Verdict, worst
from loragate.events.model import CompileResult, Event, Note
from loragate.subjects.registry import SUBJECTS

ARCHS = (80, 90, 100)
BASELINE = data_root() / "ci" / "baselines" / "resources.json"


class SettingsError(ValueError):
    """The environment changes what the compiler does."""


class Writer(Protocol):
    def write(self, event: Event) -> None: ...


def run(
    writer: Writer,
    *,
    subject: str = "lorakernels",
    provider: str | None = None,
    archs: Sequence[int] = ARCHS,
    baseline: Path = BASELINE,
    everything: bool = False,
) -> Verdict:
    """Judge every kernel and write one CompileResult for each. Any verdict but PASS is explained
    by a result or a note. A kernel that crashes the compiler costs no other kernel its result.

    A kernel whose content is on record is compiled only with `everything`.
    """
    provider = provider or _provider_of(subject)
    try:
        records = load_baseline(baseline)
        trusted = Baseline() if everything else records
        done = compile_all(provider, archs, trusted)
    except (BaselineError, ProviderError) as error:
        writer.write(Note(text=f"compile leg: {error}"))
        return Verdict.INFRA
    record = _restrict(records.find(done.triton), archs)
    if record is None:
        recorded = ", ".join(sorted(records.records)) or "none"
        text = f"compile leg: Triton {done.triton} has no baseline (recorded: {recorded})"
        writer.write(Note(text=text))
    writer.write(Note(text=_tally(done)))
    results = tuple(judge_all(done.kernels, record, subject=subject, triton=done.triton))
    for result in results:
        writer.write(result)
    return worst(result.verdict for result in results)


def record(
    *,
    subject: str = "lorakernels",
    provider: str | None = None,
    archs: Sequence[int] = ARCHS,
    baseline: Path = BASELINE,
    everything: bool = False,
) -> tuple[CompileResult, ...]:
    """Record what the installed Triton compiles now as the baseline of its minor release.

    A kernel whose content is on record is compiled only with `everything`. Returns the results of
    a comparison with the old baseline. Raises ValueError if a kernel does not compile or is
    translated wrongly, SettingsError, and BaselineError if the file is damaged; the file is then
    unchanged.
    """
    old = _baseline_of(baseline)
    if settings := compiler_settings():
        names = ", ".join(settings)
        raise SettingsError(f"a baseline is of Triton without settings: unset {names}")
    trusted = Baseline() if everything else old
    done = compile_all(provider or _provider_of(subject), archs, trusted)
    before = old.find(done.triton)
    made = _record_of(done, before)
    with lock_of(baseline):
        # another process may have recorded another release meanwhile
        save_baseline(_baseline_of(baseline).with_record(made), baseline)
    return tuple(judge_all(done.kernels, before, subject=subject, triton=done.triton))


def _baseline_of(path: Path) -> Baseline:
    return load_baseline(path) if path.exists() else Baseline()


def expected_count(baseline: Path = BASELINE) -> int:
    """The number of results of a complete leg: all kernels on record, under any release of Triton.
    Imports neither torch nor Triton. Raises BaselineError."""
    return len(load_baseline(baseline).keys)


def _record_of(done: Compilation, before: Record | None) -> Record:
    """What is unchanged since the record `before` is taken from there. ValueError for a kernel that
    does not compile or is translated wrongly."""
    entries: dict[Key, Resources] = {}
    for item in done.kernels:
        key = key_of(item)
        known = before.entries.get(key) if before and item.unchanged else item.resources
        where = f"{item.kernel} for {item.arch} ({item.specialisation})"
        if known is None:
            raise ValueError(f"{where} does not compile: {item.error}")
        # what is on record is not compiled, so it would never be looked at again
        if item.unwritten:
            raise ValueError(f"{where} was translated wrongly: {item.unwritten}")
        entries[key] = known
    return Record(done.triton, entries, {key_of(item): item.content for item in done.kernels})


def _tally(done: Compilation) -> str:
    unchanged = sum(item.unchanged for item in done.kernels)
    text = f"compile leg: {len(done.kernels) - unchanged} kernels compiled"
    if done.settings:
        return f"{text}; the record is not used because of {', '.join(done.settings)}"
    return f"{text}, {unchanged} not compiled because they are unchanged since the baseline"


def _provider_of(subject: str) -> str:
    provider = SUBJECTS[subject].launches
    assert provider is not None, f"{subject} has no launches to compile"
    return provider


def _restrict(record: Record | None, archs: Sequence[int]) -> Record | None:
    if record is None:
        return None
    wanted = {f"sm_{arch}" for arch in archs}
    kept = {key: value for key, value in record.entries.items() if key[0] in wanted}
    return replace(record, entries=kept)


def describe(results: Sequence[CompileResult]) -> Iterator[str]:
    """One line for each result that has a message."""
    for result in results:
        if result.message:
            where = f"{result.kernel} for {result.arch} ({result.specialisation})"
            yield f"{result.verdict}: {where}: {result.message}"
