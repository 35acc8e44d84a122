"""The input projection of a gated delta net, in all forms and on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn import functional as F

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.adapters.adapter import Adapter  # noqa: E402
from lorakernels.adapters.slots import AdapterSlots  # noqa: E402
from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense import linear as dense  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import LoRAFactors  # noqa: E402
from lorakernels.gdn import products  # noqa: E402
from lorakernels.gdn.forms import GDNForm  # noqa: E402
from lorakernels.layers.gdn import (  # noqa: E402
    DeltaNetHeads,
    GatedDeltaNetInputProjection,
    InputModules,
)
from lorakernels.moe.weights import ExpertFactors  # noqa: E402
from lorakernels.runtime.options import DUAL_STREAM  # noqa: E402

K, SLOTS, RANK, MOST = 32, 3, 8, 48
HEADS = DeltaNetHeads(key_heads=2, value_heads=4, key_size=4, value_size=8)
MODULES = {"grouped": HEADS.grouped(), "separate": HEADS.separate()}
QKVZ, BA = 2 * 8 + 2 * 32, 2 * 4
ROWS = torch.tensor([2, -1, 0, 0, 1, -1, 2, 0, 2], dtype=torch.int32)

Parts = dict[str, LoRAFactors]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = (randn(QKVZ, K, seed=1), randn(BA, K, seed=2))


def adapters(modules: InputModules) -> list[Parts]:
    """One adapter a slot: for qkvz alone, for ba alone and for both; ranks differ."""
    pool: list[Parts] = []
    for slot, group in enumerate((modules.qkvz, modules.ba, modules.all)):
        pool.append({})
        for index, module in enumerate(group):
            rank, seed = (8, 3, 5, 2)[index], 100 * slot + 10 * index
            a, b = randn(rank, K, seed=seed), randn(module.width, rank, seed=seed + 1)
            pool[-1][module.name] = LoRAFactors(a, b, 0.5 + slot)
    return pool


def layer(modules: InputModules, **place: int) -> GatedDeltaNetInputProjection:
    made = GatedDeltaNetInputProjection(
        *WEIGHTS, modules=modules, num_slots=SLOTS, rank=RANK, **place
    )
    for slot, adapter in enumerate(adapters(modules)):
        made.load_adapter(slot, adapter)
    return made


def serve(
    made: GatedDeltaNetInputProjection,
    x: Tensor,
    rows: Tensor = ROWS,
    form: GDNForm | None = None,
) -> tuple[Tensor, Tensor]:
    metadata = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cpu")
    metadata.prepare(rows)
    workspace = DenseWorkspace([made.slots], max_tokens=MOST)
    workspace.shrunk.fill_(float("nan"))
    return made(x, metadata, workspace, form=form)


def expected(x: Tensor, modules: InputModules) -> dict[str, Tensor]:
    """The output of each module in fp64, from whole tensors and row by row."""
    pool, outputs = adapters(modules), {}
    for weight, group in zip(WEIGHTS, (modules.qkvz, modules.ba), strict=True):
        pieces = weight.double().split([module.width for module in group])
        for module, piece in zip(group, pieces, strict=True):
            out = x.double() @ piece.T
            for row, slot in enumerate(ROWS.tolist()):
                if slot >= 0 and module.name in pool[slot]:
                    f = pool[slot][module.name]
                    out[row] += f.scale * (x[row].double() @ f.a.double().T) @ f.b.double().T
            outputs[module.name] = out
    return outputs


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.fixture
def noted(recorded_streams: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What runs on which stream, the launches of a layer among it."""

    noting = recorded_streams.noting
    multiply = torch.mm

    def product(x: Tensor, w: Tensor, *, out: Tensor) -> Tensor:
        recorded_streams.note("qkvz" if w.shape[1] == QKVZ else "ba")
        return multiply(x, w, out=out)

    class Functions:
        linear = staticmethod(noting("all", F.linear))

    monkeypatch.setattr(products, "F", Functions)
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(dense, "launch_shrink", noting("shrink", dense.launch_shrink))
    monkeypatch.setattr(dense, "launch_expand", noting("expand", dense.launch_expand))
    return recorded_streams.log


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("form", [None, *GDNForm])
def test_every_form_gives_each_row_the_adapter_of_either_or_both_projections(
    kind: str, form: GDNForm | None, recorded_streams: Any
) -> None:
    modules, x = MODULES[kind], randn(9, K, seed=3)
    qkvz, ba = serve(layer(modules), x, form=form)
    wanted = expected(x, modules)
    assert_close(qkvz, torch.cat([wanted[module.name] for module in modules.qkvz], dim=1))
    assert_close(ba, torch.cat([wanted[module.name] for module in modules.ba], dim=1))
    assert bool(recorded_streams.log) is (form in (GDNForm.DUAL, GDNForm.BESIDE))


