"""What `lorakernels` exports, and the page that lists it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lorakernels

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "lorakernels.md"
# what vLLM 0.26 calls operators and methods of its layers, as its users know them
OF_VLLM = {
    "lora_shrink",
    "lora_expand",
    "fused_moe_lora",
    "moe_lora_align_block_size",
    "add_shrink",
    "add_expand",
    "add_lora_linear",
    "add_lora_w13",
    "add_lora_w2",
    "FusedMoEWithLoRA",
    "LoRAKernelMeta",
    "LoRAModel",
    "LoRARequest",
}


def section(title: str) -> str:
    _, _, behind = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")
    assert behind, f"{PAGE} has no section {title}"
    return behind.partition("\n## ")[0]


@pytest.mark.parametrize("name", lorakernels.__all__)
def test_a_public_name_can_be_imported_and_has_a_docstring(name: str) -> None:
    value = getattr(lorakernels, name)
    assert value.__name__ == name
    assert value.__doc__, f"{name} has no docstring"
    # dataclasses write their signature where none was written
    assert not value.__doc__.startswith(f"{name}("), f"{name} has no docstring"


def test_a_name_that_was_used_is_one_of_the_module_from_then_on() -> None:
    for name in lorakernels.__all__:
        value = getattr(lorakernels, name)
        assert vars(lorakernels)[name] is value
    assert set(lorakernels.__all__) <= set(dir(lorakernels))


def test_type_checkers_see_each_name_where_it_comes_from() -> None:
    module = ast.parse(Path(lorakernels.__file__).read_text(encoding="utf-8"))
    block = next(node for node in module.body if isinstance(node, ast.If))
    seen = {
        (node.module, alias.name, alias.asname)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: getattr(lorakernels, name).__module__ for name in lorakernels.__all__}
    assert seen == {(home, name, name) for name, home in homes.items()}


def test_importing_the_package_imports_neither_torch_nor_triton() -> None:
    code = "import sys, lorakernels; print({'torch', 'triton', 'transformers'} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'lora_shrink'"):
        _ = lorakernels.lora_shrink


def test_the_page_lists_each_public_name_once() -> None:
    rows = re.findall(r"^\| (`.*?) \|", section("Names"), flags=re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == lorakernels.__all__


@pytest.mark.parametrize("title", ["From vLLM", "From SGLang"])
def test_what_the_page_maps_other_servers_to_exists(title: str) -> None:
    rows = [line.split("|")[2] for line in section(title).splitlines() if line.startswith("| `")]
    assert rows
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    known = set(lorakernels.__all__)
    methods = {
        method
        for name in ("LoRALinear", "AdapterSlots", "BatchMetadata")
        for method in dir(getattr(lorakernels, name))
    }
    assert named - known - methods == set()


def test_no_public_name_is_one_of_vllm_for_something_else() -> None:
    assert not OF_VLLM & set(lorakernels.__all__)
    from lorakernels.dense import ops as dense
    from lorakernels.moe.delta import ops as moe

    assert not OF_VLLM & {*vars(dense), *vars(moe)}
