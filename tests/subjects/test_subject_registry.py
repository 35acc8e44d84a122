"""Subjects are found by their names, and the one in the docs passes."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from loragate.core.errors import CommandError
from loragate.core.machine import Machine, select_interpreter
from loragate.core.verdict import ExitCode, OracleName, Verdict
from loragate.matrix.axis import Unstated
from loragate.matrix.case import AXES, Case, Dtype, Layout, Site
from loragate.matrix.engine_case import ENGINE_ORACLES
from loragate.protocol import Subject, Trial, unsupported
from loragate.run.trial import run_trial
from loragate.subjects import SUBJECTS, find_subject, registry
from loragate.subjects.registry import RegisteredSubject
from loragate.subjects.torch.subject import TorchSubject

select_interpreter()
CPU = Machine("cpu", "test", None, 1, 0)
PAGE = Path(__file__).parents[2] / "docs" / "subjects.md"
SKIPPED = {
    OracleName.COMPILE: "does not promise that torch.compile can trace it",
    OracleName.WORK: "does not promise that its work follows from the tiles",
    OracleName.BATCH_INVARIANCE: "does not promise that a row does not depend on its batch",
    OracleName.QUEUE: "without a GPU",
    OracleName.GRAPH: "only a case of graphs captures",
    OracleName.RACE: "the case runs on one stream",
    OracleName.SCHEDULE: "the case runs on one stream",
    OracleName.OVERLAP: "the case runs on one stream",
    OracleName.HOT_PATH: "the subject promises nothing about what the host does",
    OracleName.INVENTORY: "without a GPU captures are modelled",
    **dict.fromkeys(ENGINE_ORACLES, "judges engines"),
}


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
    defaults = ", ".join(str(axis.default) for axis in axes.values())
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
        (
            "lorakernel",
            [
                "'lorakernel'",
                "lorakernels, torch, transformers, vllm, vllm_lorakernels",
                "did you mean 'lorakernels'?",
            ],
        ),
        ("vlm", ["did you mean 'vllm'?"]),
        ("no_such_module:Subject", ["'no_such_module:Subject'", "no module 'no_such_module'"]),
        ("loragate.no_such:Subject", ["no module 'loragate.no_such'"]),
        (
            "loragate.subjects.torch.subject:Missing",
            ["loragate.subjects.torch.subject has no 'Missing'"],
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


MODULE = """
import functools
from loragate.subjects.torch.subject import TorchSubject

class Nothing: ...

class Raises:
    def __init__(self):
        raise KeyError("no weights")

class Strange(TorchSubject):
    @property
    def name(self):
        raise OSError("unnamed")

class Ends:
    def __init__(self):
        raise SystemExit(0)

class EndsLater(TorchSubject):
    @property
    def name(self):
        raise SystemExit("unnamed")

def needs(path, *, rank, dtype=None): ...

def gives_a_number(*anything, **more): return 3

made = TorchSubject()
partial = functools.partial(TorchSubject)
"""


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module that can be imported, and gives its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> str:
        name = f"subject_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("Nothign", "{module} has no 'Nothign'; did you mean 'Nothing'?"),
        (
            "Nothing",
            "Nothing() gives an object of type Nothing, which is no subject: it lacks "
            "name (a str), version, capabilities, open",
        ),
        ("gives_a_number", "gives_a_number() gives an object of type int, which is no subject: "),
        ("needs", "needs needs arguments (path, rank) and is called without any"),
        ("functools", "functools is an object of type module; allowed: a class or a function"),
        ("made", "made is an object of type TorchSubject; allowed: a class or a function"),
        ("Raises", "Raises() raised KeyError: 'no weights' ({file}:9)"),
        ("Strange", "Strange() raised OSError: unnamed ({file}:14)"),
        ("Ends", "Ends() raised SystemExit: 0 ({file}:18)"),
        ("EndsLater", "EndsLater() raised SystemExit: unnamed ({file}:23)"),
    ],
)
def test_what_is_no_subject_is_refused_in_one_line(
    write_module: Callable[[str], str], tmp_path: Path, attribute: str, message: str
) -> None:
    module = write_module(MODULE)
    name = f"{module}:{attribute}"
    with pytest.raises(ValueError, match="subject") as caught:
        find_subject(name)
    wanted = message.format(module=module, file=tmp_path / f"{module}.py")
    assert str(caught.value).startswith(f"subject {name!r}: {wanted}")
    assert "\n" not in str(caught.value)
    assert find_subject(f"{module}:partial").name == "torch"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first ({file}:1)"),
        ("import sys\nsys.exit('no')", "SystemExit: no ({file}:2)"),
        ("def f(:", "SyntaxError: invalid syntax ({file}:1)"),
        # in the library that it calls is nothing to repair
        ("import json\njson.loads('{')", "JSONDecodeError: Expecting property name "),
        ("import json\n\njson.loads('{')", "({file}:3)"),
        ("import absent_package", "ModuleNotFoundError: No module named 'absent_package' ("),
    ],
)
def test_a_module_that_cannot_be_imported_says_why_and_where(
    write_module: Callable[[str], str], tmp_path: Path, text: str, message: str
) -> None:
    module = write_module(text)
    with pytest.raises(ValueError, match=f"importing {module} raised") as caught:
        find_subject(f"{module}:Subject")
    assert message.format(file=tmp_path / f"{module}.py") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_subject_of_the_harness_that_cannot_be_made_is_no_usage_error(
    write_module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = RegisteredSubject(name="ours", target=f"{write_module('import absent_package')}:It")
    monkeypatch.setattr(registry, "SUBJECTS", {"ours": broken})
    with pytest.raises(CommandError, match=r"subject 'ours': importing .*absent_package") as caught:
        find_subject("ours")
    assert caught.value.exit_code is ExitCode.INFRASTRUCTURE


KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def product(x, y, out):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


class Subject:
    name = "own"

    def version(self):
        return "1"

    def open(self, case, machine, base):
        raise NotImplementedError

    def capabilities(self, machine):
        ones, out = torch.ones(16, 16, dtype=torch.bfloat16), torch.empty(16, 16)
        product[(1,)](ones, ones, out)
        return f"the product is {out.unique().tolist()}"
"""


def test_kernels_of_any_subject_get_right_products_of_bf16_from_the_interpreter(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(KERNEL)
    # a process of its own: this one has imported kernels of the project, which repair it as well
    asked = "from loragate.run.trial import load_subject; print(load_subject('own:Subject')[1])"
    found = subprocess.run(
        [sys.executable, "-c", asked],
        cwd=tmp_path,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "the product is [16.0]\n"


@pytest.mark.parametrize(
    ("interpreted", "said"),
    [
        ("1", "lorakernels repairs Triton's interpreter, and raised NameError"),
        ("0", "found the subject torch"),
    ],
)
def test_a_package_that_cannot_repair_the_interpreter_is_named_where_one_is_on(
    tmp_path: Path, interpreted: str, said: str
) -> None:
    (tmp_path / "lorakernels").mkdir()
    (tmp_path / "lorakernels" / "__init__.py").write_text("missing\n")
    asked = """
from loragate.core.errors import CommandError
from loragate.subjects import find_subject
try:
    print("found the subject", find_subject("torch").name)
except CommandError as error:
    print(error)
"""
    paths = [str(tmp_path), *sys.path]
    found = subprocess.run(
        [sys.executable, "-c", asked],
        env=os.environ
        | {"TRITON_INTERPRET": interpreted, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stdout[: len(said)]) == (0, said), found.stderr
