from __future__ import annotations

import re

import pytest

from loragate.core.checkout import project_root
from loragate.core.verdict import OracleName
from loragate.faults.corpus import ALONE, ALONE_IN_ENGINES, CONTROLS, FAULTS, SLICE_CONTROLS
from loragate.faults.corpus.killers import ITEMS, KILLERS
from loragate.faults.gate_contents import GateContents, UnknownItem, gate_contents
from loragate.faults.model import Control, Fault, GateItem, Needs, Part
from loragate.faults.planting import check_anchor, package_folder
from loragate.matrix.case import Tier
from loragate.matrix.engine_case import ENGINE_ORACLES
from loragate.records.results import read_section

RECORD = "ci/results/cpu.json"
EDITED = [planted for planted in (*FAULTS, *CONTROLS) if planted.edit is not None]
# queued steps can only be late on a GPU
WITHOUT_GPU = set(OracleName) - {OracleName.QUEUE} - ENGINE_ORACLES
# of the cases with two streams; each is shown alone by faults of linear layers
OF_STREAMS = {
    OracleName.RACE,
    OracleName.SCHEDULE,
    OracleName.OVERLAP,
    OracleName.INVENTORY,
}
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


@pytest.fixture(scope="module")
def gate() -> GateContents:
    return gate_contents(Tier.SMOKE)


@pytest.fixture(scope="module")
def gate_on_gpu() -> GateContents:
    return gate_contents(Tier.PREMERGE)


def test_the_gate_executes_everything_that_a_fault_or_a_control_names(
    gate: GateContents, gate_on_gpu: GateContents
) -> None:
    for planted in (*FAULTS, *CONTROLS):
        on_gpu = isinstance(planted, Fault) and planted.needs is Needs.GPU
        assert planted.items, f"{planted.name}: loragate faults --find-killers {planted.name}"
        (gate_on_gpu if on_gpu else gate).check(planted.items)


def test_killers_of_a_case_judge_it(gate_on_gpu: GateContents) -> None:
    wrong = [
        (fault.name, killer.by)
        for fault in FAULTS
        for killer in fault.killers
        if isinstance(killer.by, OracleName)
        and killer.by not in gate_on_gpu.cases[killer.item.id].oracles
    ]
    assert wrong == []


def test_every_name_in_the_file_of_killers_is_that_of_a_fault_or_a_control() -> None:
    assert KILLERS.keys() == {fault.name for fault in FAULTS}
    assert ITEMS.keys() == {control.name for control in CONTROLS}


@pytest.mark.parametrize(
    ("part", "of", "given", "message"),
    [
        (Part.CASE, "cases", "tokens-9", "the gate runs no case of tier smoke '{}'; did you"),
        (Part.HOST_TEST, "host_tests", "test_a", "the gate runs no host test '{}'; did you mean"),
        (Part.LAUNCH, "launches", "r1", "the gate runs no compiled kernel '{}'; did you mean"),
    ],
)
def test_what_the_gate_does_not_execute_is_refused_with_the_nearest(
    part: Part, of: str, given: str, message: str, gate: GateContents
) -> None:
    near = max(getattr(gate, of), key=len) + given
    with pytest.raises(UnknownItem, match=f"^{re.escape(message.format(near))}"):
        gate.check([GateItem(part, near)])


def test_a_case_of_a_higher_tier_is_refused(gate: GateContents, gate_on_gpu: GateContents) -> None:
    beyond = sorted(gate_on_gpu.cases.keys() - gate.cases.keys())[0]
    with pytest.raises(UnknownItem, match="the gate runs no case of tier smoke"):
        gate.check([GateItem(Part.CASE, beyond)])
    gate_on_gpu.check([GateItem(Part.CASE, beyond)])


def test_a_host_test_may_be_named_with_its_parameters(gate: GateContents) -> None:
    name = sorted(gate.host_tests)[0]
    gate.check([GateItem(Part.HOST_TEST, f"{name}[first-2]")])


def _oracles(planted: Fault | Control, gate: GateContents) -> set[OracleName]:
    cases = [gate.cases[item.id] for item in planted.items if item.part is Part.CASE]
    return {oracle for case in cases for oracle in case.oracles}


def test_every_oracle_has_a_fault_that_only_it_detects_without_a_gpu() -> None:
    for is_moe in (False, True):
        alone = [fault for fault in ALONE if ("moe" in fault.edit.module) is is_moe]
        wanted = WITHOUT_GPU - OF_STREAMS if is_moe else WITHOUT_GPU
        assert {fault.killers[0].by for fault in alone} == wanted
        assert {fault.needs for fault in alone} == {Needs.CPU}


def test_every_oracle_of_engines_has_a_fault_that_only_it_detects(gate: GateContents) -> None:
    assert {fault.killers[0].by for fault in ALONE_IN_ENGINES} == ENGINE_ORACLES
    assert all(_oracles(fault, gate) == ENGINE_ORACLES for fault in ALONE_IN_ENGINES)


def test_a_fault_that_only_one_oracle_detects_is_shown_to_all_of_them(gate: GateContents) -> None:
    for fault in ALONE:
        # cases of two streams and of graphs judge what only they run
        apart = {OracleName.GRAPH} | OF_STREAMS
        own = fault.killers[0].by
        if own in OF_STREAMS:
            apart -= OF_STREAMS
        assert _oracles(fault, gate) == (WITHOUT_GPU - apart) | {own}, fault.name


def test_the_page_names_what_only_one_oracle_detects_and_what_needs_a_gpu() -> None:
    page = (project_root() / "docs/faults.md").read_text(encoding="utf-8")
    missing = [f.name for f in ALONE if f"| {f.killers[0].by} | `{f.name}` |" not in page]
    missing += [f.name for f in FAULTS if f.needs is Needs.GPU and f"| `{f.name}` |" not in page]
    assert missing == []


def test_the_slice_has_a_control_that_every_oracle_judges(gate: GateContents) -> None:
    assert set.union(*(_oracles(control, gate) for control in SLICE_CONTROLS)) == WITHOUT_GPU


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
    assert alone == {fault.name: [fault.killers[0].name] for fault in ALONE}
    assert {control["fate"] for control in record["controls"].values()} == {"survived"}
