"""What vLLM is asked for in a case. It is not installed everywhere, and runs on a GPU only."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loragate.engine.order import EngineOrder
from loragate.engine.requests import Request
from loragate.matrix.case import Case, Dtype, Site, Streams
from loragate.matrix.engine_case import (
    Graphs,
    Model,
    Prefill,
    PrefixCaching,
    Specialize,
    Speculation,
)
from loragate.protocol import unsupported
from loragate.subjects.vllm import engine
from loragate.subjects.vllm.engine_arguments import engine_arguments, environment
from loragate.subjects.vllm.engine_counts import EngineEvents
from loragate.subjects.vllm.subject import VllmSubject
from loragate.subjects.vllm_lorakernels.subject import VllmLoraKernelsSubject


def order_of(**axes: Any) -> EngineOrder:
    fixed = {"site": Site.ENGINE, "rank": 12, "slots": 3, "dtype": Dtype.BF16}
    return EngineOrder(
        case=Case(**{**fixed, **axes}),
        model=Path("model"),
        drafts=Path("drafts"),
        device="cuda",
        max_length=70,
        max_requests=5,
        num_adapters=4,
    )


def test_a_plain_case_turns_everything_off_that_it_does_not_ask_for() -> None:
    found = engine_arguments(order_of())
    assert found["enforce_eager"] is True
    assert (found["max_loras"], found["max_cpu_loras"], found["max_lora_rank"]) == (3, 4, 16)
    assert not found["enable_prefix_caching"]
    assert not found["enable_chunked_prefill"]
    assert not found["specialize_active_lora"]
    assert found["max_num_batched_tokens"] == 350
    assert not {"speculative_config", "compilation_config"} & found.keys()


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [
        ({"graphs": Graphs.FULL_DECODE}, {"cudagraph_mode": "FULL_DECODE_ONLY"}),
        ({"graphs": Graphs.PIECEWISE}, {"cudagraph_mode": "PIECEWISE"}),
    ],
)
def test_graphs_are_asked_for_by_their_mode(axes: dict[str, Any], wanted: dict[str, str]) -> None:
    found = engine_arguments(order_of(**axes))
    assert found["compilation_config"] == wanted
    assert found["enforce_eager"] is False


def test_each_axis_changes_its_own_argument() -> None:
    plain = engine_arguments(order_of())
    for axes, changed in (
        ({"prefix_caching": PrefixCaching.ON}, {"enable_prefix_caching"}),
        ({"specialize": Specialize.ON}, {"specialize_active_lora"}),
        ({"prefill": Prefill.CHUNKED}, {"enable_chunked_prefill", "max_num_batched_tokens"}),
        ({"speculation": Speculation.NGRAM}, {"speculative_config"}),
        ({"dtype": Dtype.FP16}, {"dtype"}),
        ({"slots": 2}, {"max_loras"}),
        ({"streams": Streams.DUAL}, set()),
    ):
        found = engine_arguments(order_of(**axes))
        differing = {name for name in found if found[name] != plain.get(name)}
        assert differing == changed, axes


@pytest.mark.parametrize(
    ("speculation", "method"),
    [(Speculation.DRAFT_MODEL, "draft_model"), (Speculation.EAGLE, "eagle3")],
)
def test_what_drafts_is_named_by_its_folder(speculation: Speculation, method: str) -> None:
    found = engine_arguments(order_of(speculation=speculation))
    assert found["speculative_config"] == {
        "method": method,
        "model": "drafts",
        "num_speculative_tokens": 3,
    }


def test_layers_that_draft_are_those_of_the_model() -> None:
    found = engine_arguments(order_of(model=Model.HYBRID, speculation=Speculation.MTP))
    assert found["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}


def test_delta_nets_need_no_kernels_that_are_compiled_by_nvcc() -> None:
    assert engine_arguments(order_of(model=Model.HYBRID))["gdn_prefill_backend"] == "triton"
    assert "gdn_prefill_backend" not in engine_arguments(order_of(model=Model.MOE))


@pytest.mark.parametrize("subject", [VllmSubject(), VllmLoraKernelsSubject()], ids=lambda s: s.name)
def test_hybrid_models_are_run_with_mtp_alone_and_without_kept_prefixes(
    subject: VllmSubject | VllmLoraKernelsSubject,
) -> None:
    have = (
        subject.describe(interpreted=False, batch_invariant=False)
        if isinstance(subject, VllmSubject)
        else subject.describe(interpreted=False)
    )
    hybrid = {"model": Model.HYBRID}
    cached = {"prefix_caching": PrefixCaching.ON}
    mtp = {"speculation": Speculation.MTP}
    for served in (hybrid | mtp, cached, {"speculation": Speculation.EAGLE}):
        assert unsupported(order_of(**served).case, have) is None, served
    for axes, reason in (
        (hybrid, "it takes minutes to start with a hybrid model: only cases with mtp are run"),
        (
            hybrid | mtp | cached,
            "it keeps prefixes of delta nets in blocks of several hundred tokens",
        ),
    ):
        assert unsupported(order_of(**axes).case, have) == reason


def test_switches_are_set_before_vllm_is_imported() -> None:
    dual = environment(order_of(streams=Streams.DUAL), plugin=True, process=1)
    assert dual["VLLM_LORA_ENABLE_DUAL_STREAM"] == dual["LORAKERNELS_VLLM"] == "1"
    plain = environment(order_of(), plugin=False, process=1)
    assert plain["VLLM_LORA_ENABLE_DUAL_STREAM"] == plain["LORAKERNELS_VLLM"] == "0"


def test_engines_that_start_at_a_time_take_ports_of_their_own_which_nobody_else_is_given() -> None:
    order, processes = order_of(), range(40_000, 41_000)
    ports = {
        int(environment(order, plugin=True, process=number)["VLLM_PORT"]) for number in processes
    }
    assert len(ports) == len(processes)
    # Linux gives away those from 32768 on; below 1024 one has to be root
    assert min(ports) >= 1024
    assert max(ports) + len(ports) < 32768


def test_the_plug_in_is_registered_before_its_engine_is_made_and_for_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    order = order_of()
    for name in environment(order, plugin=True, process=1):
        monkeypatch.setenv(name, "")
    made = SimpleNamespace(LLM=lambda **_: calls.append("engine"))
    monkeypatch.setitem(sys.modules, "vllm", made)
    monkeypatch.setattr(engine, "register", lambda: calls.append("register"))
    monkeypatch.setattr(engine.EngineEvents, "listen", lambda events: None)
    engine.stock(order)
    assert calls == ["engine"]
    engine.with_plugin(order)
    assert calls == ["engine", "register", "engine"]


def test_models_have_the_same_paths_in_each_trial_and_lie_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []

    def started(*, model: str, speculative_config: dict[str, Any], **_: Any) -> None:
        paths = (model, speculative_config["model"])
        found.append((paths, [Path(path).resolve() for path in paths]))

    # both go back to what they are when the test ends
    monkeypatch.chdir(tmp_path)
    order = order_of(speculation=Speculation.DRAFT_MODEL)
    for name in environment(order, plugin=False, process=1):
        monkeypatch.setenv(name, "")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=started))
    monkeypatch.setattr(engine.EngineEvents, "listen", lambda events: None)
    folders = [tmp_path / trial for trial in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        engine.stock(replace(order, model=folder / "model", drafts=folder / "drafts"))
    assert [paths for paths, _ in found] == [("model", "drafts")] * 2
    assert [real for _, real in found] == [[own / "model", own / "drafts"] for own in folders]


def test_the_probability_of_a_token_is_its_own_and_not_that_of_the_most_likely_one() -> None:
    places = [{5: -0.5}, {7: -1.0, 2: -2.0}, {1: -3.0, 4: -4.0}]
    logprobs = [
        {token: SimpleNamespace(logprob=value) for token, value in place.items()}
        for place in places
    ]
    output = SimpleNamespace(token_ids=[5, 2, 1], logprobs=logprobs)
    assert engine.completion(output, with_logprobs=True).logprobs == (-0.5, -2.0, -3.0)
    for with_logprobs in (True, False):
        assert engine.completion(output, with_logprobs=with_logprobs).tokens == (5, 2, 1)
    without = SimpleNamespace(token_ids=[5, 2, 1], logprobs=None)
    assert engine.completion(without, with_logprobs=False).logprobs is None


class Asked:
    """Stands for vLLM: notes the parameters of requests, and answers each with its prompt."""

    def __init__(self, **_: Any) -> None:
        self.parameters: list[SimpleNamespace] = []

    def generate(
        self, prompts: list[dict[str, list[int]]], parameters: list[SimpleNamespace], **_: Any
    ) -> list[SimpleNamespace]:
        self.parameters = parameters
        answers = (prompt["prompt_token_ids"] for prompt in prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=own)]) for own in answers]


def test_each_request_has_its_own_limit_and_tokens_that_end_it_and_no_other_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, served = order_of(), Asked()
    for name in environment(order, plugin=False, process=1):
        monkeypatch.setenv(name, "")
    fake = SimpleNamespace(LLM=lambda **_: served, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(engine.EngineEvents, "listen", lambda events: None)
    requests = [Request((3, 4), None, 5, stop=(7, 8)), Request((6,), None, 1)]
    answers = engine.stock(order).generate(requests)
    assert [answer.tokens for answer in answers] == [(3, 4), (6,)]
    asked = [(own.max_tokens, own.stop_token_ids) for own in served.parameters]
    assert asked == [(5, [7, 8]), (1, [])]
    assert all(own.ignore_eos and own.temperature == 0 for own in served.parameters)


class Served:
    """Stands for vLLM: notes the adapters that it is to load, and has workers that count."""

    def __init__(self) -> None:
        self.loaded: list[tuple[int, str, bool]] = []
        self.removed: list[int] = []
        self.llm_engine = SimpleNamespace(add_lora=self._add, remove_lora=self.removed.append)

    def _add(self, one: Any) -> None:
        self.loaded.append((one.lora_int_id, one.lora_path, one.load_inplace))

    def get_metrics(self) -> list[Any]:
        return []

    def collective_rpc(self, method: object) -> list[tuple[int, int]]:
        return [(3, 1), (2, 1)]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served()
    for name in environment(order_of(), plugin=False, process=1):
        monkeypatch.setenv(name, "")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **_: served))
    monkeypatch.setitem(sys.modules, "vllm.lora", SimpleNamespace())
    request = SimpleNamespace(LoRARequest=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    monkeypatch.setattr(engine, "register", lambda: None)
    monkeypatch.setattr(engine.EngineEvents, "listen", lambda events: None)
    return served


def test_an_adapter_that_is_loaded_again_keeps_its_number_and_replaces_itself(
    served: Served,
) -> None:
    stock = engine.stock(order_of())
    stock.load("one", Path("a"))
    stock.load("other", Path("b"))
    stock.load("one", Path("c"))
    stock.unload("one")
    stock.load("one", Path("a"))
    assert served.loaded == [(1, "a", False), (2, "b", False), (1, "c", True), (1, "a", False)]
    assert served.removed == [1]


@pytest.mark.parametrize(
    ("plugin", "counts", "others"), [(False, (7, 4), (0, 0)), (True, (5, 2), (6, 3))]
)
def test_launches_are_those_of_the_kernels_that_serve_the_engine(
    plugin: bool, counts: tuple[int, int], others: tuple[int, int], served: Served
) -> None:
    started = (engine.with_plugin if plugin else engine.stock)(order_of())
    kernels = started._events.kernels
    kernels.launched, kernels.captured = 7, 4
    kernels.of_layers.launched, kernels.of_layers.captured = 6, 3
    found = started.counts()
    assert (found.kernels_launched, found.kernels_captured) == counts
    assert (found.others_launched, found.others_captured) == others


def test_the_subject_of_the_plug_in_serves_engines_on_a_gpu() -> None:
    case, subject = order_of().case, VllmLoraKernelsSubject()
    assert unsupported(case, subject.describe(interpreted=False)) is None
    assert unsupported(case, subject.describe(interpreted=True)) == "vLLM's engine needs a GPU"
    module, _, name = subject.engine_target(case).partition(":")
    assert getattr(sys.modules[module], name) is engine.with_plugin


def test_replays_and_launches_of_kernels_of_adapters_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooks = pytest.importorskip("triton").knobs.HookChain()
    monkeypatch.setattr("triton.knobs.runtime.launch_enter_hook", hooks)
    replayed: list[object] = []
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    graphs = type("CUDAGraph", (), {"replay": replayed.append})
    monkeypatch.setattr("torch.cuda.CUDAGraph", graphs)
    events = EngineEvents()
    events.listen()
    graph = graphs()
    graph.replay()
    graph.replay()
    assert replayed == [graph, graph]
    for name in ("_lora_shrink_kernel", "_fused_moe_lora_kernel", "fused_moe_kernel", "_topk"):
        hooks(SimpleNamespace(get=lambda name=name: {"name": name}))
    assert (events.replays, events.kernels.launched, events.kernels.captured) == (2, 2, 0)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    hooks(SimpleNamespace(get=lambda: {"name": "_lora_expand_kernel"}))
    assert (events.kernels.launched, events.kernels.captured) == (2, 1)
    # the product with B alone may be that of an embedding
    of_layers = events.kernels.of_layers
    assert (of_layers.launched, of_layers.captured) == (2, 0)
    hooks(SimpleNamespace(get=lambda: {"name": "_fused_moe_lora_kernel"}))
    assert (events.kernels.captured, of_layers.captured) == (2, 1)
