"""The record of the fault corpus: what a run planted, beside what still holds of earlier runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loragate.core.checkout import Tree
from loragate.faults.model import Control, Fault
from loragate.faults.record import BASELINE_KEYS, upgraded
from loragate.records.recorder import Recorder
from loragate.records.results import ResultsError


@dataclass(frozen=True, slots=True)
class Plantings:
    """Faults and controls, in the order of the corpus."""

    faults: Sequence[Fault]
    controls: Sequence[Control]

    @property
    def names(self) -> list[str]:
        return [one.name for planted in self.by_kind().values() for one in planted]

    def by_kind(self) -> Mapping[str, Sequence[Fault | Control]]:
        """By the names that the kinds have in a record."""
        return {"faults": self.faults, "controls": self.controls}


@dataclass(slots=True)
class FaultRecord:
    """`asked`: what this run plants; `corpus`: all that the section is about.

    Raises ResultsError if a member of the corpus is neither asked for nor on record: before the
    run, because the record could not be completed after it.
    """

    recorder: Recorder
    asked: Plantings
    corpus: Plantings
    # of the corpus, by name: a record is written after each planted fault
    _digests: Mapping[str, str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        everything = [one for planted in self.corpus.by_kind().values() for one in planted]
        self._digests = {one.name: one.digest for one in everything}
        kept = self._valid_entries(upgraded(self.recorder.previous))
        asked = set(self.asked.names)
        for kind, planted in self.corpus.by_kind().items():
            names = [one.name for one in planted]
            missing = [n for n in names if n not in asked and n not in kept[kind]]
            if missing:
                raise ResultsError(
                    f"{self.recorder.path}: has no valid entry for {len(missing)} {kind} that "
                    f"--only leaves out: {', '.join(missing[:3])}"
                )

    def save(self, entries: Mapping[str, Mapping[str, Any]], done: Collection[str]) -> None:
        """Write the entries of what is `done`, by kind, and those of other runs for the rest.
        What was asked for and is not done is listed as unfinished. Raises CommandError."""
        self.recorder.note_edits()
        # of what is there by then: another run may have recorded other faults since this one began
        self.recorder.change(lambda current: self._updated(upgraded(current), entries, done))

    def _updated(
        self,
        previous: Mapping[str, Any],
        entries: Mapping[str, Mapping[str, Any]],
        done: Collection[str],
    ) -> dict[str, Any]:
        section: dict[str, Any] = {
            kind: {name: entry for name, entry in kept.items() if name not in done}
            | {name: with_baseline(entry, kept.get(name)) for name, entry in entries[kind].items()}
            for kind, kept in self._valid_entries(previous).items()
        }
        unfinished = self._unfinished(previous, done)
        if unfinished:
            section["unfinished"] = unfinished
        return section

    def _valid_entries(self, previous: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Entries of earlier runs, by kind, about exactly what is in the corpus now."""
        return {
            kind: {
                one.name: _origin(previous, old[one.name]) | old[one.name]
                for one in planted
                if old.get(one.name, {}).get("digest") == self._digests[one.name]
            }
            for kind, planted in self.corpus.by_kind().items()
            for old in [previous.get(kind, {})]
        }

    def _unfinished(self, previous: Mapping[str, Any], done: Collection[str]) -> list[str]:
        """What this run, or an earlier one that was interrupted, was to plant and did not."""
        asked, corpus = self.asked.names, set(self.corpus.names)
        earlier = [
            name for name in previous.get("unfinished", ()) if name in corpus and name not in asked
        ]
        return [name for name in (*asked, *earlier) if name not in done]


def with_baseline(entry: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """An entry, with what the baseline suite said of the same fault before if this run did not ask
    it."""
    if earlier is None or entry.get(BASELINE_KEYS[0]) is not None:
        return dict(entry)
    return {**entry, **{key: earlier[key] for key in BASELINE_KEYS if key in earlier}}


def _origin(previous: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """The code that an entry of an earlier run was seen with, where the entry does not say it."""
    commit, tree = previous.get("commit", ""), previous.get("tree", Tree.CLEAN)
    # records of older versions name the commit once for all entries
    is_of_that_run = entry.get("commit", commit) == commit
    # a tree with changes is not its commit, and the next run writes its own state over this one
    has_changes = is_of_that_run and tree != Tree.CLEAN
    return {"commit": commit} | ({"tree": tree} if has_changes else {})
