"""hot_path and inventory of the project's own layers, as they run on this machine: interpreted on
modelled streams, or compiled and captured on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import detect_machine
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.host_work import HostRecorder
from loragate.matrix.case import Case, Dtype, Execution, Mix, Site, Streams
from loragate.oracles import ORACLES
from loragate.protocol import Trial
from loragate.run.trial import load_subject, run_trial

MACHINE = detect_machine()
EXECUTION = Execution.EAGER if MACHINE.device == "cpu" else Execution.GRAPH


def judge(oracle: OracleName, seed: int = 1, **fields: Any) -> Judgement:
    case = Case(
        site=Site.LORA_LINEAR,
        tokens=9,
        in_features=64,
        slices=(32, 16, 16),
        rank=8,
        slots=3,
        dtype=Dtype.BF16,
        mix=Mix.SHUFFLED,
        streams=Streams.DUAL,
        execution=EXECUTION,
        oracles=(oracle,),
        **fields,
    )
    subject, have = load_subject("lorakernels")
    assert not isinstance(have, str)
    trial = Trial(case, subject, have, MACHINE, seed)
    assert ORACLES[oracle].applies(trial) is None
    (judgement,) = run_trial(trial)
    return judgement


@pytest.mark.parametrize("oracle", [OracleName.HOT_PATH, OracleName.INVENTORY])
def test_a_linear_layer_passes(oracle: OracleName) -> None:
    for seed in range(3):
        judgement = judge(oracle, seed)
        assert judgement.verdict is Verdict.PASS, judgement


def test_a_buffer_for_each_call_is_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    from lorakernels.dense import linear

    view: Callable[..., Tensor] = linear.view_shrunk
    monkeypatch.setattr(linear, "view_shrunk", lambda *args: torch.empty_like(view(*args)))
    judgement = judge(OracleName.HOT_PATH)
    assert judgement.failure is Failure.ALLOCATION, judgement


def test_a_table_for_each_step_is_a_moved_buffer_and_dangles_in_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lorakernels.batch.metadata import BatchMetadata

    prepare = BatchMetadata.prepare

    def prepare_anew(metadata: BatchMetadata, *args: Any, **options: Any) -> None:
        metadata.tile_slots = torch.full_like(metadata.tile_slots, -1)
        prepare(metadata, *args, **options)

    monkeypatch.setattr(BatchMetadata, "prepare", prepare_anew)
    judgement = judge(OracleName.HOT_PATH)
    assert judgement.failure is Failure.MOVED_BUFFER, judgement
    assert "tile_slots_ptr" in judgement.message
    assert judge(OracleName.INVENTORY).failure is Failure.WRONG_GRAPH


def test_a_preparation_that_reads_the_device_is_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from lorakernels.batch.metadata import BatchMetadata

    prepare = BatchMetadata.prepare

    def prepare_and_ask(metadata: BatchMetadata, *args: Any, **options: Any) -> None:
        prepare(metadata, *args, **options)
        metadata.num_tiles.item()

    monkeypatch.setattr(BatchMetadata, "prepare", prepare_and_ask)
    judgement = judge(OracleName.HOT_PATH)
    assert judgement.failure is Failure.HOST_WAIT, judgement


def test_a_graph_captured_without_adapters_lacks_their_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lorakernels.batch.steps import base_rows
    from lorakernels.dense import linear

    monkeypatch.setattr(linear, "runs_adapters", lambda tensor, device: base_rows(tensor) is None)
    judgement = judge(OracleName.INVENTORY)
    assert judgement.failure is Failure.WRONG_GRAPH, judgement
    assert "no node is lora_expand_kernel" in judgement.message


def test_a_copy_of_no_elements_waits_for_nothing() -> None:
    pageable, table = torch.zeros(4), torch.empty(0)
    recorder = HostRecorder("cuda", lambda: 0)
    with recorder:
        # an empty table has no memory, the memory behind its source is the host's
        table.copy_(pageable[:0])
    assert recorder.waits == []
