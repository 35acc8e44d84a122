"""Where values leave those of a reference."""

from __future__ import annotations

import torch

from loragate.engine.bisection import first_deviation


def test_values_that_are_no_numbers_have_left_the_reference() -> None:
    exact = {"model.layers.0.mlp": torch.ones(3, 2), "model.norm": torch.ones(3, 2)}
    shown = {name: values.clone() for name, values in exact.items()}
    assert first_deviation(shown, exact, exact, allowance=8, floor=0.01) is None
    shown["model.layers.0.mlp"][1, 0] = float("nan")
    found = first_deviation(shown, exact, exact, allowance=8, floor=0.01)
    assert found is not None
    assert (found.layer, found.module, found.token) == (0, "mlp", 1)
