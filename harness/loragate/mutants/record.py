"""What a record keeps of mutants: every run by its name, and the first verdicts on edits by hand.

Pure but for reading and writing the file; imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loragate.mutants.counts import Outcome, counted, markdown, merged
from loragate.mutants.model import Fate
from loragate.records.recorder import Recorder

# sections of a results file: every run by its name, those on a GPU, and the first run of each set
# of edits that was written without a look at the checks: later runs cannot be as blind
SECTION, GPU_SECTION, FIRST_SECTION = "mutants", "mutants_gpu", "mutants_blind_first"
# the run that planted once more what samples had left
SURVIVORS = "survivors"


@dataclass(frozen=True, slots=True)
class Run:
    """`state`: the digest of all code that decides the fates. `retired`: what was not planted, with
    the reasons."""

    state: str
    outcomes: Sequence[Outcome]
    retired: Mapping[str, str] = field(default_factory=dict)


def save_run(recorder: Recorder, name: str, run: Run) -> None:
    """Write the run called `name` in place of an earlier one, beside the others. Raises
    CommandError."""
    recorder.note_edits()
    recorder.change(lambda current: _with_run(current, name, payload(recorder.commit, run)))


def save_first(recorder: Recorder, name: str, run: Run) -> bool:
    """Write the first verdicts on the set of edits called `name`, beside those on other sets; False
    if there are some already. Raises CommandError."""
    recorder.note_edits()
    found = payload(recorder.commit, run)
    return recorder.change(
        lambda current: None if name in current.get("runs", {}) else _with_run(current, name, found)
    )


def _with_run(current: Mapping[str, Any], name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {"runs": {**current.get("runs", {}), name: found}}


def left_by_samples(runs: Mapping[str, Any]) -> list[str]:
    """The ids of what has survived in recorded samples, in order, each once."""
    left = (
        id
        for name, run in runs.items()
        if name.startswith("sample-")
        for id, fate in run["not_killed"].items()
        if fate == Fate.SURVIVED.value
    )
    return sorted(set(left))


def payload(commit: str, run: Run) -> dict[str, Any]:
    """The JSON of a run."""
    return {
        "commit": commit,
        "state": run.state,
        "tables": counted(run.outcomes),
        "killers": {
            mutant.id: f"{result.judge}: {result.killer}"
            for mutant, result in run.outcomes
            if result.fate is Fate.KILLED
        },
        "not_killed": {
            mutant.id: result.fate.value
            for mutant, result in run.outcomes
            if result.fate is not Fate.KILLED
        },
        "retired": dict(run.retired),
    }


def render_record(section: Mapping[str, Any] | None, first: Mapping[str, Any] | None) -> str:
    """The tables of all recorded runs, as Markdown; `first`: the section of the first verdicts."""
    runs = dict(section["runs"]) if section else {}
    if first:
        runs |= {f"{name}, first run": run for name, run in first["runs"].items()}
    if not runs:
        return "Not recorded yet."
    groups = {
        f"{name}, {group}": counts
        for name, run in sorted(runs.items())
        for group, counts in run["tables"]["group"].items()
    }
    parts = [markdown("run and kind of mutants", groups)]
    for title in ("subtle: module", "subtle: operator", "coarse: module", "coarse: operator"):
        tables = [
            run["tables"][title]
            for name, run in runs.items()
            # those are in the tables already
            if name != SURVIVORS and title in run["tables"]
        ]
        if tables:
            parts.append(markdown(title, merged(tables)))
    retired = {name: len(_retired(run)) for name, run in sorted(runs.items())}
    if any(retired.values()):
        counts = (f"{name}: {count}" for name, count in retired.items() if count)
        parts.append(f"Not planted, and not counted above: {', '.join(counts)}")
    commits = {name: run["commit"][:12] or "no commit" for name, run in sorted(runs.items())}
    parts.append("; ".join(f"{name}: {commit}" for name, commit in commits.items()))
    return "\n\n".join(parts)


def _retired(run: Mapping[str, Any]) -> Collection[str]:
    """The ids of what was not planted."""
    # the record of the first verdicts is older than the reasons, and has a plain list
    retired: Collection[str] = run.get("retired") or run.get("not_planted", ())
    return retired
