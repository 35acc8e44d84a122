"""Mutants that are really planted: one warm server, one small case, one host test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from loragate.core.checkout import project_root
from loragate.core.child_process import ProcessPool
from loragate.core.verdict import Failure
from loragate.matrix.case import Site, Tier
from loragate.matrix.footprint import footprint_bytes
from loragate.matrix.ids import run_id
from loragate.matrix.load import default_files, load_cases
from loragate.mutants import compile_check, killing, runner
from loragate.mutants.model import Fate, Group, Mutant, Result
from loragate.mutants.planting import SUBJECT, plant
from loragate.mutants.reach import Reach, reach_of
from loragate.mutants.runner import failure_of_sound_code, run_one
from loragate.mutants.setup import Setup
from loragate.mutants.sources import line_of, place_of, read_sources
from loragate.mutants.units import Kind, Unit
from loragate.mutants.warm import server_of_mutants

SOURCES = read_sources()
KERNEL, PARTITION = "dense/kernels.py", "layers/partition.py"
TEST = "tests/kernels/test_tp_partition.py"


def smallest_case() -> str:
    cases = load_cases(default_files(project_root()))
    dense = [c for c in cases if c.tier is Tier.SMOKE and c.site is Site.DENSE_DELTA]
    return run_id(SUBJECT, min(dense, key=footprint_bytes))


def reach() -> Reach:
    """As if the case ran every line of the kernels and the tests every line of the partition."""
    units = [Unit(Kind.CASE, smallest_case(), 1.0), Unit(Kind.TEST, f"{TEST}::any", 1.0)]
    lines = {module: set(range(1, text.count("\n"))) for module, text in SOURCES.items()}
    traces = [{KERNEL: lines[KERNEL]}, {PARTITION: lines[PARTITION]}]
    return reach_of("state", units, traces, {}, ())


def edit(module: str, old: str, new: str) -> Mutant:
    text = SOURCES[module]
    assert text.count(old) == 1
    start = text.index(old)
    first, last = line_of(text, start), line_of(text, start + len(old) - 1)
    return Mutant(
        id="mutant",
        module=module,
        start=start,
        end=start + len(old),
        new=new,
        operator="edit",
        group=Group.BLIND,
        line=first,
        end_line=last,
        function=place_of(text, first, last).function,
    )


class Planter:
    def __init__(self, folder: Path) -> None:
        known = folder / "known.txt"
        known.write_text("", encoding="utf-8")
        self.setup = Setup(reach=reach(), known=known, logs=folder, least_deadline_s=6.0)
        self.processes = ProcessPool()
        self.server = server_of_mutants(self.processes, folder / "server.txt")

    def plant(self, module: str, old: str, new: str) -> Result:
        mutant = edit(module, old, new)
        return run_one(mutant, SOURCES[module], self.setup, self.server, self.processes)


@pytest.fixture(scope="module")
def planter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planter]:
    planter = Planter(tmp_path_factory.mktemp("mutants"))
    yield planter
    planter.server.close()
    planter.processes.close()


def test_a_wrong_scale_is_killed_by_an_oracle_of_the_case(planter: Planter) -> None:
    found = planter.plant(KERNEL, "in_batch & (rank > 0)", "in_batch & (rank > 99)")
    assert (found.fate, found.killer) == (Fate.KILLED, smallest_case())
    assert (found.judge, found.kind) == ("reference", Failure.WRONG_ANSWER)


def test_a_change_without_effect_survives(planter: Planter) -> None:
    found = planter.plant(KERNEL, "split = tl.program_id(1)", "split = tl.program_id(1) + 0")
    assert (found.fate, found.units) == (Fate.SURVIVED, 1)


def test_a_host_test_kills(planter: Planter) -> None:
    found = planter.plant(PARTITION, "if tp_size < 1:", "if tp_size >= 1:")
    assert (found.fate, found.judge) == (Fate.KILLED, "host test")
    assert found.killer.startswith(TEST)


def test_a_statement_that_nothing_runs_survives_at_once(planter: Planter) -> None:
    found = planter.plant("batch/kernels.py", "if slot == 0:", "if slot <= 0:")
    assert (found.fate, found.units) == (Fate.SURVIVED, 0)


def test_a_module_that_cannot_be_imported_is_killed(planter: Planter) -> None:
    found = planter.plant(PARTITION, "from dataclasses import", "from dataclass import")
    assert (found.fate, found.judge) == (Fate.KILLED, "import")


@pytest.mark.parametrize(
    ("code", "kind"),
    [("import os; os.abort()", Failure.CRASH), ("while True: pass", Failure.HANG)],
)
def test_a_mutant_that_crashes_or_hangs_is_killed_and_costs_no_other_its_result(
    planter: Planter, code: str, kind: Failure
) -> None:
    old = "    if tp_size < 1:"
    found = planter.plant(PARTITION, old, f"    {code}\n{old}")
    assert (found.fate, found.judge, found.kind) == (Fate.KILLED, "process", kind)
    again = planter.plant(PARTITION, "if tp_size < 1:", "if tp_size < 1 + 0:")
    assert again.fate is Fate.SURVIVED


def test_a_process_that_cannot_begin_kills_no_mutant(planter: Planter, tmp_path: Path) -> None:
    setup = replace(planter.setup, known=tmp_path / "missing.txt")
    mutant = edit(KERNEL, "split = tl.program_id(1)", "split = tl.program_id(1) + 0")
    result = run_one(mutant, SOURCES[KERNEL], setup, planter.server, planter.processes)
    assert result.fate is Fate.BROKEN
    assert "missing.txt" in result.message


def test_sound_code_must_pass_before_any_mutant_is_planted(
    planter: Planter, tmp_path: Path
) -> None:
    units = [unit for unit in planter.setup.reach.units if unit.kind is Kind.CASE]
    setup = replace(planter.setup, reach=reach_of("state", units, [{}], {}, ()))
    assert failure_of_sound_code(setup) == ""
    missing = replace(setup, known=tmp_path / "missing.txt")
    assert "missing.txt" in failure_of_sound_code(missing)


def test_a_compile_leg_that_fails_without_a_mutant_stops_the_run_and_breaks_what_it_would_kill(
    planter: Planter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the recorded sizes are lowered."""
    leg = (sys.executable, "-c", "print('fail: a kernel: resources grew'); raise SystemExit(1)")
    monkeypatch.setattr(compile_check, "python_module", lambda module: leg)
    units = [unit for unit in planter.setup.reach.units if unit.kind is Kind.CASE]
    setup = replace(planter.setup, reach=reach_of("state", units, [{}], {}, [KERNEL]))
    mutant = edit(KERNEL, "split = tl.program_id(1)", "split = tl.program_id(1) + 0")
    result = run_one(mutant, SOURCES[KERNEL], setup, planter.server, planter.processes)
    said = "compile leg fails without a mutant: exit code 1: fail: a kernel: resources grew"
    assert (result.fate, result.message) == (Fate.BROKEN, said)
    assert failure_of_sound_code(setup, [mutant]) == said
    # nothing that is planted compiles anything
    assert failure_of_sound_code(setup) == ""