@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize(
    "forms", [(GDNForm.SERIAL, GDNForm.DUAL), (GDNForm.MERGED, GDNForm.BESIDE)]
)
def test_forms_of_the_same_kernels_give_the_same_bits(
    rows: int, forms: tuple[GDNForm, GDNForm], recorded_streams: Any
) -> None:
    made, x = layer(MODULES["separate"]), randn(rows, K, seed=4)
    slots = torch.arange(rows, dtype=torch.int32) % SLOTS
    sequential, dual = (serve(made, x, slots, form) for form in forms)
    for one, other in zip(sequential, dual, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0,), (9,), (3, 3), (2, 0), (1, 3, 3)])
@pytest.mark.parametrize("form", list(GDNForm))
def test_the_outputs_have_the_leading_dimensions_of_the_input_and_one_layout(
    shape: tuple[int, ...], form: GDNForm, recorded_streams: Any
) -> None:
    made, rows = layer(MODULES["grouped"]), torch.Size(shape).numel()
    x = randn(rows, K, seed=3)
    wanted = serve(made, x, ROWS[:rows], form)
    found = serve(made, x.view(*shape, K), ROWS[:rows], form)
    for out, flat, width in zip(found, wanted, (QKVZ, BA), strict=True):
        assert out.shape == (*shape, width)
        assert out.stride()[-2:] == (QKVZ + BA, 1)
        assert torch.equal(out.reshape(rows, width), flat)


# the columns of a key head and its value heads stand together, and are not cut
@pytest.mark.parametrize(
    ("kind", "tp"), [("grouped", 2), ("separate", 1), ("separate", 2), ("separate", 4)]
)
def test_ranks_together_give_the_whole_layer_with_unequal_heads(kind: str, tp: int) -> None:
    # with 4 ranks each key head is held by two, each value head by one
    modules, x = MODULES[kind], randn(9, K, seed=3)
    wanted = expected(x, modules)
    for rank in range(tp):
        made = layer(modules, tp_size=tp, tp_rank=rank)
        outputs = serve(made, x)
        for out, group in zip(outputs, (modules.qkvz, modules.ba), strict=True):
            pieces = [
                piece.chunk(min(part.heads or 1, tp), dim=1)[rank * min(part.heads or 1, tp) // tp]
                for module in group
                for part, piece in zip(
                    module.columns,
                    wanted[module.name].split([p.width for p in module.columns], dim=1),
                    strict=True,
                )
            ]
            assert_close(out, torch.cat(pieces, dim=1))


@pytest.mark.parametrize("kind", list(MODULES))
def test_value_heads_stay_with_the_key_head_that_they_share_on_more_ranks_than_key_heads(
    kind: str,
) -> None:
    x = randn(9, K, seed=3)
    whole = serve(layer(MODULES[kind]), x)[1].double()
    of_ranks = [serve(layer(MODULES[kind], tp_size=4, tp_rank=rank), x)[1] for rank in range(4)]
    if kind == "grouped":
        # two ranks hold all columns of a key head
        wanted = torch.stack(whole.chunk(2, dim=1)).repeat_interleave(2, dim=0)
    else:
        # a rank holds a value head
        b, a = whole.chunk(2, dim=1)
        wanted = torch.stack([b.T, a.T], dim=2)
    assert_close(torch.stack(of_ranks), wanted)


def test_the_modules_of_released_models_have_the_columns_of_their_checkpoints() -> None:
    heads = DeltaNetHeads(key_heads=16, value_heads=32, key_size=128, value_size=128)
    for modules in (heads.grouped(), heads.separate()):
        assert sum(module.width for module in modules.qkvz) == 12288
        assert sum(module.width for module in modules.ba) == 64
    assert [module.name for module in heads.grouped().all] == ["in_proj_qkvz", "in_proj_ba"]
    widths = {module.name: module.width for module in heads.separate().all}
    assert widths == {"in_proj_qkv": 8192, "in_proj_z": 4096, "in_proj_b": 32, "in_proj_a": 32}
    # in the order of their columns, which two of equal width do not show
    assert list(widths) == ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]


