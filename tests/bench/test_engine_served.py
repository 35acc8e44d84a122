"""What `bench engine` gives vLLM, and engines of a fake vllm (stubs/engine_vllm)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from loragate.bench import engine
from loragate.bench.contender import Contender, Unavailable
from loragate.bench.engine_figures import KernelCounts
from loragate.bench.engine_folders import model_config, write_adapter, write_model
from loragate.bench.engine_rows import BATCHED_TOKENS, EngineRow, Load, Serving, Work, engine_rows
from loragate.bench.engine_served import TimedEngine
from loragate.bench.engine_setup import arguments_of, order_of
from loragate.bench.graphs_rows import MODELS, ModelShape
from loragate.bench.select import select_rows
from loragate.core.machine import Machine
from loragate.core.verdict import ExitCode
from loragate.engine.process import EngineNotStarted
from loragate.subjects.vllm.engine_arguments import environment
from lorakernels.integrations.vllm.launches import reset_launch_counts

STUB = Path(__file__).parent / "stubs" / "engine_vllm"
US = {"base": 1000.0, "vllm": 1800.0, "lorakernels": 1200.0}
MACHINE = Machine("cuda", "a GPU", (9, 0), 132, 1 << 37)
SMALL = {
    "dense": ModelShape(32, (256, 128, 128), 48),
    "experts": ModelShape(32, (256, 128, 128), 16, experts=4, top_k=2),
}
ATTENTION = {
    "self_attn.q_proj": (256, 32),
    "self_attn.k_proj": (128, 32),
    "self_attn.v_proj": (128, 32),
    "self_attn.o_proj": (32, 256),
}


def mlp(prefix: str, width: int) -> dict[str, tuple[int, int]]:
    names = ("gate_proj", "up_proj", "down_proj")
    sizes = ((width, 32), (width, 32), (32, width))
    return {f"{prefix}.{name}": size for name, size in zip(names, sizes, strict=True)}


LAYER = {
    "dense": ATTENTION | mlp("mlp", 48),
    "experts": ATTENTION
    | {name: size for e in range(4) for name, size in mlp(f"mlp.experts.{e}", 16).items()},
}


@pytest.mark.parametrize("kind", SMALL)
def test_an_adapter_has_factors_of_its_rank_for_every_projection(kind: str, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", SMALL[kind], 2, rank=4)
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    wanted = {}
    for layer in range(2):
        for name, (rows, columns) in LAYER[kind].items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            wanted[f"{prefix}.lora_A.weight"] = (4, columns)
            wanted[f"{prefix}.lora_B.weight"] = (rows, 4)
    assert {name: tuple(value.shape) for name, value in found.items()} == wanted
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert all(bool(value.any()) and value.abs().max() < 0.011 for value in found.values())
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4
    assert config["target_modules"] == [
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    ]


def test_a_model_is_its_configuration_alone(tmp_path: Path) -> None:
    write_model(tmp_path / "model", MODELS["qwen3_8b"], 3)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "generation_config.json"}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    heads = (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
    assert heads == (32, 8, 128)
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (3, 12288)
    experts = model_config(MODELS["qwen3_30b_a3b"], 3)
    assert experts["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (experts["num_experts"], experts["num_experts_per_tok"]) == (128, 8)
    assert (experts["num_key_value_heads"], experts["moe_intermediate_size"]) == (4, 768)


def test_engines_differ_in_the_arguments_of_adapters_alone() -> None:
    order = order_of(Path("folder") / "qwen3_30b_a3b")
    base, vllm, ours = (arguments_of(order, serving) for serving in Serving)
    assert vllm == ours
    assert vllm.keys() - base.keys() == {
        *("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "specialize_active_lora")
    }
    assert {name: vllm[name] for name in base} == base
    assert (vllm["max_loras"], vllm["max_lora_rank"]) == (4, 16)
    assert (vllm["load_format"], vllm["dtype"]) == ("dummy", "bfloat16")
    assert not base["enable_prefix_caching"]
    assert base["compilation_config"] == {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [16, 64],
    }
    # keys and values of 64 requests of 513 tokens, in 16 layers of 4 heads
    assert base["kv_cache_memory_bytes"] == 64 * 1025 * 16 * 2 * 4 * 128 * 2


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes the fake vllm importable, with what it is to do; all that it and an engine
    change is as before afterwards."""
    monkeypatch.syspath_prepend(str(STUB))
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)
    for name in ("CUDAGraph", "Event", "synchronize", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    for name in environment(order_of(Path("qwen3_8b")), plugin=True, process=1):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    # where vLLM is installed, another test may have imported it
    installed = {name: sys.modules.pop(name) for name in modules_of_vllm()}

    def given(**behaviour: Any) -> None:
        monkeypatch.setenv("LORAGATE_STUB", json.dumps({"us": US} | behaviour))

    given()
    reset_launch_counts()
    yield given
    reset_launch_counts()
    for name in modules_of_vllm():
        del sys.modules[name]
    sys.modules.update(installed)


def modules_of_vllm() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "vllm"]


