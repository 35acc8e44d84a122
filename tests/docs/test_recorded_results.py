"""What the pages make of records that lack something."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from loragate.bench.kinds import KINDS
from loragate.core.checkout import project_root
from loragate.core.verdict import Verdict
from loragate.docs.pages import GPU_RECORD
from loragate.docs.results import bars_of, commits_sentence

SECTIONS: Mapping[str, Any] = json.loads((project_root() / GPU_RECORD).read_text())["sections"]
# the lists of a section that have a row of the table each
ROWS = {
    "dense": ["rows"],
    "moe": ["aligns", "deltas", "experts", "layers"],
    "streams": ["gdns", "linears", "moes"],
    "graphs": ["hosts", "memories", "replays"],
    "engine": ["rows"],
}


@pytest.mark.parametrize(("kind", "rows"), [(k, row) for k, rows in ROWS.items() for row in rows])
def test_no_bar_is_met_by_a_record_that_lacks_a_row(kind: str, rows: str) -> None:
    section, read = SECTIONS[KINDS[kind].section], KINDS[kind].read
    whole = {bar.name: bar.verdict for bar in bars_of(read(section))}
    assert Verdict.INCONCLUSIVE not in whole.values()
    for gone in (0, len(section[rows]) - 1):
        left = [row for place, row in enumerate(section[rows]) if place != gone]
        for bar in bars_of(read({**section, rows: left})):
            assert bar.verdict in (Verdict.INCONCLUSIVE, whole[bar.name])
            assert bar.verdict is not Verdict.PASS


def test_entries_of_several_commits_are_counted_by_commit() -> None:
    def section(*commits: str) -> dict[str, Any]:
        faults = {str(number): {"commit": commit} for number, commit in enumerate(commits)}
        return {"commit": "b" * 40, "faults": faults}

    assert commits_sentence(section("b" * 40, "b" * 40)) == ""
    assert (
        commits_sentence(section("b" * 40, "a" * 40, "a" * 40))
        == " Its entries are 2 of aaaaaaa, 1 of bbbbbbb."
    )
    # an entry alone may be older than the record
    assert commits_sentence(section("a" * 40)) == " Its entries are 1 of aaaaaaa."
