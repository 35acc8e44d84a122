"""What fails on a mutant, tried on sound code: scripted units and a scripted compile leg."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loragate.core.child_process import ProcessPool
from loragate.core.verdict import Verdict
from loragate.mutants import compile_check, killing
from loragate.mutants.killing import NotSound, Planted, killing_compile_leg, killing_unit
from loragate.mutants.units import Ended, Kind, Unit


class Scripted:
    """Stands for processes: `fails` says of a unit, by those that ran before it in its process and
    by whether the code is sound, whether it fails."""

    def __init__(self, fails: Callable[[str, set[str], bool], bool]) -> None:
        self.fails = fails
        self.processes: list[tuple[str, ...]] = []

    def __call__(
        self, units: Sequence[Unit], folder: Path, *_: object
    ) -> tuple[Ended | None, list[Unit]]:
        self.processes.append(tuple(unit.name for unit in units))
        ran: list[Unit] = []
        for unit in units:
            before = {earlier.name for earlier in ran}
            ran.append(unit)
            if self.fails(unit.name, before, folder.name.startswith("sound-")):
                return Ended(unit=unit.name, verdict=Verdict.FAIL, judge="host test"), ran
        return None, ran


def planted_in(folder: Path) -> Planted:
    setup: Any = SimpleNamespace(logs=folder, passed=set())
    server: Any = None
    return Planted(folder, folder, setup, server, ProcessPool())


def killer_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scripted: Scripted) -> str:
    monkeypatch.setattr(killing, "run_units", scripted)
    monkeypatch.setattr(killing, "plant", lambda mutant, target: None)
    units = [Unit(Kind.TEST, name, 1.0) for name in ("first", "leaves", "suffers", "last")]
    ended = killing_unit(units, planted_in(tmp_path))
    return ended.unit if ended else ""


def test_a_test_that_fails_because_of_another_one_on_sound_code_as_well_kills_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted = Scripted(lambda name, before, sound: name == "suffers" and "leaves" in before)
    assert killer_of(monkeypatch, tmp_path, scripted) == ""
    # all others have run behind it
    assert scripted.processes[-1] == ("first", "leaves", "last")


def test_what_fails_behind_such_a_test_kills(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(name: str, before: set[str], sound: bool) -> bool:
        return (name == "suffers" and "leaves" in before) or (name == "last" and not sound)

    assert killer_of(monkeypatch, tmp_path, Scripted(fails)) == "last"


def test_a_mutant_that_leaves_something_behind_is_killed_by_what_suffers_from_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted = Scripted(
        lambda name, before, sound: name == "suffers" and "leaves" in before and not sound
    )
    assert killer_of(monkeypatch, tmp_path, scripted) == "suffers"
    assert scripted.processes == [
        ("first", "leaves", "suffers", "last"),
        ("suffers",),
        ("first", "leaves", "suffers"),
    ]


def test_what_fails_alone_kills_nothing_where_it_fails_on_sound_code_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted = Scripted(lambda name, before, sound: name == "suffers")
    with pytest.raises(NotSound, match="suffers fails without a mutant"):
        killer_of(monkeypatch, tmp_path, scripted)
    assert scripted.processes[-1] == ("suffers",)


def test_another_test_that_fails_on_sound_code_leaves_no_kill(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(name: str, before: set[str], sound: bool) -> bool:
        return name == "first" if sound else name == "suffers" and "leaves" in before

    with pytest.raises(NotSound, match="first fails without a mutant"):
        killer_of(monkeypatch, tmp_path, Scripted(fails))


def test_a_killer_is_tried_on_sound_code_once_in_a_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted = Scripted(lambda name, before, sound: name == "first" and not sound)
    monkeypatch.setattr(killing, "run_units", scripted)
    monkeypatch.setattr(killing, "plant", lambda mutant, target: None)
    planted, units = planted_in(tmp_path), [Unit(Kind.TEST, "first", 1.0)]
    for _ in range(2):
        assert killing_unit(units, planted) is not None
    assert len(scripted.processes) == 3


# what the leg does on sound code, and on a mutant
EXITS = "import os, signal, sys; sound = os.path.basename(os.getcwd()).startswith('sound-'); "
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
ONCE = "open('died', 'x') and " + DIES + " if not os.path.exists('died') else None"


@pytest.fixture
def leg_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """The result of a compile leg that runs a piece of Python."""
    monkeypatch.setattr(killing, "plant", lambda mutant, target: None)
    planted = planted_in(tmp_path)

    def leg_of(code: str) -> Ended | None:
        command = (sys.executable, "-c", f"{EXITS}{code}")
        monkeypatch.setattr(compile_check, "python_module", lambda module: command)
        return killing_compile_leg(planted)

    yield leg_of
    planted.processes.close()


@pytest.mark.parametrize("code", ["sys.exit(1)", "sys.exit(3)", DIES])
def test_a_compile_leg_that_fails_on_sound_code_kills_no_mutant(
    code: str, leg_of: Callable[[str], Any]
) -> None:
    with pytest.raises(NotSound, match="compile leg fails without a mutant: exit code"):
        leg_of(code)


def test_a_compile_leg_that_somebody_ends_once_kills_no_mutant(
    leg_of: Callable[[str], Any], tmp_path: Path
) -> None:
    assert leg_of(ONCE) is None
    assert (tmp_path / "died").exists()


def test_a_compile_leg_that_could_not_judge_is_tried_on_sound_code_each_time(
    leg_of: Callable[[str], Any],
) -> None:
    assert leg_of("sys.exit(not sound)").kind == "exit code 1"
    # it has passed once
    with pytest.raises(NotSound):
        leg_of("sys.exit(3)")


@pytest.mark.parametrize("code", ["sys.exit(not sound)", f"sound or {DIES}"])
def test_a_compile_leg_that_fails_on_the_mutant_alone_kills_it(
    code: str, leg_of: Callable[[str], Any]
) -> None:
    assert leg_of(code).judge == "compile leg"
