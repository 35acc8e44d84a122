"""The forms of a MoE layer on the streams of a GPU, and in its graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

ON_A_GPU = """
import torch
from unittest.mock import patch
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.layer.forms import MoEForm
from lorakernels.common.quantised import Quantised, quantise_rows
from lorakernels.moe.weights import ExpertFactors
from lorakernels.runtime import streams

EXPERTS, TOP_K, HIDDEN, INTER, RANK, SLOTS, MOST = 8, 2, 512, 384, 16, 3, 1024

def randn(*shape):
    return torch.randn(*shape, device="cuda")

def of_8_bits(weight):
    found = quantise_rows(weight.view(-1, weight.shape[-1]))
    return Quantised(found.values.view(weight.shape), found.scales.view(weight.shape[:-1]))

torch.manual_seed(0)
for quantised in (False, True):
    w13 = (randn(EXPERTS, 2 * INTER, HIDDEN) / 20).bfloat16()
    w2 = (randn(EXPERTS, HIDDEN, INTER) / 20).bfloat16()
    weights = [of_8_bits(w) if quantised else w for w in (w13, w2)]
    layer = FusedMoELoRA(
        *weights, gate_up=GateUp.HALVES, num_slots=SLOTS, rank=RANK, dtype=torch.bfloat16
    )
    for slot in range(SLOTS):
        parts = {}
        for name, deep, wide in (
            ("gate_proj", HIDDEN, INTER), ("up_proj", HIDDEN, INTER), ("down_proj", INTER, HIDDEN)
        ):
            a, b = randn(EXPERTS, RANK, deep) / 20, randn(EXPERTS, wide, RANK) / 4
            parts[f"experts.{name}"] = ExpertFactors(a, b, 0.5 + slot)
        layer.load_adapter(slot, parts)
    sizes = {"max_tokens": MOST, "top_k": TOP_K}
    scratch = MoEScratch([layer], **sizes)
    pairs = PairMetadata(
        **sizes, num_experts=EXPERTS, max_slots=SLOTS, device="cuda", with_base=True
    )
    for rows in (1, 16, 300, 1024):
        batch = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cuda")
        x = randn(rows, HIDDEN).bfloat16()
        ids = torch.rand(rows, EXPERTS, device="cuda").argsort(1)[:, :TOP_K].int().contiguous()
        router = torch.rand(rows, TOP_K, device="cuda")

        def run(form):
            given = quantise_rows(x) if quantised else None
            shared = lambda x: (x * 0.5).sin()
            return layer(
                x, ids, router, batch, pairs, scratch, quantised_x=given, shared=shared, form=form
            )

        def on_one_stream(form):
            with patch.object(streams, "stream_module", lambda device: None):
                return run(form)

        def prepare(step):
            batch.prepare((torch.arange(rows, dtype=torch.int32) * 7 + step) % (SLOTS + 1) - 1)

        outs, graphs = {}, {}
        for form in MoEForm:
            prepare(1)
            run(form)
            torch.cuda.synchronize()
            # nothing but base rows: the graph serves the batches after it, too
            batch.prepare(torch.full((rows,), -1, dtype=torch.int32))
            graphs[form] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[form]):
                outs[form] = run(form)
        for step in range(3):
            prepare(step)
            x.normal_()
            alone = {form: on_one_stream(form) for form in MoEForm}
            where = f"{quantised=} {rows=} {step=}"
            assert not alone[MoEForm.SINGLE].isnan().any(), where
            for form in MoEForm:
                wanted = alone[form]
                if not quantised:
                    # the sums of 8 bits are scaled, and that may be rounded once more
                    assert torch.equal(wanted, alone[MoEForm.SINGLE]), f"{form} {where}: one stream"
                for _ in range(5):
                    assert torch.equal(run(form), wanted), f"{form} {where}: several streams"
                    graphs[form].replay()
                    assert torch.equal(outs[form], wanted), f"{form} {where}: its graph"
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")
def test_all_forms_give_the_same_bits_on_a_gpu_and_in_its_graphs(
    run_compiled: Callable[[str], None],
) -> None:
    run_compiled(ON_A_GPU)