ORDERS = {
    GDNForm.SERIAL: ["main ba", "main qkvz", "main shrink", "main expand"],
    GDNForm.DUAL: ["side1 ba", "side2 shrink", "main qkvz", "main expand"],
    GDNForm.MERGED: ["main all", "main shrink", "main expand"],
    GDNForm.BESIDE: ["side1 shrink", "main all", "main expand"],
}


@pytest.mark.parametrize("form", list(GDNForm))
def test_each_form_runs_its_parts_on_its_streams(form: GDNForm, noted: list[str]) -> None:
    serve(layer(MODULES["grouped"]), randn(9, K, seed=3), form=form)
    assert [line.replace(" runs", "") for line in noted if "runs" in line] == ORDERS[form]
    waits = [line for line in noted if line.startswith("main waits")]
    assert len(waits) == len({line.split()[0] for line in noted if line.startswith("side")})
    if waits:
        assert noted[-len(waits) - 1 :] == [*waits, "main runs expand"]


def test_a_batch_without_adapters_forks_its_base_products_alone(noted: list[str]) -> None:
    made, x = layer(MODULES["grouped"]), randn(9, K, seed=3)
    base = torch.full((9,), -1, dtype=torch.int32)
    for form in (GDNForm.DUAL, GDNForm.BESIDE):
        qkvz, ba = serve(made, x, base, form)
        torch.testing.assert_close(qkvz, x @ WEIGHTS[0].T)
        torch.testing.assert_close(ba, x @ WEIGHTS[1].T)
    forks = [line for line in noted if line.startswith("main records")]
    assert len(forks) == 1
    assert "side1 runs ba" in noted


