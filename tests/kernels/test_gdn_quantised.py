"""The input projection of a gated delta net with base weights of 8 bits: both, or one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.common.quantised import Quantised, quantise_rows  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.shape import DenseShape  # noqa: E402
from lorakernels.dense.weights import LoRAFactors  # noqa: E402
from lorakernels.gdn import products  # noqa: E402
from lorakernels.gdn.forms import GDNForm, plan_gdn  # noqa: E402
from lorakernels.gdn.products import BaseProduct  # noqa: E402
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection  # noqa: E402
from lorakernels.layers.moe_weights import Weight  # noqa: E402
from lorakernels.runtime.options import DUAL_STREAM  # noqa: E402

FP8 = torch.float8_e4m3fn
K, SLOTS, RANK, MOST = 32, 3, 8, 300
HEADS = DeltaNetHeads(key_heads=2, value_heads=4, key_size=4, value_size=8)
MODULES = HEADS.separate()
QKVZ, BA = 2 * 8 + 2 * 32, 2 * 4
ROWS = torch.tensor([2, -1, 0, 0, 1, -1, 2, 0, 2], dtype=torch.int32)
OF_TWO, OF_ONE = (GDNForm.SERIAL, GDNForm.DUAL), (GDNForm.MERGED, GDNForm.BESIDE)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# rows of very different sizes: a scale of the wrong row shows
WIDE = [randn(rows, K, seed=rows) * torch.logspace(-2, 2, rows)[:, None] for rows in (QKVZ, BA)]


def quantised(weight: Tensor) -> Quantised:
    scales = weight.abs().amax(dim=1) / torch.finfo(FP8).max
    return Quantised((weight / scales[:, None]).to(FP8), scales)


def of_one_scale(weight: Tensor) -> Quantised:
    scale = weight.abs().max() / torch.finfo(FP8).max
    return Quantised((weight / scale).to(FP8), scale)


# by name: the weights of qkvz and ba, and whether they have one format
FORMATS: dict[str, tuple[Weight, Weight, bool]] = {
    "both": (quantised(WIDE[0]), quantised(WIDE[1]), True),
    "both_by_tensor": (of_one_scale(WIDE[0]), of_one_scale(WIDE[1]), True),
    "qkvz": (quantised(WIDE[0]), WIDE[1], False),
    "qkvz_by_tensor": (of_one_scale(WIDE[0]), WIDE[1], False),
    "ba": (WIDE[0], quantised(WIDE[1]), False),
}
MIXED = [name for name, (_, _, is_one) in FORMATS.items() if not is_one]
ALLOWED = [
    (name, form)
    for name, (_, _, is_one) in FORMATS.items()
    for form in (None, *GDNForm)
    if is_one or form not in OF_ONE
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_zeros_and_of_the_smallest_values_are_quantised(dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).smallest_normal if dtype is torch.float16 else 1e-11
    x = torch.tensor([[0.0, 0.0], [smallest, -smallest], [3.0, 0.0]], dtype=dtype)
    rows = quantise_rows(x)
    assert rows.values.float().abs().amax(1).tolist() == [0, 448, 448]
    found = rows.values.float() * rows.scales[:, None]
    torch.testing.assert_close(found, x.float(), rtol=0.1, atol=0)


# columns that lie one behind the other, rows of a wider tensor, and a single row of each
@pytest.mark.parametrize("strides", [(1, 5), (1, 1), (40, 1), (32, 2), (0, 1)])
@pytest.mark.parametrize("rows", [1, 5])
def test_rows_are_quantised_into_what_a_product_of_8_bits_takes_whatever_their_strides_are(
    strides: tuple[int, int], rows: int
) -> None:
    x = randn(32 * 40, seed=3).as_strided((rows, 16), strides)
    found, wanted = quantise_rows(x), quantise_rows(x.contiguous())
    assert found.values.stride() == (16, 1)
    assert torch.equal(found.values.float(), wanted.values.float())
    # torch asks the same of tensors without data as its kernel for a GPU does of others
    scales = torch.empty(rows, 1, device="meta"), torch.empty(1, 16, device="meta")
    weight = torch.empty(16, 16, dtype=FP8, device="meta").T
    torch._scaled_mm(found.values.to("meta"), weight, *scales, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_of_8_bits_is_rounded_once_to_the_dtype_of_its_input(dtype: torch.dtype) -> None:
    weight = quantised(WIDE[0])
    x = randn(5, K, seed=3).to(dtype)
    rows = quantise_rows(x)
    exact = rows.values.double() @ weight.values.double().T
    wanted = exact * rows.scales[:, None].double() * weight.scales.double()
    found = BaseProduct(weight.values, weight.scales)(x)
    assert found.dtype is dtype
    # of half a step; a sum in fp32 is rounded more than once
    eps = torch.finfo(dtype).eps
    rtol = eps if dtype is torch.float32 else 0.501 * eps
    torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=1e-6)


def test_rows_that_are_written_anew_in_place_are_quantised_anew() -> None:
    weight = quantised(WIDE[0])
    product = BaseProduct(weight.values, weight.scales)
    x, other = randn(5, K, seed=3), randn(5, K, seed=4)
    product(x)
    x.copy_(other)
    assert torch.equal(product(x), product(other))


def adapters() -> list[dict[str, LoRAFactors]]:
    """One adapter a slot: for qkvz alone, for ba alone and for both."""
    pool: list[dict[str, LoRAFactors]] = []
    for slot, group in enumerate((MODULES.qkvz, MODULES.ba, MODULES.all)):
        pool.append({})
        for index, module in enumerate(group):
            a, b = randn(3, K, seed=slot * 10 + index), randn(module.width, 3, seed=slot + index)
            pool[-1][module.name] = LoRAFactors(a, b, 0.5 + slot)
    return pool


def layer(name: str, **options: Any) -> GatedDeltaNetInputProjection:
    qkvz, ba, _ = FORMATS[name]
    options = {"dtype": torch.float32, "modules": MODULES} | options
    made = GatedDeltaNetInputProjection(qkvz, ba, num_slots=SLOTS, rank=RANK, **options)
    for slot, adapter in enumerate(adapters()):
        made.load_adapter(slot, adapter)
    return made


def serve(
    made: GatedDeltaNetInputProjection,
    x: Tensor,
    form: GDNForm | None = None,
    rows: Tensor = ROWS,
) -> Tensor:
    """qkvz and ba beside each other."""
    metadata = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cpu")
    metadata.prepare(rows)
    workspace = DenseWorkspace([made.slots], max_tokens=MOST)
    return torch.cat(made(x, metadata, workspace, form=form), dim=-1)


def base_of(x: Tensor, weight: Weight) -> Tensor:
    """fp64: what the weight alone gives; x is quantised where the weight is."""
    if isinstance(weight, Tensor):
        return x.double() @ weight.double().T
    scales = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / torch.finfo(FP8).max
    rounded = (x / scales).to(FP8).double() * scales.double()
    return rounded @ (weight.values.double() * weight.scales.double().view(-1, 1)).T


def expected(x: Tensor, name: str) -> Tensor:
    qkvz, ba, _ = FORMATS[name]
    out, pool = torch.cat([base_of(x, qkvz), base_of(x, ba)], dim=1), adapters()
    for row, slot in enumerate(ROWS.tolist()):
        column = 0
        for module in MODULES.all:
            if slot >= 0 and module.name in pool[slot]:
                f = pool[slot][module.name]
                delta = f.scale * (x[row].double() @ f.a.double().T) @ f.b.double().T
                out[row, column : column + module.width] += delta
            column += module.width
    return out


@pytest.mark.parametrize(("name", "form"), ALLOWED)
def test_every_form_gives_the_quantised_product_and_the_delta_of_the_input_as_it_is(
    name: str, form: GDNForm | None, recorded_streams: Any
) -> None:
    x = randn(9, K, seed=3) * torch.logspace(-1, 1, 9)[:, None]
    # a row of zeros has no largest value to be scaled by
    x[1] = 0.0
    found, wanted = serve(layer(name), x, form).double(), expected(x, name)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    assert bool(recorded_streams.log) is (form in (GDNForm.DUAL, GDNForm.BESIDE))


@pytest.mark.parametrize("name", FORMATS)
def test_forms_of_the_same_kernels_give_the_same_bits(name: str, recorded_streams: Any) -> None:
    made, x = layer(name), randn(9, K, seed=4)
    assert torch.equal(*(serve(made, x, form) for form in OF_TWO))
    if FORMATS[name][2]:
        assert torch.equal(*(serve(made, x, form) for form in OF_ONE))


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("form", OF_ONE)
def test_one_product_of_two_formats_is_refused_by_the_name_of_its_form(
    name: str, form: GDNForm
) -> None:
    message = rf"form must be SERIAL or DUAL where .* different formats \(got {form.name}\)"
    with pytest.raises(ValueError, match=message):
        serve(layer(name), randn(9, K, seed=3), form)


@pytest.mark.parametrize("rows", [0, 1, 64, 256, 8192])
@pytest.mark.parametrize("dual_stream", [True, False])
def test_no_plan_takes_one_product_of_two_formats(rows: int, dual_stream: bool) -> None:
    shape = DenseShape(rows, 2048, (12288, 64), 16, 2)
    chosen = plan_gdn(shape, dual_stream=dual_stream, may_join=False)
    assert chosen is (GDNForm.DUAL if dual_stream and rows else GDNForm.SERIAL)


@pytest.mark.parametrize(("value_heads", "sides"), [(4, 2), (8, 1)])
def test_8_bit_weights_whose_columns_16_does_not_divide_are_no_single_product(
    value_heads: int, sides: int, recorded_streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # all columns would be dequantised for each product, those of qkvz alone have a kernel
    modules = replace(HEADS, value_heads=value_heads).separate()
    weights = [
        quantised(randn(sum(module.width for module in group), K, seed=3))
        for group in (modules.qkvz, modules.ba)
    ]
    made = GatedDeltaNetInputProjection(
        *weights, modules=modules, num_slots=SLOTS, rank=RANK, dtype=torch.float32
    )
    monkeypatch.setenv(DUAL_STREAM, "1")
    serve(made, randn(9, K, seed=4))
    # ba and the shrink, or the shrink alone
    assert sum("main waits" in line for line in recorded_streams.log) == sides


@pytest.mark.parametrize("rows", [0, 1, 9, 300])
@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_layer_of_two_formats_runs_as_it_is_planned(
    rows: int, switch: str, recorded_streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DUAL_STREAM, switch)
    made, x = layer("qkvz"), randn(rows, K, seed=5)
    slots = torch.arange(rows, dtype=torch.int32) % (SLOTS + 1) - 1
    found = serve(made, x, rows=slots)
    assert bool(recorded_streams.log) is (switch == "1" and rows > 0)
    assert torch.equal(found, serve(made, x, GDNForm.SERIAL, slots))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tp", [2, 4])
def test_each_rank_keeps_the_scales_of_its_rows(name: str, tp: int) -> None:
    x = randn(9, K, seed=3)
    wanted = expected(x, name).split([p.width for m in MODULES.all for p in m.columns], dim=1)
    heads = [part.heads or 1 for module in MODULES.all for part in module.columns]
    for rank in range(tp):
        pieces = [
            piece.chunk(min(count, tp), dim=1)[rank * min(count, tp) // tp]
            for count, piece in zip(heads, wanted, strict=True)
        ]
        found = serve(layer(name, tp_size=tp, tp_rank=rank), x).double()
        torch.testing.assert_close(found, torch.cat(pieces, dim=1), rtol=1e-5, atol=1e-4)


def test_the_weights_of_the_layer_are_its_own() -> None:
    qkvz, ba = quantised(WIDE[0]), WIDE[1].clone()
    made = GatedDeltaNetInputProjection(qkvz, ba, modules=MODULES, num_slots=1, rank=4)
    metadata = BatchMetadata(max_tokens=9, max_slots=1, device="cpu")
    metadata.prepare(torch.full((9,), -1, dtype=torch.int32))
    workspace, x = DenseWorkspace([made.slots], max_tokens=9), randn(9, K, seed=3)
    before = torch.cat(made(x, metadata, workspace), dim=1)
    qkvz.values.view(torch.uint8).zero_()
    qkvz.scales.zero_()
    ba.zero_()
    assert torch.equal(torch.cat(made(x, metadata, workspace), dim=1), before)


@pytest.mark.parametrize("name", ["both", "qkvz"])
@pytest.mark.parametrize("form", [0, GDNForm.SERIAL.value, GDNForm.DUAL.value])
def test_the_operator_does_what_it_tells_torch(name: str, form: int, recorded_streams: Any) -> None:
    made, x = layer(name), randn(9, K, seed=3)
    tables = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cpu")
    tables.prepare(ROWS)
    workspace = DenseWorkspace([made.slots], max_tokens=MOST)
    arguments = (
        *(x, made.weights, made.scales, made.qkvz_features),
        *(*made.slots.tensors, list(made.slots.slice_widths)),
        *(tables.tile_slots, tables.tile_rows, tables.num_tiles, workspace.buffers, form),
    )
    # the check of the schema compares its arguments, which torch cannot do with 8-bit floats;
    # test_gdn_layer.py has it with others
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    operator = torch.ops.lorakernels.gdn_in_proj.default
    torch.library.opcheck(operator, arguments, test_utils=checks)


def test_layers_of_two_formats_share_one_graph(fresh_dynamo: None) -> None:
    layers = [layer("qkvz") for _ in range(3)]
    metadata = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cpu")
    workspace = DenseWorkspace([layers[0].slots], max_tokens=MOST)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def apply(made: GatedDeltaNetInputProjection, x: Tensor) -> tuple[Tensor, Tensor]:
        return made(x, metadata, workspace)

    for rows in (9, 17):
        metadata.prepare(torch.arange(rows, dtype=torch.int32) % (SLOTS + 1) - 1)
        for made in layers:
            x = randn(rows, K, seed=rows)
            torch._dynamo.mark_dynamic(x, 0)
            for found, wanted in zip(apply(made, x), made(x, metadata, workspace), strict=True):
                assert torch.equal(found, wanted)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("qkvz", "ba", "options", "message"),
    [
        (
            Quantised(WIDE[0].to(torch.float8_e5m2), torch.ones(QKVZ)),
            WIDE[1],
            {},
            r"values of qkvz must be torch.float8_e4m3fn \(got torch.float8_e5m2\)",
        ),
        (
            Quantised(WIDE[0].to(FP8), torch.ones(QKVZ - 1)),
            WIDE[1],
            {},
            r"scales of qkvz must be torch.float32 of 1 or 80 rows",
        ),
        (
            WIDE[0],
            Quantised(WIDE[1].to(FP8), torch.ones(BA).double()),
            {},
            r"scales of ba must be torch.float32 .*got torch.float64",
        ),
        (
            Quantised(WIDE[0].to(FP8), torch.ones(QKVZ, device="meta")),
            WIDE[1],
            {},
            r"scales of qkvz must be on cpu \(got meta\)",
        ),
        (
            quantised(WIDE[0]),
            quantised(WIDE[1]),
            {},
            "dtype must be given where qkvz and ba are quantised",
        ),
        (
            quantised(WIDE[0]),
            WIDE[1],
            {"dtype": torch.bfloat16},
            r"dtype must be torch.float32 like the weights \(got torch.bfloat16\)",
        ),
        (quantised(WIDE[0][1:]), WIDE[1], {}, r"qkvz must be \[80, 32\]"),
    ],
)
def test_quantised_weights_that_do_not_fit_are_refused(
    qkvz: Weight, ba: Weight, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GatedDeltaNetInputProjection(qkvz, ba, modules=MODULES, num_slots=1, rank=4, **options)


@pytest.mark.parametrize(
    ("changes", "capability", "columns", "expected"),
    [
        ({}, (9, 0), 32, True),
        ({}, (10, 0), 32, True),
        ({"is_cuda": False}, (9, 0), 32, False),
        ({"dtype": torch.float16}, (9, 0), 32, False),
        ({"shape": (0, 32)}, (9, 0), 32, False),
        ({}, (8, 9), 32, False),
        ({}, (9, 0), 24, False),
    ],
)
def test_a_product_runs_in_8_bits_only_where_all_that_it_needs_is_there(
    changes: dict[str, Any],
    capability: tuple[int, int],
    columns: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    given = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (3, columns), "device": "cuda"}
    x: Any = SimpleNamespace(**(given | changes))
    assert products._runs_in_8_bits(x, torch.empty(16, columns, dtype=FP8)) is expected


ON_A_GPU = """
import torch
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.dense.weights import LoRAFactors
from lorakernels.gdn import products
from lorakernels.gdn.forms import GDNForm
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection
from lorakernels.common.quantised import Quantised

