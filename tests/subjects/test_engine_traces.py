"""What engines show behind a defect: each module of a right one is within the judge's bound, and
the first one that has no adapter is named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from loragate.engine.bisection import Deviation
from loragate.engine.judge import Judge
from loragate.engine.order import EngineOrder
from loragate.engine.process import EngineProcess
from loragate.engine.requests import Completion
from loragate.engine.world import World, build_world
from loragate.matrix.case import Case, Dtype, Site

pytestmark = pytest.mark.usefixtures("preloaded")

CASE = Case(site=Site.ENGINE, rank=8, slots=2, dtype=Dtype.FP32)
TARGETS = {
    "lorakernels": "loragate.subjects.lorakernels.engine:ServingEngine",
    "transformers": "loragate.subjects.transformers.engine:TransformersEngine",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(CASE, 3, tmp_path_factory.mktemp("world"))


@pytest.fixture(params=TARGETS)
def engine(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[EngineProcess]:
    # the order is for a CPU
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    order = EngineOrder(
        case=CASE,
        model=world.model,
        drafts=None,
        device="cpu",
        max_length=world.max_length,
        max_requests=len(world.batch),
        num_adapters=len(world.adapters),
    )
    target = TARGETS[request.param]
    with EngineProcess(target, order, deadline_s=240.0, log=tmp_path / "engine.log") as started:
        for name, folder in world.adapters.items():
            started.load(name, folder)
        yield started


def test_a_right_engine_shows_right_modules_and_a_wrong_adapter_is_found_in_them(
    world: World, engine: EngineProcess
) -> None:
    judge = Judge(world.model, world.adapters, dtype=world.dtype)
    asked = next(asked for asked in world.batch if asked.request.adapter)
    request = asked.request
    words = world.language.words_after(asked.prompt, asked.speaker, request.new_tokens)
    shown: list[str] = []

    def bisected(adapter: str | None) -> Deviation | None:
        def trace(tokens: Sequence[int], _: str | None) -> dict[str, Tensor]:
            found = engine.trace(tokens, adapter)
            shown[:] = found
            return found

        return judge.bisect(request, Completion(tuple(words)), trace)

    assert bisected(request.adapter) is None
    assert {"model.layers.1.self_attn.v_proj", "model.layers.0.mlp.down_proj"} <= set(shown)
    without = bisected(None)
    assert without is not None
    assert (without.layer, without.module) == (0, "self_attn.q_proj")
