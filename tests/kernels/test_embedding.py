"""Adapters of a vocabulary embedding, against their definition and against PEFT."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from loragate.core.machine import detect_machine, select_interpreter

select_interpreter()

from lorakernels.adapters.peft_folder import read_peft_folder  # noqa: E402
from lorakernels.adapters.slots import AdapterSlots  # noqa: E402
from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense import embedding as operator  # noqa: E402
from lorakernels.dense import launch, specs  # noqa: E402
from lorakernels.dense.embedding import ID_TYPES, embedding_delta  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402
from lorakernels.layers.embedding import LoRAEmbedding  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402
from lorakernels.layers.warm_up import kernel_variants  # noqa: E402

DEVICE = detect_machine().device
VOCABULARY, WIDTH, SLOTS, RANK = 29, 40, 3, 20
# of the adapter in each slot; the last slot is empty
RANKS, SCALES = (20, 7), (0.5, 2.0)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def embedding(dtype: torch.dtype = torch.float32, **options: int) -> LoRAEmbedding:
    weight = randn(VOCABULARY, WIDTH, seed=1).to(dtype)
    layer = LoRAEmbedding(weight, num_slots=SLOTS, rank=RANK, **options)
    for slot, (rank, scale) in enumerate(zip(RANKS, SCALES, strict=True)):
        layer.load_adapter(slot, {"embed_tokens": factors(rank, scale, seed=slot)})
    return layer


def factors(rank: int, scale: float, seed: int) -> LoRAFactors:
    a, b = randn(rank, VOCABULARY, seed=10 + seed), randn(WIDTH, rank, seed=20 + seed)
    return LoRAFactors(a, b, scale)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Ids and slots of a step, with base rows."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, VOCABULARY, (rows,), generator=generator).to(DEVICE)
    return ids, torch.randint(-1, SLOTS, (rows,), generator=generator).int()


def step(layer: LoRAEmbedding, ids: Tensor, slots: Tensor) -> Tensor:
    metadata = BatchMetadata(max_tokens=len(slots), max_slots=SLOTS, device=DEVICE)
    metadata.prepare(slots)
    return layer(ids, metadata, DenseWorkspace([layer.slots], max_tokens=len(slots)))


def wanted(ids: Tensor, slots: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """fp64, from values that were rounded to `dtype`."""
    rows = randn(VOCABULARY, WIDTH, seed=1).to(dtype).double()[ids]
    for slot, (rank, scale) in enumerate(zip(RANKS, SCALES, strict=True)):
        own = factors(rank, scale, seed=slot)
        a, b = own.a.to(dtype).double(), own.b.to(dtype).double()
        here = (slots == slot).to(DEVICE)
        rows[here] += scale * (b @ a[:, ids[here]]).T
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# tiles of 16 and of 32 rows
@pytest.mark.parametrize("rows", [1, 37, 150])
def test_each_token_gets_its_row_and_the_delta_of_its_adapter(
    rows: int, dtype: torch.dtype
) -> None:
    ids, slots = batch(rows)
    found = step(embedding(dtype), ids, slots).double()
    right = wanted(ids, slots, dtype)
    allowed = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert (found - right).abs().max() <= allowed * right.abs().max()


def test_a_token_without_an_adapter_keeps_the_bits_of_its_row() -> None:
    ids, slots = batch(60)
    layer = embedding(torch.bfloat16)
    found = step(layer, ids, slots)
    # the last slot has no adapter
    base = ((slots < 0) | (slots == SLOTS - 1)).to(DEVICE)
    assert torch.equal(found[base], layer.weight[ids[base]])


def test_ids_of_any_shape_integer_and_stride_give_the_same() -> None:
    ids, slots = batch(24)
    layer = embedding()
    first = step(layer, ids, slots)
    assert torch.equal(step(layer, ids.int(), slots), first)
    assert torch.equal(step(layer, ids.view(2, 12), slots), first.view(2, 12, WIDTH))
    apart = torch.full((48,), VOCABULARY - 1, device=DEVICE)
    apart[::2] = ids
    assert torch.equal(step(layer, apart[::2], slots), first)


@pytest.mark.parametrize("padded", [30, 36])
def test_the_results_of_all_ranks_add_up_to_those_of_the_whole_vocabulary(padded: int) -> None:
    ids, slots = batch(40)
    parts = [
        step(embedding(tp_size=3, tp_rank=rank, padded_vocabulary=padded), ids, slots)
        for rank in range(3)
    ]
    # every id is held by one rank, and the others give zeros
    assert torch.equal(sum(parts, torch.zeros_like(parts[0])), step(embedding(), ids, slots))


def test_an_id_outside_of_the_vocabulary_gives_zeros() -> None:
    layer = embedding()
    ids = torch.tensor([-1, VOCABULARY, 1 << 40, -(1 << 40), 3], device=DEVICE)
    found = step(layer, ids, torch.zeros(5, dtype=torch.int32))
    assert not found[:4].any()
    assert found[4].any()


def test_a_rank_wider_than_a_block_is_looked_up_completely() -> None:
    # so many ids that a layer of as many inputs would split its sum
    vocabulary, rows = 2000, 20
    layer = LoRAEmbedding(torch.zeros(vocabulary, WIDTH, device=DEVICE), num_slots=1, rank=300)
    own = LoRAFactors(randn(300, vocabulary, seed=1), randn(WIDTH, 300, seed=2), 1.0)
    layer.load_adapter(0, {"embed_tokens": own})
    ids = torch.arange(vocabulary - rows, vocabulary, device=DEVICE)
    metadata = BatchMetadata(max_tokens=rows, max_slots=1, device=DEVICE)
    metadata.prepare(torch.zeros(rows, dtype=torch.int32))
    workspace = DenseWorkspace([layer.slots], max_tokens=rows)
    workspace.shrunk.fill_(torch.nan)
    found = layer(ids, metadata, workspace)
    right = (own.b.double() @ own.a[:, ids].double()).T
    assert (found.double() - right).abs().max() <= 1e-5 * right.abs().max()


def test_programs_that_take_several_tiles_look_all_of_them_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, slots = batch(60)
    first = step(embedding(), ids, slots)
    monkeypatch.setattr(launch, "tile_programs", lambda shape, capacity: 1)
    assert torch.equal(step(embedding(), ids, slots), first)


def test_a_workspace_of_a_linear_layer_and_its_own_both_serve_an_embedding() -> None:
    ids, slots = batch(20)
    layer = embedding()
    head = LoRALinear(
        randn(WIDTH, WIDTH, seed=3), slices=[Slice("q", WIDTH)], num_slots=SLOTS, rank=RANK
    )
    metadata = BatchMetadata(max_tokens=20, max_slots=SLOTS, device=DEVICE)
    metadata.prepare(slots)
    shared = DenseWorkspace([layer.slots, head.slots], max_tokens=20)
    head(randn(20, WIDTH, seed=4), metadata, shared)
    assert torch.equal(layer(ids, metadata, shared), step(layer, ids, slots))


def test_a_reload_leaves_nothing_of_the_adapter_before() -> None:
    ids, slots = batch(30)
    layer, again = embedding(), embedding()
    again.load_adapter(0, {"embed_tokens": factors(RANK, 4.0, seed=9)})
    assert not torch.equal(step(again, ids, slots), step(layer, ids, slots))
    again.load_adapter(0, {"embed_tokens": factors(RANKS[0], SCALES[0], seed=0)})
    assert torch.equal(step(again, ids, slots), step(layer, ids, slots))
    again.unload(0)
    here = (slots == 0).to(DEVICE)
    assert torch.equal(step(again, ids, slots)[here], layer.weight[ids[here]])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(4), "ids must be int32 or int64 (got torch.float32)"),
        (torch.zeros(3, dtype=torch.int64), "ids must have 4 rows like out (got 3)"),
        (torch.zeros(5, dtype=torch.int64), "ids must have 4 rows like out (got 5)"),
        (torch.tensor(0), "ids must have one dimension (got shape [])"),
        (torch.zeros(2, 2, dtype=torch.int64), "ids must have one dimension (got shape [2, 2])"),
    ],
)
def test_wrong_ids_are_refused_by_what_is_wrong(ids: Tensor, message: str) -> None:
    layer = embedding()
    metadata = BatchMetadata(max_tokens=4, max_slots=SLOTS, device=DEVICE)
    metadata.prepare(torch.zeros(4, dtype=torch.int32))
    workspace = DenseWorkspace([layer.slots], max_tokens=4)
    out = torch.zeros(4, WIDTH, device=DEVICE)
    with pytest.raises(ValueError, match=re.escape(message)):
        embedding_delta(ids.to(DEVICE), layer.slots, metadata, workspace, out)


def test_ids_of_another_device_are_refused() -> None:
    layer, out = embedding(), torch.zeros(4, WIDTH, device=DEVICE)
    # torch itself would not call the operator for tensors of "meta"
    elsewhere = torch.zeros(4, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=f"ids must be on {layer.slots.a.device} .got meta"):
        operator._check_ids(elsewhere, layer.slots.a, out)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_without_rows_or_adapters_launches_nothing(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = embedding()
    metadata = BatchMetadata(max_tokens=4, max_slots=SLOTS, device=DEVICE)
    workspace = DenseWorkspace([layer.slots], max_tokens=4)
    launched: list[str] = []
    for name in ("launch_lookup", "launch_expand"):
        monkeypatch.setattr(operator, name, lambda *a, name=name, **options: launched.append(name))

    def step(slots: list[int]) -> None:
        metadata.prepare(torch.tensor(slots, dtype=torch.int32))
        ids = torch.zeros(len(slots), dtype=torch.int64, device=DEVICE)
        out = torch.zeros(len(slots), WIDTH, device=DEVICE)
        embedding_delta(ids, layer.slots, metadata, workspace, out)

    step([-1] * rows)
    assert launched == []
    if rows == 0:
        # as for a mapping on a GPU, of which the host knows nothing
        monkeypatch.setattr(operator, "runs_adapters", lambda tile_rows, device: True)
        step([])
        assert launched == []
    step([0])
    assert launched == ["launch_lookup", "launch_expand"]


def test_a_layer_refuses_ids_that_are_no_integers_before_it_looks_rows_up() -> None:
    with pytest.raises(
        ValueError, match=re.escape("ids must be int32 or int64 (got torch.float32")
    ):
        step(embedding(), torch.zeros(4, device=DEVICE), torch.zeros(4, dtype=torch.int32))


def test_an_embedding_is_in_no_group_of_ranks() -> None:
    layer = LoRAEmbedding(torch.zeros(8, 4), num_slots=1, rank=2)
    assert (layer.collective, layer.group) == (None, -1)


@pytest.mark.parametrize("shape", [(8,), (8, 4, 2)])
def test_a_weight_that_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    message = f"weight must be [vocabulary, width] (got {list(shape)})"
    with pytest.raises(ValueError, match=re.escape(message)):
        LoRAEmbedding(torch.zeros(shape), num_slots=1, rank=1)


@pytest.mark.parametrize(
    ("padded", "message"),
    [
        (None, "vocabulary must be divisible by tp_size 2 (got 31)"),
        (30, "padded width of vocabulary must be at least 31 (got 30)"),
        (33, "vocabulary must be divisible by tp_size 2 (got 33)"),
    ],
)
def test_a_vocabulary_that_cannot_be_cut_is_refused_by_its_name(
    padded: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LoRAEmbedding(torch.zeros(31, 4), num_slots=1, rank=1, tp_size=2, padded_vocabulary=padded)


def test_weights_of_several_slices_are_no_embedding() -> None:
    weights = SlotWeights(
        num_slots=1,
        slice_widths=(8, 8),
        in_features=VOCABULARY,
        rank=4,
        dtype=torch.float32,
        device=DEVICE,
    )
    metadata = BatchMetadata(max_tokens=1, max_slots=1, device=DEVICE)
    metadata.prepare(torch.zeros(1, dtype=torch.int32))
    ids, out = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(1, 16, device=DEVICE)
    workspace = DenseWorkspace([weights], max_tokens=1)
    with pytest.raises(ValueError, match=re.escape("weights must have one slice (got 2)")):
        embedding_delta(ids, weights, metadata, workspace, out)


def test_a_mapping_of_more_slots_than_the_weights_have_is_refused() -> None:
    layer = embedding()
    metadata = BatchMetadata(max_tokens=4, max_slots=SLOTS + 1, device=DEVICE)
    metadata.prepare(torch.full((4,), SLOTS, dtype=torch.int32))
    workspace = DenseWorkspace([layer.slots], max_tokens=4)
    ids, out = torch.zeros(4, dtype=torch.int64), torch.zeros(4, WIDTH, device=DEVICE)
    message = f"metadata must have at most {SLOTS} slots like the weights (got {SLOTS + 1})"
    with pytest.raises(ValueError, match=re.escape(message)):
        embedding_delta(ids.to(DEVICE), layer.slots, metadata, workspace, out)


def test_a_traced_layer_is_one_operator_for_any_number_of_tokens() -> None:
    layer = embedding()
    metadata = BatchMetadata(max_tokens=64, max_slots=SLOTS, device=DEVICE)
    workspace = DenseWorkspace([layer.slots], max_tokens=64)
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer.forward, backend=backend, dynamic=True, fullgraph=True)
    for rows in (5, 40):
        ids, slots = batch(rows)
        metadata.prepare(slots)
        found = compiled(ids, metadata, workspace)
        metadata.prepare(slots)
        assert torch.equal(found, layer(ids, metadata, workspace))
    assert len(graphs) == 1
    assert sum("embedding_delta" in name for name in graphs[0]) == 1


def test_the_kernels_of_an_embedding_are_listed_for_a_warm_up() -> None:
    layer = embedding()
    metadata = BatchMetadata(max_tokens=200, max_slots=SLOTS, device=DEVICE)
    workspace = DenseWorkspace([layer.slots], max_tokens=200)
    found = kernel_variants([layer], metadata, workspace)
    first = [(kernel.kernel, kernel.rows) for kernel in found]
    # a look-up for each type of ids
    assert first == [
        ("lora_lookup_kernel", 1),
        ("lora_expand_kernel", 1),
        ("lora_lookup_kernel", 1),
        ("lora_lookup_kernel", 65),
        ("lora_expand_kernel", 65),
        ("lora_lookup_kernel", 65),
        ("lora_lookup_kernel", 129),
        ("lora_expand_kernel", 129),
        ("lora_lookup_kernel", 129),
    ]


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (64, [1]), (65, [1, 65]), (128, [1, 65]), (129, [1, 65, 129])]
)
def test_a_kernel_that_the_largest_batch_alone_needs_is_listed_for_an_embedding(
    most: int, sizes: list[int]
) -> None:
    layer = embedding()
    metadata = BatchMetadata(max_tokens=most, max_slots=SLOTS, device=DEVICE)
    workspace = DenseWorkspace([layer.slots], max_tokens=most)
    found = kernel_variants([layer], metadata, workspace)
    assert sorted({kernel.rows for kernel in found}) == sizes


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(ids)
        return hidden


@pytest.mark.parametrize("copies", [False, True])
def test_folders_that_peft_saves_are_served_as_peft_serves_them(
    tmp_path: Path, copies: bool
) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = Tokens()
    weight = model.embed_tokens.weight.detach().clone()
    layer = LoRAEmbedding(weight.to(DEVICE), num_slots=SLOTS, rank=RANK)
    adapters = AdapterSlots({"embed_tokens": layer})
    ids, _ = batch(12)
    right = []
    config = peft.LoraConfig(r=6, lora_alpha=9, target_modules=["embed_tokens"], use_rslora=copies)
    wrapped = peft.get_peft_model(model, config)
    own = wrapped.base_model.model.embed_tokens
    for number in range(2):
        nn.init.normal_(own.lora_embedding_A["default"])
        nn.init.normal_(own.lora_embedding_B["default"])
        folder = tmp_path / f"adapter{number}"
        wrapped.save_pretrained(folder, save_embedding_layers=copies)
        assert adapters.activate(read_peft_folder(folder)) == number
        right.append(wrapped(ids.cpu()).detach())
    slots = torch.arange(12).int() % 2
    found = step(layer, ids, slots).cpu()
    mixed = torch.where((slots == 0)[:, None], right[0], right[1])
    assert torch.allclose(found, mixed, rtol=1e-5, atol=1e-5)


def test_look_ups_of_ids_of_each_type_are_compiled_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = set()
    monkeypatch.setattr(specs, "launch_lookup", lambda ids, *_, **__: seen.add(ids.dtype))
    monkeypatch.setattr(specs, "launch_expand", lambda *_, **__: None)
    for label, compiled in specs.launches(90):
        if label.startswith("embedding"):
            compiled()
    assert seen == set(ID_TYPES)
