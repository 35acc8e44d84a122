"""What is different between two reports. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loragate.api.report import Report, Result
from loragate.core.verdict import Verdict, worst

# facts of a machine that say nothing about results
_IGNORED = frozenset({"executable"})


@dataclass(frozen=True, slots=True)
class Change:
    """A case whose verdict, or whose kind of failure, is another one."""

    before: Result
    now: Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`worse` and `better` by verdict; `other` fail in another way than before. `added` and
    `removed` are run ids that only one report has judged; `missing` are those that the later run
    has planned and never started. `environment` holds (before, now) of every version and fact of
    the machine that differs, "" where one is unknown."""

    worse: tuple[Change, ...]
    better: tuple[Change, ...]
    other: tuple[Change, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    missing: tuple[str, ...]
    environment: Mapping[str, tuple[str, str]]


def compare(before: Report, now: Report) -> Difference:
    """All in order of the run ids."""
    common = sorted(before.results.keys() & now.results.keys())
    pairs = [Change(before.results[name], now.results[name]) for name in common]
    return Difference(
        worse=tuple(pair for pair in pairs if _is_worse(pair.before.verdict, pair.now.verdict)),
        better=tuple(pair for pair in pairs if _is_worse(pair.now.verdict, pair.before.verdict)),
        other=tuple(
            pair
            for pair in pairs
            if pair.now.verdict is pair.before.verdict and pair.now.failure != pair.before.failure
        ),
        added=tuple(sorted(now.results.keys() - before.results.keys())),
        removed=tuple(sorted(before.results.keys() - now.results.keys())),
        missing=now.missing,
        environment=_environment(before, now),
    )


def _is_worse(first: Verdict, second: Verdict) -> bool:
    return first is not second and worst((first, second)) is second


def _environment(before: Report, now: Report) -> dict[str, tuple[str, str]]:
    old, new = _facts(before), _facts(now)
    keys = sorted((old.keys() | new.keys()) - _IGNORED)
    found = {key: (old.get(key, ""), new.get(key, "")) for key in keys}
    return {key: pair for key, pair in found.items() if pair[0] != pair[1]}


def _facts(report: Report) -> dict[str, str]:
    return {**report.machine, **report.versions, "commit": report.commit}
