"""An axis is declared once: what ids, samples, YAML, errors and skips do with it follows."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import pytest

import loragate
from loragate.matrix.axis import Axis, declared_axes
from loragate.matrix.case import AXES, Case
from loragate.matrix.ids import case_id, seed_of
from loragate.matrix.load import load_cases

FILES = sorted((pathlib.Path(__file__).parents[2] / "cases").glob("*.yaml"))
# a new axis in the only place that has to change
FIELD = """\
    lanes: Annotated[Lanes, Axis(sites=_DENSE | _DELTA)] = Lanes.ONE
    # how the case is run"""
VALUES = """\
from enum import StrEnum


class Lanes(StrEnum):
    ONE = "one"
    TWO = "two"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(EngineAxes):"""
SKIP = """
import sys
from dataclasses import replace
from pathlib import Path
from loragate.core.machine import Machine
from loragate.matrix.load import load_cases
from loragate.protocol import unsupported
from loragate.subjects import find_subject
have = find_subject("torch").capabilities(Machine("cpu", "test", None, 1, 0))
both = replace(have, supports={**have.supports, "lanes": {"one", "two"}})
for case in load_cases(map(Path, sys.argv[1:])):
    print(unsupported(case, have), unsupported(case, both), sep="; ")
"""
IDS = """
import sys
from pathlib import Path
from loragate.matrix.ids import case_id, seed_of
from loragate.matrix.load import load_cases
for case in load_cases(map(Path, sys.argv[1:])):
    print(case_id(case), seed_of(case, 1))
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def with_new_axis(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs code with a copy of the package whose `Case` has one field more."""
    root = tmp_path_factory.mktemp("package")
    package = pathlib.Path(loragate.__file__).parent
    shutil.copytree(package, root / "loragate", ignore=shutil.ignore_patterns("__pycache__"))
    module = root / "loragate" / "matrix" / "case.py"
    text = module.read_text()
    for old, new in (
        ("    # how the case is run", FIELD),
        ("@dataclass(frozen=True, slots=True, kw_only=True)\nclass Case(EngineAxes):", VALUES),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    module.write_text(text)
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])

    def run(code: str, *files: pathlib.Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, files)],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def sampled(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """A case file with a sampled group and additional text in its row."""

    def write(*, row: str = "", site: str = "dense_delta", exclude: str = "") -> pathlib.Path:
        path = tmp_path / "cases.yaml"
        path.write_text(
            f"site: {site}\n"
            "defaults: {dtype: bf16, slots: 4, slices: [33]}\n"
            "groups:\n"
            "  one:\n"
            "    tier: smoke\n"
            "    oracles: [reference]\n"
            "    rows:\n"
            f"      - {{tokens: [1, 2, 3], in_features: [4, 5, 6], rank: [1, 2]{row}}}\n"
            f"    exclude: [{exclude}]\n"
            "    sample: {limit: 30}\n"
        )
        return path

    return write


def ids(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line.split()[0] for line in done.stdout.splitlines()]


def test_a_new_axis_changes_no_id_no_sample_and_no_seed_of_the_shipped_cases(
    with_new_axis: Run,
) -> None:
    done = with_new_axis(IDS, *FILES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{case_id(case)} {seed_of(case, 1)}" for case in load_cases(FILES)
    ]


def test_a_new_axis_enters_the_ids_of_cases_without_its_default(
    with_new_axis: Run, sampled: Callable[..., pathlib.Path]
) -> None:
    before = ids(with_new_axis(IDS, sampled()))
    assert ids(with_new_axis(IDS, sampled(row=", lanes: one"))) == before
    two = ids(with_new_axis(IDS, sampled(row=", lanes: two")))
    # the sample is the same one, too
    assert [name.replace(".lanes-two", "") for name in two] == before
    both = ids(with_new_axis(IDS, sampled(row=", lanes: [one, two]")))
    assert 0 < sum(".lanes-two" in name for name in both) < len(both)


def test_an_exclusion_sees_a_new_axis_with_one_value_and_with_several(
    with_new_axis: Run, sampled: Callable[..., pathlib.Path]
) -> None:
    exclude = "{lanes: two, rank: 2}"
    for row in (", lanes: two", ", lanes: [one, two]"):
        names = ids(with_new_axis(IDS, sampled(row=row, exclude=exclude)))
        assert any(".lanes-two" in name for name in names)
        assert not any(".rank-2." in name and ".lanes-two" in name for name in names)
    done = with_new_axis(IDS, sampled(row=", lanes: two", exclude="{lanes: two}"))
    assert "groups.one.rows[0]: every point of it is excluded" in done.stderr


@pytest.mark.parametrize(
    ("site", "row", "message"),
    [
        ("dense_delta", "lanes: tow", "given 'tow'; allowed: one, two; nearest: two"),
        (
            "lora_linear",
            "lanes: two",
            "given for site lora_linear; allowed: for site dense_delta, moe_delta only",
        ),
    ],
)
def test_the_errors_of_case_files_cover_a_new_axis(
    with_new_axis: Run,
    sampled: Callable[..., pathlib.Path],
    site: str,
    row: str,
    message: str,
) -> None:
    done = with_new_axis(IDS, sampled(site=site, row=f", {row}"))
    assert f"cases.yaml:8: groups.one.rows[0].lanes: {message}" in done.stderr


def test_a_subject_is_not_run_on_a_new_axis_before_it_states_support(
    with_new_axis: Run, sampled: Callable[..., pathlib.Path]
) -> None:
    done = with_new_axis(SKIP, sampled(row=", lanes: two"))
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {"lanes two is not supported; None"}
    done = with_new_axis(SKIP, sampled())
    assert set(done.stdout.splitlines()) == {"None; None"}


def test_every_field_of_a_case_is_an_axis_but_the_site_and_the_way_of_running() -> None:
    others = {"site", "tier", "oracles", "timeout_s"}
    assert AXES.keys() == Case.__dataclass_fields__.keys() - others


@dataclass(frozen=True, kw_only=True)
class Twice:
    rank: Annotated[int, Axis()]
    live: Annotated[int, Axis(id_name="rank")]


@dataclass(frozen=True, kw_only=True)
class Fraction:
    rate: Annotated[float, Axis()]


def test_a_declaration_that_cannot_work_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="two axes have the same name in ids: rank, rank"):
        declared_axes(Twice)
    with pytest.raises(TypeError, match="axis rate: given <class 'float'>; allowed: int, tuple"):
        declared_axes(Fraction)