def test_nothing_is_left_when_the_server_is_closed(planter: Planter) -> None:
    planter.plant(PARTITION, "if tp_size < 1:", "if tp_size < 1 + 0:")
    servers = [p for p in psutil.process_iter(["cmdline"]) if is_server_of(p, os.getpid())]
    assert len(servers) == 1
    planter.server.close()
    assert not psutil.pid_exists(servers[0].pid)


def is_server_of(process: psutil.Process, parent: int) -> bool:
    return process.ppid() == parent and "loragate.mutants.server" in (process.info["cmdline"] or [])


def test_a_test_that_is_broken_since_the_map_was_measured_kills_no_mutant(
    planter: Planter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every copy has it that is planted from now on, with a mutant or without."""

    def plant_broken(mutant: Mutant | None, target: Path) -> None:
        plant(mutant, target)
        path = target / TEST
        path.write_text(path.read_text(encoding="utf-8") + "\nraise SystemExit('edited')\n")

    monkeypatch.setattr(runner, "plant", plant_broken)
    monkeypatch.setattr(killing, "plant", plant_broken)
    found = planter.plant(PARTITION, "if tp_size < 1:", "if tp_size < 1 + 0:")
    assert (found.fate, found.units) == (Fate.BROKEN, 0)
    assert "fails without a mutant" in found.message


@pytest.mark.parametrize("always", [False, True])
def test_a_process_that_is_ended_once_kills_no_mutant(
    planter: Planter, tmp_path: Path, always: bool
) -> None:
    """As a person or the system does it, which the second process does not see."""
    marker, old = tmp_path / "ended", "    if tp_size < 1:"
    code = f"""
    import os, pathlib
    marker = pathlib.Path({str(marker)!r})
    if {always} or not marker.exists():
        marker.touch()
        os.kill(os.getpid(), 9)
"""
    found = planter.plant(PARTITION, old, code + old)
    assert marker.exists()
    assert found.fate is (Fate.KILLED if always else Fate.SURVIVED)
