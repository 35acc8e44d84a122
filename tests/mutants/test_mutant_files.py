"""Edits and equivalents in YAML, and the journal of a run."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loragate.commands.mutants import EQUIVALENTS
from loragate.core.checkout import project_root
from loragate.core.verdict import Verdict
from loragate.mutants import edits
from loragate.mutants.edits import EditError, read_edits, read_equivalents
from loragate.mutants.host_tests import COLLECTION
from loragate.mutants.journal import Journal, OtherState, kills_in
from loragate.mutants.measuring import _reach_of, files_without_tests
from loragate.mutants.model import Fate, Mutant, Result
from loragate.mutants.ordering import Kill, ordered, quick
from loragate.mutants.planting import HOST_TESTS, plant
from loragate.mutants.reach import load_reach, reach_of, save_reach
from loragate.mutants.session import Session, judged
from loragate.mutants.sources import Place, place_of, read_sources
from loragate.mutants.tracing import WHOLE_TEXT, instrumented, read_trace
from loragate.mutants.units import IMPORT, Ended, Kind, Unit

BLIND = sorted((EQUIVALENTS.parent / "blind").glob("*.yaml"))
TEXT = """LIMIT = 1


def f(x):
    if x:
        return 1
    y = [
        x,
    ]
    return y
"""
SOURCES = {"m.py": TEXT}
EDIT = """
- id: wrong
  module: m.py
  old: '        return 1'
  new: '        return 2'
  kind: constant
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_an_edit_is_read_with_its_place(tmp_path: Path) -> None:
    (mutant,) = read_edits(write(tmp_path / "e.yaml", EDIT), SOURCES).mutants
    assert (mutant.line, mutant.end_line, mutant.function) == (6, 6, "f")
    assert "return 2" in mutant.apply(TEXT)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (EDIT.replace("return 1", "return 3"), "is not there"),
        (EDIT.replace("'        return 1'", "'x'"), "is there"),
        (EDIT.replace("m.py", "n.py"), "no such module"),
        (EDIT.replace("return 2'", "return ('"), "is not Python"),
        (EDIT + EDIT, "unique"),
        (EDIT + "  colour: red", "colour"),
        ("a: [", "is not YAML"),
        (EDIT + "  id: again", "'id' is given twice, first in line"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(tmp_path: Path, edit: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        read_edits(write(tmp_path / "e.yaml", edit), SOURCES)


def test_a_retired_edit_is_counted_apart_and_need_not_fit(tmp_path: Path) -> None:
    gone = EDIT.replace("wrong", "gone").replace("m.py", "n.py") + "  retired: no such module\n"
    edits = read_edits(write(tmp_path / "e.yaml", EDIT + gone), SOURCES)
    assert [mutant.id for mutant in edits.mutants] == ["wrong"]
    assert edits.retired == {"gone": "no such module"}
    same_id = gone.replace("gone", "wrong")
    with pytest.raises(EditError, match="unique"):
        read_edits(write(tmp_path / "e.yaml", EDIT + same_id), SOURCES)


@pytest.mark.parametrize("path", BLIND, ids=lambda path: path.stem)
def test_every_blind_edit_fits_the_package_once_or_is_retired(path: Path) -> None:
    # reading compiles each planted module
    assert read_edits(path, read_sources()).mutants


def test_every_equivalent_still_fits_the_package() -> None:
    read_equivalents(EQUIVALENTS, read_sources())


def test_a_survivor_that_is_listed_is_equivalent_and_a_stale_entry_is_refused(
    tmp_path: Path,
) -> None:
    # the syntax counts, not how it is written
    entry = "- {module: m.py, old: return 1, new: return (2), reason: nobody looks}\n"
    (mutant,) = read_edits(write(tmp_path / "e.yaml", EDIT), SOURCES).mutants
    equivalents = read_equivalents(write(tmp_path / "q.yaml", entry), SOURCES)
    for fate, then in ((Fate.SURVIVED, Fate.EQUIVALENT), (Fate.KILLED, Fate.KILLED)):
        found = judged([(mutant, Result(id="wrong", fate=fate))], equivalents, SOURCES)
        assert [result.fate for _, result in found] == [then]
    with pytest.raises(EditError, match="is not there"):
        read_equivalents(tmp_path / "q.yaml", {"m.py": TEXT.replace("return 1", "return 4")})


@pytest.mark.parametrize(
    ("text", "other", "is_same"),
    [
        ("zip(a, b, strict=False)", "zip(a, b)", True),
        ("zip(a, b, strict=True)", "zip(a, b)", False),
        ("open(a, strict=False)", "open(a)", False),
        ("(a) + b", "a+b", True),
        ("a + b", "b + a", False),
    ],
)
def test_two_texts_of_the_same_program_are_one_mutant(text: str, other: str, is_same: bool) -> None:
    assert (edits._syntax(text) == edits._syntax(other)) == is_same


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the mutants that sessions plant, all of which survive."""
    ids: list[str] = []

    def plant(session: Session, waiting: list[Mutant], journal: Journal, results: Any) -> None:
        ids.extend(mutant.id for mutant in waiting)
        results.update({m.id: Result(id=m.id, fate=Fate.SURVIVED) for m in waiting})

    monkeypatch.setattr(Session, "_plant", plant)
    return ids


def test_a_mutant_that_is_listed_is_not_planted(tmp_path: Path, planted: list[str]) -> None:
    entry = "- {module: m.py, old: return 1, new: return 2, reason: nobody looks}\n"
    listed = read_equivalents(write(tmp_path / "q.yaml", entry), SOURCES)
    none = read_equivalents(write(tmp_path / "n.yaml", "[]"), SOURCES)
    mutants = read_edits(write(tmp_path / "e.yaml", EDIT), SOURCES).mutants
    for equivalents, wanted in ((listed, []), (none, ["wrong"])):
        session = Session(folder=tmp_path, name="run", state="s", sources=SOURCES, jobs=1)
        ((_, result),) = session.run(mutants, equivalents)
        assert planted == wanted
        assert result.fate is (Fate.SURVIVED if wanted else Fate.EQUIVALENT)
    # and none of them is left for a GPU
    on_gpu = replace(session, folder=tmp_path / "gpu", gpu=True)
    assert on_gpu.run(mutants, listed) == []


def test_all_that_a_run_without_a_gpu_has_left_is_planted_on_one(
    tmp_path: Path, planted: list[str]
) -> None:
    (mutant,) = read_edits(write(tmp_path / "e.yaml", EDIT), SOURCES).mutants
    none = read_equivalents(write(tmp_path / "n.yaml", "[]"), SOURCES)
    fates = {"left": Fate.SURVIVED, "later": Fate.NEEDS_GPU, "gone": Fate.KILLED}
    mutants = [replace(mutant, id=id) for id in fates]
    session = Session(folder=tmp_path, name="run", state="s", sources=SOURCES, jobs=1, gpu=True)
    journal = session.journal(gpu=False)
    journal.open(mutants)
    for one in mutants:
        journal.add(one, Result(id=one.id, fate=fates[one.id]))
    session.run(mutants, none)
    assert planted == ["left", "later"]


def test_a_run_goes_on_where_it_was_and_not_with_other_code(tmp_path: Path) -> None:
    (mutant,) = read_edits(write(tmp_path / "e.yaml", EDIT), SOURCES).mutants
    journal = Journal(tmp_path / "run.jsonl", "state-1")
    wrong, other, later = mutants = [replace(mutant, id=id) for id in ("wrong", "other", "next")]
    assert journal.open(mutants) == {}
    journal.add(wrong, Result(id="wrong", fate=Fate.KILLED, killer="case-a"))
    journal.add(other, Result(id="other", fate=Fate.BROKEN))
    with journal.path.open("a") as file:
        file.write('{"result": {"id": "half')
    assert set(journal.open(mutants)) == {"wrong"}
    journal.add(later, Result(id="next", fate=Fate.SURVIVED))
    assert set(journal.open(mutants)) == {"wrong", "next"}
    assert list(kills_in(tmp_path)) == [Kill("m.py", "f", "case-a")]
    with pytest.raises(OtherState, match="another state"):
        Journal(journal.path, "state-2").open(mutants)


@pytest.mark.parametrize(
    ("line", "place"),
    [
        (1, Place("", None)),
        (5, Place("f", frozenset({5}))),
        (6, Place("f", frozenset({6}))),
        (8, Place("f", frozenset({7, 8, 9}))),
        # a default of an argument concerns whoever calls the function
        (4, Place("f", frozenset(range(5, 11)))),
    ],
)
def test_a_line_stands_for_its_statement(line: int, place: Place) -> None:
    assert place_of(TEXT, line, line) == place


BLOCKS = """@wraps
def f(x):
    try:
        y = 1
    except ValueError:
        y = 2
    finally:
        x = 3
    match x:
        case 3:
            return y
    return x
"""


@pytest.mark.parametrize(
    ("line", "place"),
    [
        # a decorator runs at import, and all that imports the module depends on it
        (1, Place("", None)),
        (4, Place("f", frozenset({4}))),
        (6, Place("f", frozenset({6}))),
        # a line between two parts of a block stands for the block
        (5, Place("f", frozenset(range(3, 9)))),
        (8, Place("f", frozenset({8}))),
        (11, Place("f", frozenset({9, 10, 11}))),
    ],
)
def test_a_line_of_a_block_stands_for_its_statement_or_for_the_block(
    line: int, place: Place
) -> None:
    assert place_of(BLOCKS, line, line) == place


def test_units_reach_the_statements_that_they_run(tmp_path: Path) -> None:
    units = [Unit(Kind.CASE, "a.site.x", 1.0), Unit(Kind.TEST, "t.py::t", 0.1)]
    traces = [{"m.py": {5, 7}}, {"m.py": {5, 6}}]
    reach = reach_of("now", units, traces, {"m.py": {10}}, ["m.py"])
    save_reach(reach, tmp_path / "reach.json")
    again = load_reach(tmp_path / "reach.json", "now")
    assert again == reach
    assert load_reach(tmp_path / "reach.json", "later") is None
    names = {
        line: [u.name for u in reach.units_of("m.py", place_of(TEXT, line, line))]
        for line in (1, 5, 6, 8, 10)
    }
    everything = ["a.site.x", "t.py::t"]
    assert names == {1: everything, 5: everything, 6: ["t.py::t"], 8: ["a.site.x"], 10: everything}
    assert reach.sites_of("m.py") == {"site"}


def test_a_unit_that_reads_a_module_reaches_all_its_statements() -> None:
    units = [Unit(Kind.TEST, name, 0.1) for name in ("t.py::runs", "t.py::reads")]
    traces = [{"m.py": {6}}, {"m.py": {WHOLE_TEXT}}]
    reach = reach_of("now", units, traces, {}, [])
    reached = {
        line: [unit.name for unit in reach.units_of("m.py", place_of(TEXT, line, line))]
        for line in (5, 6)
    }
    assert reached == {5: ["t.py::reads"], 6: ["t.py::runs", "t.py::reads"]}
    assert reach.units_of("n.py", place_of(TEXT, 5, 5)) == ()


def test_an_instrumented_module_notes_each_statement_it_runs() -> None:
    text = (
        "def f(x):\n    '''Text.'''\n    if x == 1:\n        return 1\n    elif x == 2:\n"
        "        return 2\n    else:\n        y = 3\n    return y\n"
    )
    noted: list[str] = []
    names = {"__loragate_note__": noted.append, "__loragate_skip__": lambda: False}
    exec(instrumented(text, "m.py"), names)
    assert names["f"](3) == 3  # type: ignore[operator]
    assert noted == ["m.py:3", "m.py:5", "m.py:8", "m.py:9"]


def test_a_traced_module_notes_statements_of_handlers_and_of_cases() -> None:
    noted: list[str] = []
    names = {"__loragate_note__": noted.append, "__loragate_skip__": lambda: False}
    failing = BLOCKS.replace("@wraps\n", "\n").replace("y = 1", "y = int('')")
    exec(instrumented(failing, "m.py"), names)
    assert names["f"](0) == 2  # type: ignore[operator]
    assert noted == [f"m.py:{line}" for line in (3, 4, 6, 8, 9, 11)]


SOURCE_OF_TRACED = """
import inspect, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from loragate.mutants.tracing import start
start(Path(sys.argv[1], "trace"))
import traced
for interpreted in ("0", "1"):
    os.environ["TRITON_INTERPRET"] = interpreted
    lines, first = inspect.getsourcelines(traced.f)
    print(first, len(lines))
print(traced.f(2))
"""


def test_triton_compiles_a_traced_kernel_without_its_notes_and_interprets_it_with_them(
    tmp_path: Path,
) -> None:
    text = "def f(x):\n    y = x + 1\n    return y\n"
    (tmp_path / "traced.py").write_text(instrumented(text, "traced.py"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SOURCE_OF_TRACED, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["1 3", "1 5", "3"], done.stderr
    assert read_trace(tmp_path / "trace") == {"traced.py": {2, 3}}


READER = """
import inspect, subprocess, sys
from pathlib import Path
from loragate.mutants.tracing import prepare_processes, start
folder = Path(sys.argv[1])
prepare_processes(folder / "site", folder / "package")
for name in ("collected", "test"):
    start(folder / name)
sys.path.insert(0, str(folder))
import package.imported
inspect.getsource(package.imported.f)
(folder / "package/read.py").read_text()
(folder / "outside.py").read_text()
with open(folder / "package/opened.py"):
    pass
command = "from pathlib import Path; import sys; Path(sys.argv[1]).read_bytes()"
subprocess.run([sys.executable, "-c", command, folder / "package/read_by_a_child.py"], check=True)
"""


def test_reading_a_module_is_noted_and_importing_it_is_not(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__init__", "imported", "read", "opened", "read_by_a_child"):
        (package / f"{name}.py").write_text("def f():\n    pass\n", encoding="utf-8")
    (tmp_path / "outside.py").write_text("", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert read_trace(tmp_path / "test") == {
        f"{name}.py": {WHOLE_TEXT} for name in ("read", "opened", "read_by_a_child")
    }
    assert read_trace(tmp_path / "collected") == {}


def test_what_killed_neighbours_runs_first_then_quick_tests_then_cases() -> None:
    near, far = Unit(Kind.CASE, "near", 9.0), Unit(Kind.CASE, "far", 1.0)
    quick, slow = Unit(Kind.TEST, "quick", 0.1), Unit(Kind.TEST, "slow", 5.0)
    kills = [Kill("m.py", "f", "near"), Kill("n.py", "g", "far")]
    assert ordered([far, slow, quick, near], "m.py", "f", kills) == (near, quick, far, slow)


def test_a_planted_checkout_has_what_host_tests_look_for_in_theirs(tmp_path: Path) -> None:
    plant(None, tmp_path / "planted")
    texts = [
        path.read_text(encoding="utf-8")
        for folder in HOST_TESTS
        for path in (project_root() / folder).rglob("*.py")
    ]
    named = {name for text in texts for name in re.findall(r'\bROOT / "([^"]+)"', text)}
    assert "docs" in named
    assert named <= {path.name for path in (tmp_path / "planted").iterdir()}


def test_units_are_cut_where_they_have_taken_their_time() -> None:
    units = [Unit(Kind.TEST, name, seconds) for name, seconds in (("a", 1), ("b", 2), ("c", 3))]
    names = [[[unit.name for unit in part] for part in quick(units, most)] for most in (0, 3, 5, 6)]
    assert names == [
        [[], ["a", "b", "c"]],
        [["a", "b"], ["c"]],
        [["a", "b"], ["c"]],
        [["a", "b", "c"], []],
    ]


def test_a_test_reaches_what_its_module_runs_when_it_is_collected(tmp_path: Path) -> None:
    lines = {IMPORT: "1", f"{COLLECTION}t/a.py": "2", f"{COLLECTION}t/b.py": "3", "t/a.py::t": "4"}
    ended = []
    for number, (unit, line) in enumerate(lines.items()):
        trace = write(tmp_path / f"{number}.txt", f"m.py:{line}\n")
        ended.append(Ended(unit=unit, verdict=Verdict.PASS, trace=str(trace)))
    reach = _reach_of("now", ended, [], tmp_path, set())
    (unit,) = reach.units
    assert unit.name == "t/a.py::t"
    assert reach.lines == {"m.py": {2: 1, 4: 1}}
    assert reach.at_import == {"m.py": frozenset({1})}


def test_files_whose_tests_are_all_skipped_are_named() -> None:
    ended = [
        Ended(unit="t/a.py::runs", verdict=Verdict.PASS),
        Ended(unit="t/a.py::skipped", verdict=Verdict.SKIP),
        Ended(unit="t/b.py::skipped", verdict=Verdict.SKIP),
        Ended(unit=f"{COLLECTION}t/c.py", verdict=Verdict.PASS),
        Ended(unit="a.case", verdict=Verdict.PASS),
    ]
    assert files_without_tests(["t/a.py", "t/b.py", "t/c.py"], ended) == ["t/b.py", "t/c.py"]
