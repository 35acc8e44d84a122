"""These tests run real processes, each with its own copy of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from loragate.core.child_process import ProcessPool
from loragate.core.warm_server import WarmServer
from loragate.faults.corpus import FAULTS
from loragate.faults.model import (
    Control,
    Edit,
    Fate,
    Fault,
    GateItem,
    Group,
    Killer,
    Needs,
    Outcome,
    Part,
)
from loragate.faults.order import Suite
from loragate.faults.planting import (
    StaleAnchor,
    check_anchor,
    package_folder,
    plant,
    planted_text,
    source_of,
)
from loragate.faults.runner import Setup, run_all, run_one, server_of_faults

pytestmark = pytest.mark.usefixtures("preloaded")

Plant: TypeAlias = Callable[..., Outcome]

PARTITION = "lorakernels.layers.partition"
START = "    size = padded // tp_size\n"
TEST = GateItem(
    Part.HOST_TEST,
    "tests/kernels/test_tp_partition.py::test_cuts_of_a_padded_width_tile_the_unpadded_one",
)


def fault(old: str, new: str, **fields: Any) -> Fault:
    given: dict[str, Any] = {
        "name": "a-fault",
        "edit": Edit(PARTITION, old, new),
        "group": Group.LAYER,
        "source": "own",
        "why": "It is wrong.",
        "killers": (Killer(TEST),),
    }
    return Fault(**(given | fields))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmServer]:
    processes = ProcessPool()
    server = server_of_faults(processes, tmp_path_factory.mktemp("server") / "log.txt")
    yield server
    server.close()
    processes.close()


@pytest.fixture
def outcome_of(server: WarmServer) -> Plant:
    """Of a fault or control, with the items of the gate that it names."""

    def outcome_of(planted: Fault | Control, **setup: Any) -> Outcome:
        return run_one(planted, Suite.GATE, Setup(**setup), server)

    return outcome_of


def test_an_edit_that_breaks_nothing_survives(outcome_of: Plant) -> None:
    outcome = outcome_of(fault(START, f"{START}    # nothing\n"))
    assert (outcome.fate, outcome.message) == (Fate.SURVIVED, "not detected")


def test_a_fault_of_a_kernel_is_killed_by_the_oracles_that_are_named(
    outcome_of: Plant,
) -> None:
    planted = next(f for f in FAULTS if f.name == "base-overwritten")
    outcome = outcome_of(planted)
    assert outcome.fate is Fate.KILLED, outcome.message
    assert {killer.name for killer in planted.killers} <= set(outcome.killers)


def test_a_fault_of_host_logic_is_killed_by_its_host_test(
    outcome_of: Plant,
) -> None:
    outcome = outcome_of(fault(START, f"{START.rstrip()} + 1\n"))
    assert (outcome.fate, outcome.killers) == (Fate.KILLED, (TEST.id,)), outcome.message


def test_a_fault_of_what_a_compiler_takes_is_killed_by_a_launch(
    outcome_of: Plant,
) -> None:
    planted = next(f for f in FAULTS if f.name == "expand-block-below-the-dots-minimum")
    outcome = outcome_of(planted)
    assert outcome.fate is Fate.KILLED, outcome.message
    assert {s.part for s in outcome.sightings} == {Part.LAUNCH}


def test_a_fault_that_names_what_the_gate_does_not_run_is_broken(
    outcome_of: Plant,
) -> None:
    elsewhere = GateItem(Part.HOST_TEST, "tests/faults/test_planting.py::test_names")
    outcome = outcome_of(fault(START, f"{START}    # nothing\n", killers=(Killer(elsewhere),)))
    assert outcome.fate is Fate.BROKEN
    assert "the gate runs no host test" in outcome.message
    nothing = outcome_of(fault(START, f"{START}    # nothing\n", killers=()))
    assert "loragate faults --find-killers a-fault" in nothing.message


def test_a_process_that_hangs_is_ended_and_reported_as_a_hang(
    outcome_of: Plant,
) -> None:
    hanging = fault(START, f"    __import__('time').sleep(600)\n{START}")
    assert outcome_of(hanging, deadline_s=5.0).killers == ("hang",)


def test_a_process_that_dies_is_reported_as_a_crash_with_the_judge_that_ran(
    outcome_of: Plant,
) -> None:
    dying = fault(START, f"    __import__('os').abort()\n{START}")
    outcome = outcome_of(dying)
    assert outcome.killers == ("crash",)
    assert (outcome.sightings[-1].judge, outcome.sightings[-1].part) == (TEST.id, TEST.part)


def test_a_crash_is_no_kill_where_a_test_should_have_detected_the_fault(
    outcome_of: Plant,
) -> None:
    outcome = outcome_of(fault(START, f"    __import__('os').abort()\n{START}"))
    assert outcome.fate is Fate.MISSED


@pytest.mark.parametrize("suite", list(Suite))
def test_a_package_that_cannot_be_imported_proves_nothing(suite: Suite, server: WarmServer) -> None:
    broken = fault("from enum import StrEnum\n", "from enum import NoSuchEnum as StrEnum\n")
    outcome = run_one(broken, suite, Setup(), server)
    assert outcome.fate is Fate.BROKEN
    assert "NoSuchEnum" in outcome.message


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit(PARTITION, "no such text", "x"), "the text to replace is not there"),
        (Edit(PARTITION, "return", "x"), r"the text to replace is there \d+ times"),
        (Edit("lorakernels.gone", "x", "y"), "lorakernels.gone: no such module"),
        (Edit("loragate.run.trial", "x", "y"), "must be a module of lorakernels"),
    ],
)
def test_an_edit_whose_text_is_gone_is_reported_and_never_planted(
    edit: Edit, message: str, tmp_path: Path
) -> None:
    with pytest.raises(StaleAnchor, match=message):
        check_anchor(edit, package_folder())
    with pytest.raises(StaleAnchor, match=message):
        plant(edit, package_folder(), tmp_path)


def test_a_fault_whose_text_is_gone_is_broken_and_no_survivor(
    outcome_of: Plant,
) -> None:
    outcome = outcome_of(fault("no such text", "x"))
    assert outcome.fate is Fate.BROKEN
    assert "the text to replace is not there ('no such text')" in outcome.message


def test_an_edit_that_is_not_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        check_anchor(Edit(PARTITION, START, "    size = = 1\n"), package_folder())


def test_the_package_that_is_installed_is_left_alone(tmp_path: Path) -> None:
    edit = Edit(PARTITION, START, f"{START}    # nothing\n")
    before = source_of(PARTITION, package_folder()).read_text(encoding="utf-8")
    plant(edit, package_folder(), tmp_path)
    copy = tmp_path / "lorakernels" / "layers" / "partition.py"
    assert copy.read_text(encoding="utf-8") == planted_text(edit, before)
    assert source_of(PARTITION, package_folder()).read_text(encoding="utf-8") == before


def test_a_fault_that_needs_a_gpu_is_not_run_without_one(
    outcome_of: Plant,
) -> None:
    outcome = outcome_of(fault(START, f"{START}    # nothing\n", needs=Needs.GPU))
    assert (outcome.fate, outcome.message) == (Fate.NOT_RUN, "needs a GPU")


def test_outcomes_come_in_the_order_that_was_asked_for() -> None:
    names = ("first", "second", "third")
    stale = [fault("no such text", "x", name=name) for name in names]
    found = list(run_all(stale, tuple(Suite), Setup(jobs=2)))
    assert [one.name for one, _ in found] == list(names)
    assert [[o.name for o in outcomes] for _, outcomes in found] == [[name] * 2 for name in names]
