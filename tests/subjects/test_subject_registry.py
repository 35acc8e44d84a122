"""Subjects are found by their names, and the one in the docs passes."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from loragate.core.machine import Machine, select_interpreter
from loragate.core.verdict import OracleName, Verdict
from loragate.matrix.axis import Unstated
from loragate.matrix.case import AXES, Case, Dtype, Layout, Site
from loragate.protocol import Subject, Trial, unsupported
from loragate.run.trial import run_trial
from loragate.subjects import SUBJECTS, find_subject
from loragate.subjects.torch.subject import TorchSubject

select_interpreter()
CPU = Machine("cpu", "test", None, 1, 0)
PAGE = Path(__file__).parents[2] / "docs" / "subjects.md"
SKIPPED = {OracleName.COMPILE: "does not promise that torch.compile can trace it"}


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("ascii"), re.M | re.S)
    (tmp_path / "documented_subject.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return find_subject("documented_subject:MySubject")


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", Dtype)
def test_the_subject_of_the_docs_passes_every_oracle(
    documented: Subject, dtype: Dtype, layout: Layout
) -> None:
    case = Case(
        site=Site.DENSE_DELTA,
        tokens=9,
        in_features=40,
        slices=(24, 17),
        rank=8,
        slots=3,
        dtype=dtype,
        layout=layout,
        oracles=tuple(OracleName),
    )
    have = documented.capabilities(CPU)
    assert not isinstance(have, str)
    assert unsupported(case, have) is None
    judgements = run_trial(Trial(case, documented, have, CPU, seed=11))
    assert [judgement.oracle for judgement in judgements] == list(OracleName)
    for judgement in judgements:
        if judgement.oracle in SKIPPED:
            assert judgement.verdict is Verdict.SKIP
            assert SKIPPED[judgement.oracle] in judgement.message
        else:
            assert judgement.verdict is Verdict.PASS, judgement


def test_the_docs_name_every_oracle_and_every_subject_method() -> None:
    page = PAGE.read_text("ascii")
    for name in (*OracleName, "load", "unload", "prepare", "apply", "capabilities", "open"):
        assert f"`{name}" in page, name


def test_the_docs_name_the_axes_of_which_the_default_alone_is_assumed() -> None:
    row = next(line for line in PAGE.read_text("ascii").splitlines() if "the default only:" in line)
    axes = {name: axis for name, axis in AXES.items() if axis.unstated is Unstated.DEFAULT}
    assert set(re.findall(r"`(\w+)`", row)) == axes.keys()
    defaults = ", ".join(axis.default for axis in axes.values())
    assert row.endswith(f"the default only: {defaults} |")


def test_what_the_registry_names_exists() -> None:
    root = PAGE.parents[1]
    for subject in SUBJECTS.values():
        assert all((root / path).is_dir() for path in subject.host_tests)
        if subject.launches is not None:
            module, _, function = subject.launches.partition(":")
            assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("name", ["torch", "loragate.subjects.torch.subject:TorchSubject"])
def test_a_subject_is_found_by_its_short_name_and_by_module_and_object(name: str) -> None:
    assert type(find_subject(name)) is TorchSubject


def test_each_lookup_makes_a_new_subject() -> None:
    assert find_subject("torch") is not find_subject("torch")


def test_every_registered_subject_can_be_made() -> None:
    assert {name: find_subject(name).name for name in SUBJECTS} == {n: n for n in SUBJECTS}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("lorakernel", ["'lorakernel'", "lorakernels, torch, vllm", "did you mean 'lorakernels'?"]),
        ("vlm", ["did you mean 'vllm'?"]),
        ("no_such_module:Subject", ["'no_such_module:Subject'", "no module 'no_such_module'"]),
        ("loragate.no_such:Subject", ["no module 'loragate.no_such'"]),
        (
            "loragate.subjects.torch.subject:Missing",
            ["loragate.subjects.torch.subject has no callable 'Missing'"],
        ),
    ],
)
def test_a_name_that_leads_nowhere_says_what_is_wrong(name: str, parts: list[str]) -> None:
    with pytest.raises(ValueError, match="subject") as caught:
        find_subject(name)
    for part in parts:
        assert part in str(caught.value)


def test_a_name_unlike_any_other_gets_no_suggestion() -> None:
    with pytest.raises(ValueError, match="module:object") as caught:
        find_subject("qqqq")
    assert "did you mean" not in str(caught.value)


def test_a_package_that_a_subject_misses_is_not_blamed_on_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "subject_with_a_need.py").write_text("import package_that_does_not_exist\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="package_that_does_not_exist"):
        find_subject("subject_with_a_need:Subject")
