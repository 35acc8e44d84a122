"""What must detect faults has to pass on the unchanged package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.faults.corpus import FAULTS
from loragate.faults.model import (
    Edit,
    Fate,
    Fault,
    GateItem,
    Group,
    Killer,
    Needs,
    Outcome,
    Part,
    Sighting,
)
from loragate.faults.order import Suite
from loragate.faults.runner import Setup, run_all
from loragate.faults.sound import failures_of, sound_orders

pytestmark = pytest.mark.usefixtures("preloaded")

TEST = "tests/kernels/test_tp_partition.py::test_cuts_of_a_padded_width_tile_the_unpadded_one"
OTHER = "tests/kernels/test_batch_tables.py::test_tables_have_capacity_for_the_most_ragged_batch"
START = "    size = padded // tp_size\n"
# stands for a test that somebody has broken in the checkout
BREAKS = f"""
def pytest_runtest_call(item):
    if item.nodeid.startswith({TEST!r}):
        raise AssertionError("broken in the checkout")
"""


def fault(name: str, new: str, *tests: str) -> Fault:
    return Fault(
        name=name,
        edit=Edit("lorakernels.layers.partition", START, new),
        group=Group.LAYER,
        source="own",
        why="It is wrong.",
        killers=tuple(Killer(GateItem(Part.HOST_TEST, test)) for test in tests),
    )


def outcomes(faults: Sequence[Fault]) -> list[Outcome]:
    return [found[0] for _, found in run_all(faults, [Suite.GATE], Setup(jobs=1))]


def test_a_host_test_that_fails_without_the_fault_kills_nothing_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS, encoding="utf-8")
    monkeypatch.setenv("PYTEST_PLUGINS", "breaks")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    *broken, fine = outcomes(
        [
            fault("names-a-broken-test", f"{START.rstrip()} + 1\n", TEST),
            fault("names-it-beside-another-test", f"{START.rstrip()} + 1\n", OTHER, TEST),
            fault("names-another-test", f"{START}    # nothing\n", OTHER),
        ]
    )
    assert [found.fate for found in (*broken, fine)] == [Fate.BROKEN] * 2 + [Fate.SURVIVED]
    for found in broken:
        assert found.message.startswith(f"{TEST} fails without a fault: ")
        assert "broken in the checkout" in found.message


CASE = GateItem(Part.CASE, "a.case")
EXACT, CRASH = Killer(CASE, OracleName.EXACT), Killer(CASE, Failure.CRASH)
WITH_PARAMETERS = Killer(GateItem(Part.HOST_TEST, TEST))
PASSED = Sighting(judge="exact", case="a.case", verdict=Verdict.PASS, part=Part.CASE)
OF_TEST = Sighting(judge=f"{TEST}[1]", case="", verdict=Verdict.PASS, part=Part.HOST_TEST)
DIED = Sighting(judge="start", case="", verdict=Verdict.INFRA, message="no memory")


def failing(sighting: Sighting) -> Sighting:
    return replace(sighting, verdict=Verdict.FAIL, message="odd")


@pytest.mark.parametrize(
    ("killer", "sightings", "message"),
    [
        (EXACT, [PASSED], ""),
        (EXACT, [failing(PASSED)], "a.case exact fails without a fault: odd"),
        # nor does it say anything of the fault where it cannot judge sound code
        (
            EXACT,
            [replace(failing(PASSED), verdict=Verdict.INFRA)],
            "a.case exact fails without a fault: odd",
        ),
        (EXACT, [PASSED, failing(replace(PASSED, judge="permute"))], ""),
        (EXACT, [DIED], "a.case exact did not run without a fault: no memory"),
        (EXACT, [replace(PASSED, case="other")], "a.case exact did not run without a fault"),
        (CRASH, [PASSED], ""),
        (CRASH, [failing(PASSED)], "a.case crash fails without a fault: odd"),
        (WITH_PARAMETERS, [OF_TEST], ""),
        (WITH_PARAMETERS, [OF_TEST, failing(OF_TEST)], f"{TEST} fails without a fault: odd"),
    ],
)
def test_what_fails_or_does_not_run_without_a_fault_is_named(
    killer: Killer, sightings: list[Sighting], message: str
) -> None:
    assert failures_of([killer], sightings).get(killer, "") == message


def test_each_item_of_the_corpus_runs_once_with_the_oracles_that_must_detect_a_fault() -> None:
    gate = Setup().gate
    faults = [fault for fault in FAULTS if fault.needs is Needs.CPU]
    killers = list(dict.fromkeys(killer for fault in faults for killer in fault.killers))
    orders = sound_orders(killers, gate, 2)
    assert len(orders) == 2
    listed = [
        *(GateItem(Part.HOST_TEST, name) for order in orders for name in order.tests),
        *(GateItem(Part.LAUNCH, name) for order in orders for name in order.launches),
    ]
    of_tests = {killer.item for killer in killers if killer.item.part is not Part.CASE}
    assert sorted(listed) == sorted(of_tests)
    pairs = {(killer.item.id, killer.by) for killer in killers if killer.item.part is Part.CASE}
    by_oracles = {pair for pair in pairs if isinstance(pair[1], OracleName)}
    names = {case: name for name, case in gate.cases.items()}
    found = [
        (names[replace(case, oracles=gate_case.oracles)], oracle)
        for order in orders
        for case in order.cases
        for gate_case in gate.cases.values()
        if replace(case, oracles=gate_case.oracles) == gate_case
        for oracle in case.oracles
    ]
    assert by_oracles <= set(found)
    assert len(found) == len(set(found))
