from __future__ import annotations

import re

import pytest

from loragate.core.checkout import project_root
from loragate.core.verdict import OracleName
from loragate.faults.corpus import ALONE, CONTROLS, FAULTS, SLICE, SLICE_CONTROLS
from loragate.faults.corpus.points import NUMERIC
from loragate.faults.model import Control, Fault, Needs
from loragate.faults.planting import check_anchor, package_folder
from loragate.matrix.ids import case_id
from loragate.records.results import read_section

RECORD = "ci/results/cpu.json"
EDITED = [planted for planted in (*FAULTS, *CONTROLS) if planted.edit is not None]
# "vllm #42120", "own", or a test file of another project
SOURCE = re.compile(r"own|[\w-]+ (#\d+|tests/\S+)")


@pytest.mark.parametrize("planted", EDITED, ids=[planted.name for planted in EDITED])
def test_the_text_that_is_replaced_is_there_once_and_what_comes_out_is_python(
    planted: Fault | Control,
) -> None:
    assert planted.edit is not None
    check_anchor(planted.edit, package_folder())


def test_names_are_unique() -> None:
    names = [planted.name for planted in (*FAULTS, *CONTROLS)]
    assert len(set(names)) == len(names)


def test_every_fault_names_its_source() -> None:
    assert [fault.name for fault in FAULTS if not SOURCE.fullmatch(fault.source)] == []


def test_every_oracle_has_a_fault_that_only_it_detects_without_a_gpu() -> None:
    for is_moe in (False, True):
        alone = [fault for fault in ALONE if ("moe" in fault.edit.module) is is_moe]
        # queued steps can only be late on a GPU
        assert {fault.killers[0] for fault in alone} == set(OracleName) - {OracleName.QUEUE}
        assert {fault.needs for fault in alone} == {Needs.CPU}


def test_a_fault_that_only_one_oracle_detects_is_shown_to_all_of_them() -> None:
    for fault in ALONE:
        shown = {oracle for case in fault.cases for oracle in case.oracles}
        assert shown == set(OracleName), fault.name


def test_a_test_run_asks_other_than_the_numeric_oracles_only_where_they_must_detect() -> None:
    assert [fault.name for fault in SLICE] == [fault.name for fault in ALONE]
    for fault in SLICE:
        shown = {oracle for case in fault.cases for oracle in case.oracles}
        assert shown == {*NUMERIC, fault.killers[0]}, fault.name


def test_the_page_names_what_only_one_oracle_detects_and_what_needs_a_gpu() -> None:
    page = (project_root() / "docs/faults.md").read_text(encoding="utf-8")
    missing = [f.name for f in ALONE if f"| {f.killers[0]} | `{f.name}` |" not in page]
    missing += [f.name for f in FAULTS if f.needs is Needs.GPU and f"| `{f.name}` |" not in page]
    assert missing == []


def test_the_slice_has_a_control_that_every_oracle_judges() -> None:
    shown = {oracle for c in SLICE_CONTROLS for case in c.cases for oracle in case.oracles}
    assert shown == set(OracleName)


def test_cases_are_small_enough_for_an_interpreter() -> None:
    tall = [
        fault.name
        for fault in FAULTS
        if fault.needs is Needs.CPU
        and any(case.tokens * case.in_features * case.rank > 200_000 for case in fault.cases)
    ]
    assert tall == []


def test_a_case_of_a_fault_has_an_id_like_any_other() -> None:
    for fault in FAULTS:
        assert all(case_id(case).isascii() for case in fault.cases)


def test_the_record_is_of_this_corpus() -> None:
    record = read_section(project_root() / RECORD, "faults")
    if record is None:
        pytest.skip(f"{RECORD} has no run of the corpus yet")
    recorded = {name: fault["digest"] for name, fault in record["faults"].items()}
    now = {fault.name: fault.digest for fault in FAULTS}
    assert recorded == now, f"run `loragate faults --baseline-suite --record {RECORD}`"
    assert "unfinished" not in record


def test_the_record_shows_everything_noticed_and_by_one_oracle_alone_where_promised() -> None:
    record = read_section(project_root() / RECORD, "faults")
    if record is None:
        pytest.skip(f"{RECORD} has no run of the corpus yet")
    fates = {name: fault["fate"] for name, fault in record["faults"].items()}
    wanted = {f.name: "not run" if f.needs is Needs.GPU else "killed" for f in FAULTS}
    assert fates == wanted
    alone = {fault.name: record["faults"][fault.name]["killers"] for fault in ALONE}
    assert alone == {fault.name: [fault.killers[0].value] for fault in ALONE}
    assert {control["fate"] for control in record["controls"].values()} == {"survived"}
