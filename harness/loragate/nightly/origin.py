"""Since when a path is flaky or wrong, and what changed then: source or environment. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from loragate.history.model import Outcome, Purpose, ScanRun, TrialRecord
from loragate.nightly.environment import Change, differences


class Changed(Enum):
    CODE = "code"
    ENVIRONMENT = "environment"
    # it is rare, and was not met before
    NOTHING = "nothing"
    # there are no earlier trials
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """bad: the run in which it was first seen. good: the last one before it with trials of the path
    that were right. clean: how many trials were right before it was first seen."""

    changed: Changed
    bad: ScanRun
    good: ScanRun | None = None
    changes: tuple[Change, ...] = ()
    clean: int = 0

    def text(self) -> str:
        bad = self.bad.commit[:12] or "an unknown commit"
        good = (self.good.commit[:12] if self.good else "") or "an unknown commit"
        match self.changed:
            case Changed.CODE:
                if good == bad:
                    return f"the source changed without a commit, at {bad}"
                return f"first bad commit {bad}, last good one {good}"
            case Changed.ENVIRONMENT:
                what = ", ".join(f"{c.name} {c.before} -> {c.after}" for c in self.changes)
                return f"environment changed, not the code: {what}"
            case Changed.NOTHING:
                return f"code and environment are as before; {self.clean} trials were right before"
            case Changed.UNKNOWN:
                return f"there are no earlier trials; first seen at {bad}"


def origin(
    trials: Sequence[TrialRecord],
    suspects: Collection[tuple[str, int]],
    runs: Iterable[ScanRun],
) -> Origin | None:
    """trials: all of the path, the oldest first. suspects: those that were not right, by run and
    number. None without a suspect that was planned."""
    known = {run.uid: run for run in runs}
    planned = [t for t in trials if t.purpose is Purpose.PLANNED and t.run in known]
    first = next((k for k, t in enumerate(planned) if (t.run, t.number) in suspects), None)
    if first is None:
        return None
    bad = planned[first]
    before = [t for t in planned[:first] if t.outcome is Outcome.RIGHT]
    # another case may run other source, and in the run itself nothing changes
    earlier = [t for t in before if t.run != bad.run and t.case == bad.case]
    if not earlier:
        return Origin(changed=Changed.UNKNOWN, bad=known[bad.run], clean=len(before))
    return _changed(earlier[-1], bad, known, len(before))


def _changed(
    good: TrialRecord, bad: TrialRecord, known: Mapping[str, ScanRun], clean: int
) -> Origin:
    before, after = known[good.run], known[bad.run]
    changes = tuple(differences(after.machine, before.environment, after.environment))
    if good.path_key != bad.path_key:
        changed = Changed.CODE
    else:
        changed = Changed.ENVIRONMENT if changes else Changed.NOTHING
    return Origin(changed=changed, bad=after, good=before, changes=changes, clean=clean)