def opened(serving: Serving) -> TimedEngine:
    served = TimedEngine(order_of(Path("qwen3_8b")), serving)
    served.prepare(Path("adapter"), select_rows(engine_rows(), ["qwen3_8b.*"]))
    return served


@pytest.mark.parametrize("serving", Serving)
def test_an_engine_times_its_own_steps_and_counts_whose_kernels_ran(
    stub: Callable[..., None], serving: Serving
) -> None:
    served, us = opened(serving), US[serving]
    decode, _, prefill, whole = select_rows(engine_rows(), ["qwen3_8b.*"])
    counts = served.kernel_counts()
    ours, vllms = serving is Serving.LORAKERNELS, serving is Serving.VLLM
    # one of each load; the dummy run of the start is not counted
    assert (counts.launched["linear"], counts.captured["linear"]) == (7 * ours, ours)
    # the embedding of either is served by a kernel of vLLM
    of_vllm = ours + 2 * vllms
    assert (counts.vllms_launched, counts.vllms_captured) == (7 * of_vllm, of_vllm)
    assert counts.vllms_of_layers == 8 * vllms
    replay = torch.cuda.CUDAGraph.replay
    assert served.measure(decode) == pytest.approx(us)
    assert served.measure(prefill) == pytest.approx(us / BATCHED_TOKENS)
    assert served.measure(whole) == pytest.approx((1e6 + (1 + 63) * us) / 4096)
    assert served.replay_us(decode) == pytest.approx(us)
    # nothing is counted while it is timed
    assert served.kernel_counts().vllms_launched == counts.vllms_launched
    assert torch.cuda.CUDAGraph.replay is replay


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("serving", Serving)
def test_the_requests_of_a_load_are_for_all_adapters_in_turns_and_the_base_where_it_is_served(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = opened(serving)
    asked: list[int | None] = []

    def generate(prompts: object, sampling: object, *, lora_request: Any, **_: object) -> None:
        asked.extend(None if one is None else one.number for one in lora_request)

    monkeypatch.setattr(served._llm, "generate", generate)
    served._seconds(Load(5, 1, 1))
    served._seconds(Load(5, 1, 1, serves_base=True))
    turns = [1, 2, 3, 4, 1, 1, 2, 3, 4, None]
    assert asked == ([None] * 10 if serving is Serving.BASE else turns)


def test_steps_that_are_not_replayed_from_a_graph_are_an_error(stub: Callable[..., None]) -> None:
    stub(graphs=False)
    served = opened(Serving.VLLM)
    with pytest.raises(RuntimeError, match=r"qwen3_8b.decode.b16: 128 steps, but 0 replays"):
        served.replay_us(engine_rows()[0])


def contender(name: str) -> Contender:
    class Named:
        pass

    named: Any = Named()
    named.name = name
    return Contender(named, cast(Any, None))


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LAYERS", {"qwen3_8b": 1})


@pytest.mark.usefixtures("one_layer")
def test_three_engines_in_processes_of_their_own_are_compared(stub: Callable[..., None]) -> None:
    rows, lines = select_rows(engine_rows(), ["qwen3_8b.*"]), list[str]()
    found = engine.run_engine(
        contender("lorakernels"), contender("vllm"), rows, MACHINE, lines.append
    )
    assert [one.row for one in found.rows] == list(rows)
    assert [one.ratio for one in found.rows[:3]] == pytest.approx([0.25] * 3)
    assert found.rows[0].us == pytest.approx(US)
    assert found.rows[1].replay_us == pytest.approx(US)
    assert not found.rows[2].replay_us
    assert [one.serving for one in found.engines] == list(Serving)
    assert all(one.problem is None for one in found.engines)
    assert lines[0] == "qwen3_8b: starting three engines of 1 layers"
    assert "qwen3_8b.decode.b64: base 1000.000 us, vllm 1800.000 us, lorakernels 1200.000 us" in (
        lines
    )


class Started:
    """An engine that was started, what it counted, and how it ended."""

    def __init__(self, counts: KernelCounts | None = None) -> None:
        self.ended: list[type[BaseException] | None] = []
        self.counts = counts

    def kernel_counts(self) -> KernelCounts | None:
        return self.counts

    def __enter__(self) -> Started:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.ended.append(kind)


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[Serving, Started]], str]:
    """What a run says when only these engines can be started, and no time is measured."""
    monkeypatch.setattr(engine, "write_adapter", lambda *_, **__: None)

    def run(engines: dict[Serving, Started]) -> str:
        def start(serving: Serving, *_: object) -> engine._Ready:
            if serving not in engines:
                raise EngineNotStarted("no memory for a cache")
            return engine._Ready(cast(Any, engines[serving]), 1.0)

        monkeypatch.setattr(engine, "_start", start)
        with pytest.raises(Unavailable) as error:
            engine.run_engine(
                contender("lorakernels"), contender("vllm"), engine_rows(), MACHINE, print
            )
        assert error.value.code is ExitCode.INFRASTRUCTURE
        return str(error.value)

    return run


