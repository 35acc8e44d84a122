"""Base weights that PEFT saves beside the factors of an embedding or of a head."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

peft = pytest.importorskip("peft")
pytest.importorskip("transformers", minversion="5.23")

from transformers import PreTrainedModel  # noqa: E402

from lorakernels.adapters.errors import AdapterError  # noqa: E402
from lorakernels.adapters.peft_folder import read_peft_folder  # noqa: E402
from lorakernels.adapters.slots import AdapterSlots  # noqa: E402
from lorakernels.common.digests import DTYPES  # noqa: E402
from lorakernels.dense.weights import SlotWeights  # noqa: E402
from lorakernels.layers.embedding import LoRAEmbedding  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import Parallel, Slice  # noqa: E402
from lorakernels.layers.wrapped import WrappedLoRALinear  # noqa: E402
from lorakernels.serving.tiny import tiny_model  # noqa: E402

VOCABULARY, RANK = 12, 2
NAMES = ("model.embed_tokens", "lm_head")


def tiny() -> PreTrainedModel:
    return tiny_model("qwen3", vocab_size=VOCABULARY)


def saved(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=list(NAMES)))
    wrapped.to(dtype).save_pretrained(folder)


def layers_of(weights: dict[str, Tensor]) -> dict[str, LoRAEmbedding | LoRALinear]:
    sizes = {"num_slots": 1, "rank": RANK}
    head = LoRALinear(weights["lm_head"], slices=[Slice("lm_head", VOCABULARY)], **sizes)
    tokens = LoRAEmbedding(weights["model.embed_tokens"], **sizes)
    return {"model.embed_tokens": tokens, "lm_head": head}


def served(weights: dict[str, Tensor]) -> AdapterSlots:
    return AdapterSlots(layers_of(weights))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: model.get_submodule(name).weight.detach().clone() for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_that_was_saved_with_rows_of_other_tokens_is_refused(
    tmp_path: Path, name: str
) -> None:
    model = tiny()
    weights = weights_of(model)
    saved(model, tmp_path, torch.float32)
    adapter = read_peft_folder(tmp_path)
    assert served(weights).activate(adapter) == 0
    # as where tokens were added to both models, whose last rows are random then
    weights[name][-1] += 1
    slots = served(weights)
    for _ in range(2):
        with pytest.raises(AdapterError, match="must have the base weight that was saved"):
            slots.activate(adapter)
    assert slots.names == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_base_weight_is_compared_as_it_is_after_a_change_in_place(
    tmp_path: Path, name: str
) -> None:
    model = tiny()
    weights = weights_of(model)
    saved(model, tmp_path, torch.float32)
    adapter = read_peft_folder(tmp_path)
    slots = served(weights)
    slots.activate(adapter)
    # the layers share whole weights
    weights[name].add_(1)
    with pytest.raises(AdapterError, match="must have the base weight that was saved"):
        slots.activate(adapter)
    weights[name].copy_(weights_of(model)[name])
    assert slots.activate(adapter) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_base_weight_is_compared_as_it_is_after_its_parameter_got_other_memory(
    tmp_path: Path, name: str
) -> None:
    model = tiny()
    saved(model, tmp_path, torch.float32)
    adapter = read_peft_folder(tmp_path)
    layers = layers_of(weights_of(model))
    slots = AdapterSlots(layers)
    slots.activate(adapter)
    weight = layers[name].weight
    right = weight.data
    # as a module that is moved or cast does it, which counts no change in place
    weight.data = right + 1
    with pytest.raises(AdapterError, match="must have the base weight that was saved"):
        slots.activate(adapter)
    weight.data = right
    assert slots.activate(adapter) == 0


# of two that were both rounded, each in its own way, neither is a cast of the other one
CASTS = [
    casts
    for casts in itertools.product((torch.float32, torch.bfloat16), DTYPES, DTYPES)
    if casts[0] is torch.bfloat16 or len({*casts}) < 3
]


@pytest.mark.parametrize(("published", "trained", "serving"), CASTS)
def test_a_base_weight_may_have_been_saved_in_another_dtype_than_it_is_served_in(
    tmp_path: Path, published: torch.dtype, trained: torch.dtype, serving: torch.dtype
) -> None:
    model = tiny().to(published)
    weights = {name: weight.to(serving) for name, weight in weights_of(model).items()}
    saved(model, tmp_path, trained)
    assert served(weights).activate(read_peft_folder(tmp_path)) == 0


def test_a_rank_that_holds_a_part_of_the_weight_does_not_compare_it(tmp_path: Path) -> None:
    model = tiny()
    weights = weights_of(model)
    saved(model, tmp_path, torch.float32)
    sizes = {"num_slots": 1, "rank": RANK, "tp_size": 2, "tp_rank": 1}
    slices = [Slice("lm_head", VOCABULARY)]
    layers = {
        "model.embed_tokens": LoRAEmbedding(weights["model.embed_tokens"], **sizes),
        "lm_head": LoRALinear(weights["lm_head"], slices=slices, parallel=Parallel.COLUMN, **sizes),
    }
    assert AdapterSlots(layers).activate(read_peft_folder(tmp_path)) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_nothing_but_padding_as_large_as_the_weight_does_not_compare_it(
    tmp_path: Path, rank: int
) -> None:
    model = tiny()
    weights = weights_of(model)
    saved(model, tmp_path, torch.float32)
    # rank 0 holds all tokens
    padded = 2 * VOCABULARY
    sizes = {"num_slots": 1, "rank": RANK, "tp_size": 2, "tp_rank": rank}
    head = Slice("lm_head", VOCABULARY, padded_width=padded)
    layers = {
        "model.embed_tokens": LoRAEmbedding(
            weights["model.embed_tokens"], padded_vocabulary=padded, **sizes
        ),
        "lm_head": LoRALinear(weights["lm_head"], slices=[head], parallel=Parallel.COLUMN, **sizes),
    }
    assert AdapterSlots(layers).activate(read_peft_folder(tmp_path)) == 0


def test_a_layer_that_knows_no_weight_compares_none(tmp_path: Path) -> None:
    model = tiny()
    weights = weights_of(model)
    saved(model, tmp_path, torch.float32)
    features = weights["lm_head"].shape[1]
    slots = SlotWeights(
        num_slots=1,
        slice_widths=[VOCABULARY],
        in_features=features,
        rank=RANK,
        dtype=torch.float32,
        device="cpu",
    )
    head = WrappedLoRALinear(
        nn.Linear(features, VOCABULARY),
        slots,
        slices=[Slice("lm_head", VOCABULARY)],
        in_features=features,
    )
    layers = layers_of(weights) | {"lm_head": head}
    assert AdapterSlots(layers).activate(read_peft_folder(tmp_path)) == 0


def test_a_layer_of_more_rows_than_were_saved_does_not_compare_them(tmp_path: Path) -> None:
    model = tiny()
    weights = weights_of(model)
    saved(model, tmp_path, torch.float32)
    rows = torch.cat([weights["lm_head"] + 1, torch.zeros(4, weights["lm_head"].shape[1])])
    slices = [Slice("lm_head", VOCABULARY), Slice("another_head", 4)]
    head = LoRALinear(rows, slices=slices, num_slots=1, rank=RANK)
    layers = layers_of(weights) | {"lm_head": head}
    assert AdapterSlots(layers).activate(read_peft_folder(tmp_path)) == 0
