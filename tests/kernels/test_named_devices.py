"""Every tensor of the package is made on a device that the code names. Without one torch takes the
default device of the process, which a server may have set to a GPU, or to "meta" while it loads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lorakernels

# functions of torch that make a tensor out of nothing; those that end with _like follow another one
MAKERS = frozenset(
    {
        "arange",
        "as_tensor",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "scalar_tensor",
        "tensor",
        "zeros",
    }
)


def makers_without_a_device(text: str) -> Iterator[int]:
    """The lines of calls that leave the device to the default of the process."""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and (node.func.value.id, node.func.attr in MAKERS) == ("torch", True)
            and not {"device", None} & {keyword.arg for keyword in node.keywords}
        ):
            yield node.lineno


def modules() -> list[Path]:
    return sorted(Path(lorakernels.__path__[0]).rglob("*.py"))


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("torch.zeros(2)", [1]),
        ("torch.tensor([1], dtype=torch.int32)", [1]),
        ("torch.zeros(2, device=x.device)", []),
        # whoever gives the options gives the device
        ("torch.zeros(2, **options)", []),
        ("torch.zeros_like(x)", []),
        ("x.new_zeros(2)", []),
        ("numpy.zeros(2)", []),
    ],
)
def test_a_call_without_a_device_is_found(call: str, found: list[int]) -> None:
    assert list(makers_without_a_device(call)) == found


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in modules()}
    assert sum("device=" in text for text in texts.values()) > 20
    assert [
        f"{path}:{line}" for path, text in texts.items() for line in makers_without_a_device(text)
    ] == []
