"""Servers change the default device of torch while they build a model: each tensor has its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402
from lorakernels.layers.embedding import LoRAEmbedding  # noqa: E402
from lorakernels.layers.expert_placement import ExpertPlacement  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection  # noqa: E402
from lorakernels.layers.linear import LinearAdapters, LoRALinear  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch  # noqa: E402
from lorakernels.layers.moe_partition import MoERank  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402
from lorakernels.layers.warm_up import kernel_variants  # noqa: E402
from lorakernels.layers.wrapped import WrappedLoRALinear  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.weights import ExpertFactors  # noqa: E402

SLOTS, RANK, ROWS, IN = 2, 8, 6, 16


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu")


def given(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def factors(width: int, in_features: int = IN) -> LoRAFactors:
    return LoRAFactors(drawn(3, in_features, seed=1), drawn(width, 3, seed=2), 0.5)


def prepared() -> BatchMetadata:
    batch = BatchMetadata(max_tokens=ROWS, max_slots=SLOTS, device="cpu")
    batch.prepare(given([0, -1, 1, 0, 1, 1]))
    return batch


def dense(layer: LinearAdapters, x: Tensor, name: str, width: int, in_features: int = IN) -> Tensor:
    layer.load_adapter(1, {name: factors(width, in_features)})
    out: Tensor = layer(x, prepared(), DenseWorkspace([layer.slots], max_tokens=ROWS))
    return out


def linear() -> list[Tensor]:
    slices = [Slice("q", 6), Slice("k", 4)]
    layer = LoRALinear(drawn(10, IN, seed=3), slices=slices, num_slots=SLOTS, rank=RANK)
    return [dense(layer, drawn(ROWS, IN, seed=4), "q", 6)]


def wrapped() -> list[Tensor]:
    base = nn.Linear(IN, 10, bias=False, device="cpu")
    base.weight.data.copy_(drawn(10, IN, seed=3))
    slots = SlotWeights(
        num_slots=SLOTS,
        slice_widths=[10],
        in_features=IN,
        rank=RANK,
        dtype=torch.float32,
        device="cpu",
    )
    layer = WrappedLoRALinear(base, slots, slices=[Slice("q", 10)], in_features=IN)
    return [dense(layer, drawn(ROWS, IN, seed=4), "q", 10)]


def embedding() -> list[Tensor]:
    layer = LoRAEmbedding(drawn(20, 12, seed=3), num_slots=SLOTS, rank=RANK)
    return [dense(layer, given([3, 1, 19, 0, 7, 3]), "embed_tokens", 12, 20)]


def delta_net() -> list[Tensor]:
    heads = DeltaNetHeads(key_heads=2, value_heads=4, key_size=4, value_size=8)
    modules = heads.grouped()
    layer = GatedDeltaNetInputProjection(
        drawn(80, IN, seed=3), drawn(8, IN, seed=5), modules=modules, num_slots=SLOTS, rank=RANK
    )
    layer.load_adapter(1, {module.name: factors(module.width) for module in modules.all})
    workspace = DenseWorkspace([layer.slots], max_tokens=ROWS)
    return list(layer(drawn(ROWS, IN, seed=4), prepared(), workspace))


def experts() -> list[Tensor]:
    # one expert has two places, so that rows take them in turn
    placement = ExpertPlacement(3, ((0, 2), (1, 2)))
    layer = FusedMoELoRA(
        drawn(3, 24, IN, seed=3),
        drawn(3, IN, 12, seed=5),
        gate_up=GateUp.HALVES,
        num_slots=SLOTS,
        rank=RANK,
        place=MoERank(2, 1),
        placement=placement,
    )
    up = ExpertFactors(drawn(3, 3, IN, seed=6), drawn(3, 12, 3, seed=7), 0.5)
    layer.load_adapter(1, {"experts.up_proj": up})
    pairs = PairMetadata(
        max_tokens=ROWS,
        top_k=2,
        num_experts=layer.cut.experts.size,
        max_slots=SLOTS,
        device="cpu",
        with_base=True,
    )
    scratch = MoEScratch([layer], max_tokens=ROWS, top_k=2)
    ids = given([0, 1, 2, 0, 1, 2, 2, 1, 0, 2, 2, 0]).view(ROWS, 2)
    x, weights = drawn(ROWS, IN, seed=4), drawn(ROWS, 2, seed=8).abs()
    return [layer(x, ids, weights, prepared(), pairs, scratch)]


def variants() -> list[Tensor]:
    slices = [Slice("q", 6), Slice("k", 4)]
    return listed(LoRALinear(drawn(10, IN, seed=3), slices=slices, num_slots=SLOTS, rank=RANK))


def variants_of_lookups() -> list[Tensor]:
    return listed(LoRAEmbedding(drawn(20, 12, seed=3), num_slots=SLOTS, rank=RANK))


def listed(layer: LoRALinear | LoRAEmbedding) -> list[Tensor]:
    batch = BatchMetadata(max_tokens=ROWS, max_slots=SLOTS, device="cpu")
    found = kernel_variants([layer], batch, DenseWorkspace([layer.slots], max_tokens=ROWS))
    return [given([variant.rows for variant in found])]


SCENES = [linear, wrapped, embedding, delta_net, experts, variants, variants_of_lookups]


@pytest.mark.parametrize("scene", SCENES)
def test_layers_are_built_loaded_and_run_where_their_weights_are(
    scene: Callable[[], list[Tensor]],
) -> None:
    wanted = scene()
    with torch.device("meta"):
        found = scene()
    assert all(map(torch.equal, found, wanted))
