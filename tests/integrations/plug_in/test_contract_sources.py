"""The table of what the plug-in relies on, compared with the source of each version on disk.

LORAKERNELS_VLLM_SOURCES names a folder with one folder for each version, in which the package
`vllm` lies as in its wheel. Nothing is imported.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.integrations.vllm.contract import (  # noqa: E402
    SEAMS,
    Seam,
    check_version,
    parameters_of,
)
from lorakernels.integrations.vllm.methods import LoraKernelsMethods  # noqa: E402

VARIABLE = "LORAKERNELS_VLLM_SOURCES"


def sources() -> list[Path]:
    folder = os.environ.get(VARIABLE)
    found = sorted(Path(folder).iterdir()) if folder else []
    return [version for version in found if (version / "vllm").is_dir()]


def found_in(source: Path, seam: Seam) -> set[str]:
    """The parameters of a function, or the fields of a class, without importing it."""
    path = source / Path(*seam.module.split(".")).with_suffix(".py")
    nodes: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in seam.name.split("."):
        named = (node for node in nodes if getattr(node, "name", None) == part)
        node = next(named)
        nodes = getattr(node, "body", [])
    if isinstance(node, ast.ClassDef):
        fields = (line.target for line in node.body if isinstance(line, ast.AnnAssign))
        return {ast.unparse(field) for field in fields}
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    for argument in (*given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if argument is not None:
            argument.annotation = None
    return {f"({ast.unparse(given)})"}


@pytest.mark.skipif(not sources(), reason=f"{VARIABLE} names no folder with sources of vLLM")
@pytest.mark.parametrize("source", sources(), ids=lambda path: path.name)
@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_a_version_has_what_the_table_says(source: Path, seam: Seam) -> None:
    check_version(source.name)
    assert found_in(source, seam).intersection(seam.accepted)


@pytest.mark.parametrize(
    "seam",
    [seam for seam in SEAMS if seam.name.startswith("PunicaWrapperGPU.")],
    ids=lambda seam: seam.name,
)
def test_a_method_in_the_place_of_one_of_vllm_has_its_parameters_and_defaults(seam: Seam) -> None:
    method = getattr(LoraKernelsMethods, seam.name.partition(".")[2])
    assert parameters_of(method) in seam.accepted


def test_the_parameters_of_a_source_are_written_as_the_table_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "vllm" / "some.py"
    path.parent.mkdir()
    path.write_text(
        "class Kind:\n"
        "    scale: int\n"
        "    def method(self, y: 'Tensor', mode: Mode = Mode.ON, *, b: int | None = None, **kw):\n"
        "        pass\n"
    )
    wanted = "(self, y, mode=Mode.ON, *, b=None, **kw)"
    assert found_in(tmp_path, Seam("vllm.some", "Kind.method", ())) == {wanted}
    assert found_in(tmp_path, Seam("vllm.some", "Kind", ())) == {"scale"}