def test_the_switch_decides_what_runs_without_a_form(
    noted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, x = layer(MODULES["grouped"]), randn(9, K, seed=3)
    serve(made, x)
    assert not any("records" in line for line in noted)
    monkeypatch.setenv(DUAL_STREAM, "1")
    serve(made, x)
    assert "side1 runs shrink" in noted


@pytest.mark.parametrize("form", [0, *(form.value for form in GDNForm)])
def test_the_operator_does_what_it_tells_torch(form: int, recorded_streams: Any) -> None:
    made, x = layer(MODULES["separate"]), randn(9, K, seed=3)
    tables = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cpu")
    tables.prepare(ROWS)
    workspace = DenseWorkspace([made.slots], max_tokens=MOST)
    arguments = (
        *(x, made.weights, made.scales, made.qkvz_features),
        *(*made.slots.tensors, list(made.slots.slice_widths)),
        *(tables.tile_slots, tables.tile_rows, tables.num_tiles, workspace.buffers, form),
    )
    torch.library.opcheck(torch.ops.lorakernels.gdn_in_proj.default, arguments)


def test_layers_of_one_shape_share_one_graph_for_all_batches(fresh_dynamo: None) -> None:
    layers = [layer(MODULES["separate"]) for _ in range(3)]
    metadata = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cpu")
    workspace = DenseWorkspace([layers[0].slots], max_tokens=MOST)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def apply(made: GatedDeltaNetInputProjection, x: Tensor) -> tuple[Tensor, Tensor]:
        return made(x, metadata, workspace)

    for rows in (9, 17, 2, 40):
        metadata.prepare(torch.arange(rows, dtype=torch.int32) % (SLOTS + 1) - 1)
        for made in layers:
            x = randn(rows, K, seed=rows)
            torch._dynamo.mark_dynamic(x, 0)
            for found, wanted in zip(apply(made, x), made(x, metadata, workspace), strict=True):
                assert torch.equal(found, wanted)
                assert found.stride() == wanted.stride()
    assert counter.frame_count == 1


def test_an_adapter_is_refused_as_a_whole() -> None:
    modules = MODULES["separate"]
    made, x = layer(modules), randn(9, K, seed=3)
    before = serve(made, x)
    good = LoRAFactors(randn(2, K, seed=5), randn(4, 2, seed=6), 1.0)
    wide = LoRAFactors(randn(2, K, seed=5), randn(5, 2, seed=6), 1.0)
    high = LoRAFactors(randn(9, K, seed=5), randn(4, 9, seed=6), 1.0)
    expert = ExpertFactors(good.a[None], good.b[None], 1.0)
    endless = LoRAFactors(good.a, good.b, float("inf"))
    refused: list[tuple[Any, str]] = [
        ({"in_proj_b": good, "in_proj_c": good}, "parts may name in_proj_qkv, in_proj_z"),
        ({"in_proj_b": good, "in_proj_a": wide}, r"b of in_proj_a must be \[4, 2\]"),
        ({"in_proj_b": good, "in_proj_a": high}, r"rank of in_proj_a must be 1 to 8 \(got 9\)"),
        ({"in_proj_b": expert}, "in_proj_b must have no axis of experts"),
        ({"in_proj_b": endless}, "scale of in_proj_b must be finite"),
        ([good], "parts must map names to factors"),
    ]
    for parts, message in refused:
        with pytest.raises(ValueError, match=message):
            made.load_adapter(0, parts)
    for out, kept in zip(serve(made, x), before, strict=True):
        assert torch.equal(out, kept)
    made.unload(0)
    qkvz, _ = serve(made, x)
    torch.testing.assert_close(qkvz[ROWS == 0], (x @ WEIGHTS[0].T)[ROWS == 0])


def test_a_served_adapter_finds_the_modules_of_the_layer() -> None:
    modules, x, prefix = MODULES["separate"], randn(9, K, seed=3), "model.layers.0.linear_attn."
    made = GatedDeltaNetInputProjection(*WEIGHTS, modules=modules, num_slots=SLOTS, rank=RANK)
    served = AdapterSlots({f"{prefix}in_proj": made})
    for slot, parts in enumerate(adapters(modules)):
        full_names = {f"{prefix}{name}": factors for name, factors in parts.items()}
        assert served.activate(Adapter(f"adapter {slot}", full_names)) == slot
    for out, wanted in zip(serve(made, x), serve(layer(modules), x), strict=True):
        assert torch.equal(out, wanted)
    served.evict("adapter 0")
    qkvz, _ = serve(made, x)
    torch.testing.assert_close(qkvz[ROWS == 0], (x @ WEIGHTS[0].T)[ROWS == 0])


def test_a_replaced_adapter_leaves_nothing_behind() -> None:
    modules, x = MODULES["separate"], randn(9, K, seed=3)
    made, fresh = layer(modules), layer(modules)
    made.load_adapter(0, adapters(modules)[2])
    made.load_adapter(0, {**adapters(modules)[0], "in_proj_a": None})
    for out, wanted in zip(serve(made, x), serve(fresh, x), strict=True):
        assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkvz": WEIGHTS[0][1:]}, r"qkvz must be \[80, 32\]"),
        ({"ba": WEIGHTS[1][:, 1:]}, r"ba must be \[8, 32\]"),
        ({"qkvz": WEIGHTS[0][:, 0]}, r"qkvz must be \[80, 80\], .* \(got \[80\]\)"),
        ({"ba": WEIGHTS[1].double()}, "qkvz and ba must have one dtype and one device"),
        ({"ba": WEIGHTS[1].to("meta")}, "qkvz and ba must have one dtype and one device"),
        ({"modules": InputModules((), HEADS.grouped().ba)}, "at least one of qkvz and one of ba"),
        (
            {"modules": InputModules(HEADS.grouped().qkvz, HEADS.grouped().qkvz)},
            "modules must have different names",
        ),
        ({"tp_size": 3}, "heads of slice in_proj_qkvz.0 must be a multiple or a divisor"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Mapping[str, Any], message: str) -> None:
    options = {"qkvz": WEIGHTS[0], "ba": WEIGHTS[1], "modules": MODULES["grouped"]} | dict(change)
    with pytest.raises(ValueError, match=message):
        GatedDeltaNetInputProjection(
            options.pop("qkvz"), options.pop("ba"), num_slots=1, rank=4, **options
        )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 3, 4, 4), r"value_heads must be a multiple of the 2 key heads \(got 3\)"),
        ((0, 4, 4, 4), r"key_heads must be at least 1 \(got 0\)"),
        ((2, 4, 4, 0), r"value_size must be at least 1 \(got 0\)"),
    ],
)
def test_heads_that_do_not_fit_are_refused(sizes: tuple[int, ...], message: str) -> None:
    names = ("key_heads", "value_heads", "key_size", "value_size")
    with pytest.raises(ValueError, match=message):
        DeltaNetHeads(**dict(zip(names, sizes, strict=True)))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(9, K + 1), r"x must have 32 columns \(got 33\)"),
        (torch.zeros(9, K).double(), "x must be torch.float32 like the weight"),
        (torch.zeros(8, K), "x and out must have 9 rows"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve(layer(MODULES["grouped"]), x)


def test_a_mapping_of_more_slots_than_the_layer_has_is_refused() -> None:
    made = layer(MODULES["grouped"])
    metadata = BatchMetadata(max_tokens=MOST, max_slots=SLOTS + 1, device="cpu")
    metadata.prepare(ROWS)
    workspace = DenseWorkspace([made.slots], max_tokens=MOST)
    with pytest.raises(ValueError, match=f"metadata must have at most {SLOTS} slots"):
        made(randn(9, K, seed=3), metadata, workspace)


def test_a_layer_may_have_one_head_of_each_kind_and_size_one() -> None:
    modules = DeltaNetHeads(key_heads=1, value_heads=1, key_size=1, value_size=1).grouped()
    assert [module.width for module in modules.all] == [4, 2]


@pytest.mark.parametrize("missing", ["qkvz", "ba"])
def test_a_product_without_modules_is_refused(missing: str) -> None:
    modules = replace(MODULES["grouped"], **{missing: ()})
    with pytest.raises(ValueError, match="modules must"):
        GatedDeltaNetInputProjection(*WEIGHTS, modules=modules, num_slots=1, rank=4)


def test_a_layer_says_how_many_columns_its_outputs_have() -> None:
    made = layer(MODULES["grouped"], tp_size=2, tp_rank=1)
    assert (made.qkvz_features, made.ba_features) == (QKVZ // 2, BA // 2)


def test_a_module_without_factors_does_not_hide_the_modules_behind_it() -> None:
    made = layer(MODULES["separate"])
    whole = adapters(MODULES["separate"])[2]
    x = randn(9, K, seed=3)
    found = []
    for parts in ({"in_proj_z": None, "in_proj_b": whole["in_proj_b"]}, {}):
        made.load_adapter(0, parts)
        found.append(serve(made, x)[1][ROWS == 0])
    assert not torch.equal(*found)


ON_A_GPU = """
import torch
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.dense.weights import LoRAFactors
from lorakernels.gdn.forms import GDNForm
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection

def randn(*shape):
    return torch.randn(*shape, device="cuda")

torch.manual_seed(0)
heads = DeltaNetHeads(key_heads=4, value_heads=8, key_size=64, value_size=64)
for modules in (heads.grouped(), heads.separate()):
    weights = [(randn(n, 1024) / 30).bfloat16() for n in (1536, 16)]
    layer = GatedDeltaNetInputProjection(*weights, modules=modules, num_slots=3, rank=16)
    for slot, group in enumerate((modules.qkvz, modules.ba, modules.all)):
        parts = {
            m.name: LoRAFactors(randn(16, 1024) / 30, randn(m.width, 16), 0.5) for m in group
        }
        layer.load_adapter(slot, parts)
    workspace = DenseWorkspace([layer.slots], max_tokens=2048)
    for rows in (1, 16, 300, 2048):
        batch = BatchMetadata(max_tokens=2048, max_slots=3, device="cuda")
        x, outs, graphs = randn(rows, 1024).bfloat16(), {}, {}
        for form in GDNForm:
            batch.prepare(torch.zeros(rows, dtype=torch.int32))
            layer(x, batch, workspace, form=form)
            torch.cuda.synchronize()
            batch.prepare(torch.full((rows,), -1, dtype=torch.int32))
            graphs[form] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[form]):
                outs[form] = layer(x, batch, workspace, form=form)
        for step in range(4):
            batch.prepare((torch.arange(rows, dtype=torch.int32) * 7 + step) % 4 - 1)
            x.normal_()
            serial = layer(x, batch, workspace, form=GDNForm.SERIAL)
            for form in GDNForm:
                wanted = layer(x, batch, workspace, form=form)
                for one, other in zip(wanted, serial):
                    torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-1)
                for _ in range(5):
                    graphs[form].replay()
                    for found in (layer(x, batch, workspace, form=form), outs[form]):
                        for one, other in zip(found, wanted):
                            assert torch.equal(one, other), form
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")
def test_each_form_gives_the_same_bits_again_on_a_gpu_and_in_its_graphs(
    run_compiled: Callable[[str], None],
) -> None:
    run_compiled(ON_A_GPU)


def test_autocast_changes_no_form() -> None:
    x, modules = randn(len(ROWS), K, seed=7), MODULES["grouped"]
    for form in (None, *GDNForm):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = serve(layer(modules), x, form=form)
        assert all(map(torch.equal, found, serve(layer(modules), x, form=form)))