def test_engines_that_run_are_ended_when_another_one_does_not_start(
    refusal: Callable[[dict[Serving, Started]], str],
) -> None:
    base, ours = Started(), Started()
    found = refusal({Serving.BASE: base, Serving.LORAKERNELS: ours})
    assert found == "no memory for a cache"
    assert base.ended == ours.ended == [EngineNotStarted]


def test_an_engine_that_the_plug_in_did_not_serve_is_not_timed(
    stub: Callable[..., None], refusal: Callable[[dict[Serving, Started]], str]
) -> None:
    stub(registers=False)
    engines = {serving: Started(opened(serving).kernel_counts()) for serving in Serving}
    found = refusal(engines)
    assert found.startswith("qwen3_8b, lorakernels: of the plug-in's operator 'linear', 0 calls")
    assert [one.ended for one in engines.values()] == [[Unavailable]] * 3


@pytest.mark.parametrize(
    ("candidate", "baseline", "reason"),
    [
        (contender("vllm"), contender("vllm"), "vllm is no plug-in of vLLM"),
        (contender("lorakernels"), None, "engines are those of vLLM"),
    ],
)
def test_other_subjects_and_a_run_without_vllm_are_refused(
    candidate: Contender, baseline: Contender | None, reason: str
) -> None:
    with pytest.raises(Unavailable, match=reason) as error:
        engine.run_engine(candidate, baseline, engine_rows(), MACHINE, print)
    assert error.value.code is ExitCode.USAGE


class Timed:
    """An engine of which each call takes longer than the one before."""

    def __init__(self, name: Serving, calls: list[tuple[Serving, Work]]) -> None:
        self._name, self._calls = name, calls

    def replay_us(self, row: EngineRow) -> float:
        return 1.0

    def measure(self, row: EngineRow) -> float:
        self._calls.append((self._name, row.work))
        return float(self._calls.count((self._name, row.work)))


def test_engines_take_turns_and_rows_with_prompts_take_more_of_them() -> None:
    rows = [EngineRow("qwen3_8b", work, 8) for work in Work]
    calls: list[tuple[Serving, Work]] = []
    timed = {serving: cast(Any, Timed(serving, calls)) for serving in Serving}
    decode, prefill, serve = engine._time(timed, rows, print)
    order = [serving for serving, _ in calls]
    assert order[:6] == [*Serving, Serving.VLLM, Serving.LORAKERNELS, Serving.BASE]
    assert {work: calls.count((Serving.VLLM, work)) for work in Work} == engine.ROUNDS
    assert decode.us == dict.fromkeys(Serving, 3.0)
    assert prefill.us == serve.us == dict.fromkeys(Serving, 8.0)
