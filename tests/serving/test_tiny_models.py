"""What the weights of a tiny model follow from."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from lorakernels.serving.tiny import KINDS, tiny_model


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model_has_weights_of_its_seed_and_leaves_other_random_numbers_alone(
    kind: str,
) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    first, other = (tiny_model(kind, seed=seed).state_dict() for seed in (1, 2))
    assert torch.equal(torch.rand(1), wanted)
    for name, weight in first.items():
        assert not torch.equal(weight, other[name]), name
        # or the answers would hardly depend on a prompt
        if weight.dim() > 1:
            assert 0.5 < weight.std() * weight.shape[-1] ** 0.5 < 2, name


def test_the_norms_of_a_tiny_model_vary_alike_whatever_its_width_is() -> None:
    for name, weight in tiny_model("qwen3", hidden_size=512).named_parameters():
        if weight.dim() == 1 and len(weight) == 512:
            assert 0.15 < weight.std() < 0.25, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model_is_on_the_cpu_whatever_the_default_device_is(kind: str) -> None:
    wanted = tiny_model(kind).state_dict()
    with torch.device("meta"):
        found = tiny_model(kind).state_dict()
    assert found.keys() == wanted.keys()
    for name, weight in found.items():
        assert weight.device.type == "cpu", name
        assert torch.equal(weight, wanted[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model_is_the_same_whatever_was_drawn_before(kind: str) -> None:
    weights = []
    for before in (1, 2):
        torch.manual_seed(before)
        weights.append(tiny_model(kind, seed=3).state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