def randn(*shape):
    return torch.randn(*shape, device="cuda")

def quantised(weight):
    scales = weight.abs().amax(dim=1) / 448
    return Quantised((weight / scales[:, None]).to(torch.float8_e4m3fn), scales)

def dequantised(weight):
    return weight.values.float() * weight.scales[:, None]

torch.manual_seed(0)
heads = DeltaNetHeads(key_heads=4, value_heads=8, key_size=64, value_size=64)
modules = heads.separate()
wide = [randn(n, 1024) / 30 * torch.logspace(-1, 1, n, device="cuda")[:, None] for n in (1536, 16)]
taken = []
runs = products._runs_in_8_bits
products._runs_in_8_bits = lambda x, w: taken.append(runs(x, w)) or taken[-1]
for dtype in (torch.bfloat16, torch.float16):
    both = quantised(wide[0]), quantised(wide[1])
    mixed = quantised(wide[0]), wide[1].to(dtype)
    for weights, forms in ((both, tuple(GDNForm)), (mixed, (GDNForm.SERIAL, GDNForm.DUAL))):
        layer = GatedDeltaNetInputProjection(
            *weights, modules=modules, num_slots=2, rank=16, dtype=dtype
        )
        layer.load_adapter(1, {
            m.name: LoRAFactors(randn(16, 1024) / 30, randn(m.width, 16), 0.5)
            for m in modules.all
        })
        plain = [dequantised(w) if isinstance(w, Quantised) else w.float() for w in weights]
        workspace = DenseWorkspace([layer.slots], max_tokens=512)
        for rows in (1, 16, 300):
            batch = BatchMetadata(max_tokens=512, max_slots=2, device="cuda")
            x, outs, graphs = randn(rows, 1024).to(dtype), {}, {}
            for form in forms:
                batch.prepare(torch.zeros(rows, dtype=torch.int32))
                layer(x, batch, workspace, form=form)
                torch.cuda.synchronize()
                graphs[form] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[form]):
                    outs[form] = layer(x, batch, workspace, form=form)
            batch.prepare(torch.full((rows,), -1, dtype=torch.int32))
            x.normal_()
            for form in forms:
                graphs[form].replay()
                found = layer(x, batch, workspace, form=form)
                for part, (one, replayed, weight) in enumerate(zip(found, outs[form], plain)):
                    where = f"{dtype}, {rows} rows, {form}, part {part}"
                    assert torch.equal(one, replayed), f"graph differs: {where}"
                    if isinstance(weights[part], Quantised):
                        scales = x.abs().amax(dim=1, keepdim=True).float() / 448
                        rounded = (x.float() / scales).to(torch.float8_e4m3fn).float() * scales
                    else:
                        rounded = x.float()
                    wanted = rounded.double() @ weight.double().T
                    usual = (rounded.double().square() @ weight.double().square().T).sqrt()
                    error = ((one.double() - wanted).abs() / usual).max()
                    assert error < 3e-2, f"an error of {error} of a usual value: {where}"
            batch.prepare(torch.arange(rows, dtype=torch.int32) % 3 - 1)
            for forms_of_kernels in ((GDNForm.SERIAL, GDNForm.DUAL), forms[2:]):
                results = [layer(x, batch, workspace, form=f) for f in forms_of_kernels]
                for other in results[1:]:
                    for one, two in zip(results[0], other):
                        torch.testing.assert_close(one, two, rtol=2e-2, atol=1e-1)
is_hopper = torch.cuda.get_device_capability() >= (9, 0)
assert any(taken) is is_hopper, "the kernel for 8 bits ran nowhere, or where there is none"
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="8-bit products need a GPU")
def test_quantised_products_are_right_on_a_gpu_and_in_its_graphs(
    run_compiled: Callable[[str], None],
) -> None:
    run_compiled(ON_A_GPU)
