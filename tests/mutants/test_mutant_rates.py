"""The table of README and docs/mutants.md, from records without a checkout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loragate.docs.pages import BLOCKS, CPU_RECORD, Records
from loragate.mutants.model import Fate, Group, Mutant, Result
from loragate.mutants.rates import render_rates
from loragate.mutants.record import (
    FIRST_SECTION,
    GPU_SECTION,
    SECTION,
    SURVIVORS,
    Run,
    save_first,
    save_run,
)
from loragate.records.recorder import Recorder

FATES = {
    Fate.KILLED: 6,
    Fate.SURVIVED: 1,
    Fate.NEEDS_GPU: 1,
    Fate.EQUIVALENT: 2,
}


def run(counts: dict[Fate, int], *groups: Group, state: str = "state") -> Run:
    outcomes = []
    for group in groups:
        fates = [fate for fate, count in counts.items() for _ in range(count)]
        for number, fate in enumerate(fates):
            name = f"{group.value}-{number}"
            mutant = Mutant(
                id=name,
                module="a.py",
                start=0,
                end=1,
                new="x",
                operator="number",
                group=group,
                line=1,
                end_line=1,
            )
            outcomes.append((mutant, Result(id=name, fate=fate)))
    return Run(state, outcomes)


class Record:
    """A results file that runs are recorded in, as the command does."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / CPU_RECORD
        self.path.parent.mkdir(parents=True)

    def save(self, name: str, run: Run, section: str = SECTION) -> None:
        save_run(Recorder.open(self.path, section, commit="c"), name, run)

    def rows(self) -> list[str]:
        sections: dict[str, Any] = json.loads(self.path.read_text())["sections"]
        rows = render_rates(*map(sections.get, (SECTION, GPU_SECTION, FIRST_SECTION)))
        return rows.splitlines()[2:]


def test_what_nobody_can_observe_counts_nowhere_and_what_needs_a_gpu_as_not_killed(
    tmp_path: Path,
) -> None:
    record = Record(tmp_path)
    record.save("sample-20-seed-0", run(FATES, Group.COARSE, Group.SUBTLE))
    assert record.rows() == [
        "| coarse, drawn at random | 8 | 6 (75.0 %) | not measured |",
        "| subtle, drawn at random | 8 | 6 (75.0 %) | not measured |",
    ]


def test_survivors_that_were_planted_again_have_rows_of_their_own(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.save("sample-20-seed-0", run(FATES, Group.COARSE, Group.SUBTLE))
    record.save(SURVIVORS, run({Fate.KILLED: 3, Fate.SURVIVED: 1}, Group.SUBTLE))
    assert record.rows() == [
        "| coarse, drawn at random | 8 | 6 (75.0 %) | not measured |",
        "| subtle, drawn at random | 8 | 6 (75.0 %) | not measured |",
        "| subtle, left by these samples, planted again later | 4 | 3 (75.0 %) | not measured |",
    ]


def test_a_run_on_a_gpu_adds_to_the_run_of_the_same_name_and_kind(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.save("sample-20-seed-0", run(FATES, Group.COARSE, Group.SUBTLE))
    left = run({Fate.KILLED: 1, Fate.SURVIVED: 1}, Group.SUBTLE)
    survivors = run({Fate.SURVIVED: 2}, Group.COARSE)
    both = Run("state", [*left.outcomes, *survivors.outcomes])
    record.save("sample-20-seed-0", both, GPU_SECTION)
    assert record.rows() == [
        "| coarse, drawn at random | 8 | 6 (75.0 %) | 6 (75.0 %) |",
        "| subtle, drawn at random | 8 | 6 (75.0 %) | 7 (87.5 %) |",
    ]


def test_a_run_on_a_gpu_of_other_code_says_nothing(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.save("sample-20-seed-0", run(FATES, Group.SUBTLE))
    record.save("sample-20-seed-0", run({Fate.KILLED: 2}, Group.SUBTLE, state="old"), GPU_SECTION)
    assert record.rows() == ["| subtle, drawn at random | 8 | 6 (75.0 %) | not measured |"]


def test_samples_are_added_up_and_a_gpu_must_have_run_what_each_of_them_left(
    tmp_path: Path,
) -> None:
    record = Record(tmp_path)
    gpu = run({Fate.KILLED: 2}, Group.SUBTLE)
    record.save("sample-20-seed-0", run(FATES, Group.SUBTLE))
    record.save("sample-20-seed-0", gpu, GPU_SECTION)
    # nothing is left for a GPU
    record.save("sample-20-seed-1", run({Fate.KILLED: 4}, Group.SUBTLE))
    assert record.rows() == ["| subtle, drawn at random | 12 | 10 (83.3 %) | 12 (100.0 %) |"]
    record.save("sample-20-seed-2", run(FATES, Group.SUBTLE))
    assert record.rows() == ["| subtle, drawn at random | 20 | 16 (80.0 %) | not measured |"]


def test_the_first_run_of_each_set_of_blind_edits_has_a_row_of_its_own(tmp_path: Path) -> None:
    record = Record(tmp_path)
    for name, fates in (("edits-x", FATES), ("edits-y", {Fate.KILLED: 3, Fate.SURVIVED: 1})):
        recorder = Recorder.open(record.path, FIRST_SECTION, commit="c")
        save_first(recorder, name, run(fates, Group.BLIND))
    record.save("edits-x", run({Fate.KILLED: 7, Fate.EQUIVALENT: 3}, Group.BLIND))
    assert record.rows() == [
        "| blind, first run of edits-x | 8 | 6 (75.0 %) | not measured |",
        "| blind, first run of edits-y | 4 | 3 (75.0 %) | not measured |",
        "| blind, later runs | 7 | 7 (100.0 %) | 7 (100.0 %) |",
    ]


def test_the_readme_adds_the_first_runs_of_all_sets_up_and_those_of_the_latest(
    tmp_path: Path,
) -> None:
    record = Record(tmp_path)
    # recorded in another order than they were written
    for number in (11, *range(1, 11)):
        killed = 1 if number == 1 else 3
        recorder = Recorder.open(record.path, FIRST_SECTION, commit="c")
        fates = {Fate.KILLED: killed, Fate.SURVIVED: 4 - killed}
        save_first(recorder, f"edits-set_{number:02d}", run(fates, Group.BLIND))
    record.save("edits-set_01", run({Fate.KILLED: 4}, Group.BLIND))
    block = next(block for block in BLOCKS if block.name == "mutant rates")
    assert block.content(Records(tmp_path)).splitlines()[2:] == [
        "| blind, first runs of 11 sets | 44 | 31 (70.5 %) | not measured |",
        "| blind, first runs of the latest 10 | 40 | 30 (75.0 %) | not measured |",
        "| blind, later runs | 4 | 4 (100.0 %) | 4 (100.0 %) |",
    ]


def test_readme_and_the_page_of_mutants_show_the_same_rates_of_samples(tmp_path: Path) -> None:
    record = Record(tmp_path)
    blocks = [block for block in BLOCKS if block.name in ("mutant rates", "rates")]
    assert [block.page for block in blocks] == ["README.md", "docs/mutants.md"]
    for block in blocks:
        assert block.content(Records(tmp_path)) == "Not recorded yet."
    record.save("sample-20-seed-0", run(FATES, Group.SUBTLE))
    for block in blocks:
        rows = block.content(Records(tmp_path)).splitlines()
        assert rows[2:] == record.rows()
