"""Cases that are known to be flaky, in a file that people write: with reason, owner and date.

A case in quarantine is run as every other one and stays in the report. It does not wake anybody,
until it is stable again: then it is released. Pure, but for reading the file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from loragate.core.yaml_file import YamlFileError, read_yaml
from loragate.history.model import Outcome, Purpose, ScanRun, TrialRecord
from loragate.matrix.problems import nearest
from loragate.nightly.environment import environment_key
from loragate.nightly.states import differing_trials

_FIELDS = ("case", "reason", "owner", "since", "clean_runs")
_NEEDED = ("case", "reason", "owner", "since")
# runs of a scan in a row in which the case was always right
_CLEAN_RUNS = 10


class QuarantineError(ValueError):
    """The file cannot be used; the message names file, entry, field and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """case: a run id. It is released after `clean_runs` runs of a scan without a failure."""

    case: str
    reason: str
    owner: str
    since: date
    clean_runs: int = _CLEAN_RUNS


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An entry, its age, and what the history says about it."""

    entry: Quarantined
    age_days: int
    clean: int
    failures: int
    trials: int

    @property
    def released(self) -> bool:
        return self.clean >= self.entry.clean_runs


def read_quarantine(path: Path) -> tuple[Quarantined, ...]:
    """The entries of a file, a YAML list; none where there is no file. Raises QuarantineError."""
    if not path.exists():
        return ()
    try:
        content = read_yaml(path)
    except YamlFileError as error:
        raise QuarantineError(str(error)) from error
    if content is None:
        return ()
    if not isinstance(content, list):
        raise QuarantineError(f"{path}: must be a list of entries with {', '.join(_NEEDED)}")
    return tuple(_entry(f"{path}: entry {k}", item) for k, item in enumerate(content, 1))


def _entry(where: str, item: Any) -> Quarantined:
    if not isinstance(item, Mapping):
        raise QuarantineError(f"{where}: must have the fields {', '.join(_NEEDED)} (got {item!r})")
    for name in item:
        if name not in _FIELDS:
            near = nearest(name, _FIELDS)
            hint = f"; did you mean {near}?" if near else ""
            allowed = ", ".join(_FIELDS)
            raise QuarantineError(f"{where}: there is no field {name!r}; known are {allowed}{hint}")
    missing = [name for name in _NEEDED if name not in item]
    if missing:
        raise QuarantineError(f"{where}: lacks {', '.join(missing)}")
    for name in ("case", "reason", "owner"):
        if not isinstance(item[name], str) or not item[name].strip():
            raise QuarantineError(f"{where}: {name} must be a text (got {item[name]!r})")
    if type(item["since"]) is not date:
        raise QuarantineError(
            f"{where}: since must be a date as 2026-01-31 (got {item['since']!r})"
        )
    clean = item.get("clean_runs", _CLEAN_RUNS)
    if type(clean) is not int or clean < 1:
        raise QuarantineError(f"{where}: clean_runs must be a number from 1 up (got {clean!r})")
    return Quarantined(**item)


def check_cases(path: Path, entries: Iterable[Quarantined], known: Collection[str]) -> None:
    """known: the run ids that exist. Raises QuarantineError for an entry of another case, or a
    second one of the same."""
    seen: set[str] = set()
    for entry in entries:
        if entry.case not in known:
            near = nearest(entry.case, known)
            hint = f"; did you mean {near}?" if near else ""
            raise QuarantineError(f"{path}: there is no case {entry.case!r}{hint}")
        if entry.case in seen:
            raise QuarantineError(f"{path}: {entry.case!r} has two entries")
        seen.add(entry.case)


def check_dates(path: Path, entries: Iterable[Quarantined], today: date) -> None:
    """today: in UTC. Raises QuarantineError for an entry of a day to come; where the sun rises
    first it is tomorrow already."""
    for entry in entries:
        if (entry.since - today).days > 1:
            raise QuarantineError(
                f"{path}: {entry.case!r}: since must not be a day to come "
                f"(got {entry.since}; by the clock of this machine it is {today})"
            )


def held(
    entries: Sequence[Quarantined],
    trials: Iterable[TrialRecord],
    runs: Iterable[ScanRun],
    today: date,
) -> tuple[Held, ...]:
    """What the history says about each entry; `trials` the oldest first. Runs from before the day
    of an entry release nothing, otherwise it might be released on that day."""
    environments = {run.uid: environment_key(run.environment) for run in runs}
    found: dict[str, list[TrialRecord]] = {entry.case: [] for entry in entries}
    for trial in trials:
        if trial.case in found:
            found[trial.case].append(trial)
    return tuple(_held(entry, found[entry.case], environments, today) for entry in entries)


def _held(
    entry: Quarantined, trials: list[TrialRecord], environments: Mapping[str, str], today: date
) -> Held:
    failed = _failed(trials, environments)
    runs: dict[str, list[TrialRecord]] = defaultdict(list)
    for trial in trials:
        if trial.purpose is Purpose.PLANNED:
            runs[trial.run].append(trial)
    clean = 0
    begin = datetime(entry.since.year, entry.since.month, entry.since.day, tzinfo=UTC).timestamp()
    for run in reversed(runs.values()):
        if run[0].at < begin or any((t.run, t.number) in failed for t in run):
            break
        # a run that judged nothing of it is neither clean nor not
        clean += any(trial.outcome is Outcome.RIGHT for trial in run)
    every = [trial for run in runs.values() for trial in run]
    return Held(
        entry=entry,
        age_days=max(0, (today - entry.since).days),
        clean=clean,
        failures=sum((trial.run, trial.number) in failed for trial in every),
        trials=len(every),
    )


def _failed(trials: Iterable[TrialRecord], environments: Mapping[str, str]) -> set[tuple[str, int]]:
    """The trials of a case that were wrong or differed, also from those of other processes, by run
    and number. Of older source as well: most nights have a new one."""
    found: set[tuple[str, int]] = set()
    sources: dict[tuple[str, str], list[TrialRecord]] = defaultdict(list)
    for trial in trials:
        if trial.outcome in (Outcome.DIFFERENT, Outcome.WRONG):
            found.add((trial.run, trial.number))
        elif trial.promised:
            sources[trial.device, trial.path_key].append(trial)
    for of_source in sources.values():
        found.update(differing_trials(of_source, environments))
    return found
