"""Which tensors a graph reads through a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lorakernels.serving.held import held_tensors

OWN = "lorakernels.layers.linear"


def _class(module: str, base: type = object) -> Any:
    return type("Holder", (base,), {"__module__": module})


def _layer(module: str = OWN, **attributes: object) -> nn.Module:
    layer: nn.Module = _class(module, nn.Module)()
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize("kind", [list, tuple])
def test_tensors_of_lists_and_of_tuples_are_named_by_their_place(kind: type) -> None:
    first, second = torch.empty(1), torch.empty(2)
    found = held_tensors(_layer(tables=kind([first, kind([second]), 3])))
    assert {name: id(value) for name, value in found.items()} == {
        "tables.0": id(first),
        "tables.1.0": id(second),
    }


def test_parameters_buffers_and_objects_of_layers_are_held() -> None:
    weight, scale, table = nn.Parameter(torch.empty(1)), torch.empty(2), torch.empty(3)
    shift = torch.empty(4)
    part = _class(OWN)()
    part.table = table
    layer = _layer(weight=weight, part=part)
    layer.register_buffer("scale", scale)
    # one that checkpoints leave out is read by kernels as any other
    layer.register_buffer("shift", shift, persistent=False)
    found = held_tensors(_layer(inner=layer))
    assert {name: id(value) for name, value in found.items()} == {
        "inner.weight": id(weight),
        "inner.scale": id(scale),
        "inner.shift": id(shift),
        "inner.part.table": id(table),
    }


@pytest.mark.parametrize("module", ["lorakernels.dense.weights", "somebody.layers"])
def test_slots_and_what_modules_of_somebody_else_keep_besides_are_left_out(module: str) -> None:
    other = _class(module)()
    other.table = torch.empty(3)
    assert held_tensors(_layer(slots=other)) == {}
    assert held_tensors(_layer(module, last=torch.empty(3))) == {}
