"""Files that users name: a pipe or a device is no case file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loragate.core.files import read_regular
from loragate.core.verdict import ExitCode
from loragate.matrix.load import folded, load_cases, named_files
from loragate.matrix.problems import CaseFileError

ROOT = Path(__file__).parents[2]


@pytest.mark.drill(
    tried="A pipe in place of a case file",
    exit_code=ExitCode.USAGE,
    kept="nothing was started; one line names the file and says what is allowed",
)
def test_a_pipe_is_no_case_file(drill: Callable[[int, str], None], tmp_path: Path) -> None:
    pipe = tmp_path / "cases.yaml"
    os.mkfifo(pipe)
    folders = [str(ROOT / "harness"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "loragate", "plan", "--matrix", str(pipe)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    drill(done.returncode, done.stdout)
    assert f"{pipe}: cannot be read: must be a regular file" in done.stdout


@pytest.mark.parametrize(
    ("path", "problem"),
    [("/dev/zero", "cannot be read: must be a regular file"), ("/", "is a folder")],
)
def test_a_device_or_a_folder_is_no_case_file(path: str, problem: str) -> None:
    with pytest.raises(CaseFileError, match=f" {path}: {problem}"):
        load_cases([Path(path)])


def test_an_endless_file_is_not_read(tmp_path: Path) -> None:
    endless = tmp_path / "endless.yaml"
    with endless.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match=r"must have at most 16 MiB \(got 1099511627776 bytes\)"):
        read_regular(endless)


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "stored").write_bytes(b"text")
    (tmp_path / "linked").symlink_to(tmp_path / "stored")
    assert read_regular(tmp_path / "linked") == b"text"


def test_a_folder_stands_for_its_files_and_all_of_them_for_the_folder(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    for path in (second, first, tmp_path / "notes.txt"):
        path.write_text("")
    assert named_files([tmp_path]) == (first, second)
    assert named_files([second, tmp_path / "gone.yaml"]) == (second, tmp_path / "gone.yaml")
    assert folded([second, first]) == (tmp_path,)
    assert folded([first]) == (first,)
    assert folded([]) == ()
    (tmp_path / "c.yaml").write_text("")
    assert folded([first, second]) == (first, second)


def test_the_only_file_of_a_folder_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("")
    assert folded([tmp_path / "a.yaml"]) == (tmp_path / "a.yaml",)
