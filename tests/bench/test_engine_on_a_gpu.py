"""`bench engine` with vLLM itself, on models of two layers. Nothing is asserted about times but
that there are some."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loragate.bench import engine
from loragate.bench.contender import Contender
from loragate.bench.engine_rows import Serving, Work, engine_rows
from loragate.bench.graphs_rows import MODELS
from loragate.bench.select import select_rows
from loragate.core.machine import Machine

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("vllm") is None,
    reason="an engine of vLLM needs a GPU and the extra loragate[vllm]",
)


def contender(name: str) -> Contender:
    subject: Any = SimpleNamespace(name=name)
    have: Any = None
    return Contender(subject, have)


@needs_gpu
@pytest.mark.parametrize("model", MODELS)
def test_engines_are_served_by_the_kernels_that_they_are_named_after(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    # other tests of this process may have chosen the interpreter
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(engine, "LAYERS", {model: 2})
    rows = select_rows(engine_rows(), [f"{model}.*"])
    machine = Machine("cuda", torch.cuda.get_device_name(), None, 1, 0)
    found = engine.run_engine(
        contender("lorakernels"), contender("vllm"), rows, machine, lambda line: print(line)
    )
    assert [one.row for one in found.rows] == list(rows)
    assert [one.problem for one in found.engines] == [None] * len(Serving)
    for one in found.rows:
        assert min(one.us.values()) > 0, one
        assert bool(one.replay_us) == (one.row.work is Work.DECODE)
        assert all(us > 0 for us in one.replay_us.values()), one
