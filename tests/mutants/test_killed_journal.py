"""The journal of a run keeps each result that was added, whatever ends its writer."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from loragate.mutants.journal import Journal, JournalError, kills_in
from loragate.mutants.model import Fate, Group, Mutant, Result

_MUTANT = Mutant(
    id="m",
    module="m.py",
    start=0,
    end=1,
    new="2",
    operator="number",
    group=Group.SUBTLE,
    line=1,
    end_line=1,
)


def _mutant(number: int, writer: str = "w") -> Mutant:
    return replace(_MUTANT, id=f"{writer}-{number}")


def _result(number: int, writer: str = "w") -> Result:
    # beyond a page, so that a write may be torn
    return Result(id=f"{writer}-{number}", fate=Fate.KILLED, killer="case", message="x" * 5000)


def _fork_writer(path: Path, writer: str, count: int, begin: float = 0.0) -> tuple[int, int]:
    """A process that opens the journal and tells after each result that it has been added."""
    heard, told = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            while time.monotonic() < begin:
                pass
            journal = Journal(path, "state")
            journal.open([])
            for number in range(count):
                journal.add(_mutant(number, writer), _result(number, writer))
                os.write(told, b".")
            code = 0
        finally:
            os._exit(code)
    os.close(told)
    return process, heard


def test_a_writer_killed_at_any_moment_loses_only_the_result_that_it_was_writing(
    tmp_path: Path,
) -> None:
    random, told, path = Random(16), {}, tmp_path / "run.jsonl"
    for moment in range(30):
        writer = f"w{moment}"
        process, heard = _fork_writer(path, writer, 1000)
        told[writer] = len(os.read(heard, 1)) + len(os.read(heard, random.randrange(1, 6)))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        while rest := os.read(heard, 1000):
            told[writer] += len(rest)
        os.close(heard)
    found = Journal(path, "state").open(_mutant(n, w) for w in told for n in range(1000))
    for writer, count in told.items():
        kept = [name for name in found if name.startswith(f"{writer}-")]
        assert kept == [f"{writer}-{number}" for number in range(len(kept))]
        assert count <= len(kept) <= count + 1


def test_a_file_torn_at_any_byte_goes_on_with_all_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(path, "state")
    mutants = [_mutant(number) for number in (0, 1, 9)]
    journal.open(mutants)
    ends = [path.stat().st_size]
    for number in range(2):
        journal.add(mutants[number], Result(id=f"w-{number}", fate=Fate.KILLED, killer="case"))
        ends.append(path.stat().st_size)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        # a line without its end is whole as well
        whole = sum(end - 1 <= size for end in ends[1:])
        assert len(journal.open(mutants)) == whole
        journal.add(mutants[-1], _result(9))
        assert len(journal.open(mutants)) == whole + 1
        assert len(list(kills_in(tmp_path))) == whole + 1


def test_several_processes_begin_and_write_one_journal(tmp_path: Path) -> None:
    for moment in range(10):
        path = tmp_path / f"{moment}.jsonl"
        begin = time.monotonic() + 0.03
        for process, heard in [_fork_writer(path, f"w{k}", 3, begin) for k in range(4)]:
            _, status = os.waitpid(process, 0)
            os.close(heard)
            assert status == 0
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        assert ["state" in entry for entry in entries] == [True] + [False] * 12
        mutants = [_mutant(number, f"w{k}") for k in range(4) for number in range(3)]
        assert len(Journal(path, "state").open(mutants)) == 12


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"result": {"id": "a"}}', "result.fate: Field required"),
        ('{"result": {"id": "a", "fate": "eaten"}}', "result.fate: Input should be 'killed'"),
        ('{"state": "state"}', "result: Input should be"),
    ],
)
def test_a_line_that_is_no_result_is_named(tmp_path: Path, line: str, message: str) -> None:
    journal = Journal(tmp_path / "run.jsonl", "state")
    journal.open([])
    with journal.path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(JournalError, match=rf"run\.jsonl:2: {message}.*choose another --folder"):
        journal.open([])


def test_a_result_of_another_edit_of_the_same_name_is_not_taken(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.jsonl", "state")
    journal.open([])
    journal.add(_mutant(0), _result(0))
    assert set(journal.open([_mutant(0)])) == {"w-0"}
    others = ({"module": "other.py"}, {"start": 1}, {"end": 2}, {"new": "3"})
    for change in others:
        other = replace(_mutant(0), **change)
        assert journal.open([other]) == {}
    # where both were planted, each has its own
    journal.add(other, Result(id="w-0", fate=Fate.SURVIVED))
    assert journal.open([other])["w-0"].fate is Fate.SURVIVED
    assert journal.open([_mutant(0)])["w-0"].fate is Fate.KILLED


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"result": []}', '{"result": {"fate": "killed"}}', "5", "{"]
)
def test_a_damaged_line_says_nothing_of_what_kills(tmp_path: Path, line: str) -> None:
    (tmp_path / "run.jsonl").write_text(f"{line}\n")
    assert list(kills_in(tmp_path)) == []
