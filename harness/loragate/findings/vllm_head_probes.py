"""Probes of vLLM's embedding and output layers with adapters, and of adapters that are set in some
layers only.

Base weights are zero and factors constant, so that a row shows the delta that it got. Adapter n,
which is in slot n - 1, has factors of n: its delta is the rank times n squared, by the definition
of LoRA.

Invariant: as in vllm_dense_probes.py. A row of a mapping that has an adapter is a row of the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loragate.findings.ledger import Observation
from loragate.findings.probing import Probe, layer_probe, seen
from loragate.findings.vllm_adapter_probes import slot_manager
from loragate.subjects.vllm.layer_package import VllmLayers

_RANK, _SIZE, _VOCABULARY, _SLOTS = 8, 16, 64, 2
_LAYERS = ("q_proj", "k_proj", "v_proj")


def embedding_of_transformers_takes_one_adapter(layers: VllmLayers, device: str) -> Observation:
    backend: Any = layers.module("model_executor.models.transformers.base").Base
    host = _Host.of(layers, device)
    embedding = host.embedding()
    adapters = (1, 1, 2, 2)
    host.prepare(adapters, (1, 2))
    model = SimpleNamespace(
        pp_group=SimpleNamespace(is_first_rank=True, is_last_rank=True),
        # all that a model of transformers does before its first layer
        model=lambda *, input_ids, **_: (embedding(input_ids),),
        attention_instances={},
        _output_aux_hidden_states_kwargs={},
    )
    tokens = torch.arange(len(adapters), device=device)
    found = _of_rows(backend.forward(model, tokens, tokens))
    right = [_delta(n) for n in adapters]
    text = (
        f"embeddings of two tokens of adapter 1 and two of adapter 2 are {found} where {right} is "
        f"right; the layer by itself gives {_of_rows(embedding(tokens))}"
    )
    return seen(found != right, text)


def prompt_scores_take_adapters_of_samples(layers: VllmLayers, device: str) -> Observation:
    host = _Host.of(layers, device)
    logits, lengths, numbers = host.logits(), (3, 3), (2, 1)
    host.prepare(np.repeat(numbers, lengths).tolist(), numbers)
    scores = _prompt_scores(layers, logits, lengths, device)
    # the last row of a prompt is that of the sample
    right = {
        f"adapter {n}": [_delta(n)] * (length - 1)
        for n, length in zip(numbers, lengths, strict=True)
    }
    found = {f"adapter {n}": scores[row] for row, n in enumerate(numbers)}
    text = f"logits of the tokens of two prompts are {_listed(found)}; right are {_listed(right)}"
    return seen(found != right, text)


def embedded_tokens_take_adapters_of_prompt_embeds(layers: VllmLayers, device: str) -> Observation:
    kind: Any = layers.module("v1.worker.gpu_model_runner").GPUModelRunner
    host = _Host.of(layers, device)
    embedding = host.embedding()
    # two rows of embeddings that a client gave and that have adapter 1, then three tokens without
    adapters, is_token = (1, 1, 0, 0, 0), np.array([False] * 2 + [True] * 3)
    host.prepare(adapters, (1, 0))
    runner = _runner_with_prompt_embeds(embedding, is_token, device)
    step = SimpleNamespace(total_num_scheduled_tokens=len(adapters))
    embedded = kind._preprocess(runner, step, len(adapters))[1]
    found = _of_rows(embedded)[int(np.argmax(is_token)) :]
    text = (
        f"three tokens of the base model, behind two rows of prompt embeddings with adapter 1, get "
        f"deltas of {found}; adapter 1 has {_delta(1)}"
    )
    return seen(any(found), text)


def failed_reload_is_served(layers: VllmLayers, device: str) -> Observation:
    host, manager = _Host.of(layers, device), slot_manager(layers, slots=1)
    manager.modules, manager.is_pooling_model = host.linears(), False
    worker = _worker(layers, manager, {False: _adapter(layers, 1), True: _misfit(layers, 2)})
    loaded = SimpleNamespace(lora_int_id=1, load_inplace=False)
    worker.add_adapter(loaded)
    try:
        worker.add_adapter(SimpleNamespace(lora_int_id=1, load_inplace=True))
    except (RuntimeError, ValueError):
        pass
    else:
        return seen(False, "an adapter with factors that are too large is accepted")
    # what a worker does for the next request that names the adapter
    worker.add_adapter(loaded)
    slot = manager.lora_index_to_id.index(1)
    found = {
        name: sorted({*layer.lora_b_stacked[0][slot].flatten().tolist()})
        for name, layer in manager.modules.items()
    }
    text = (
        f"after a reload in place that failed in {_LAYERS[1]}, B of the adapter that the next "
        f"request gets is {_listed(found)}; it was 1 before, and was to be 2"
    )
    return seen(len(set(map(str, found.values()))) > 1, text)


HEAD_PROBES: dict[str, Probe] = {
    "transformers-embedding-takes-one-adapter": layer_probe(
        embedding_of_transformers_takes_one_adapter
    ),
    "prompt-logprobs-take-adapters-of-samples": layer_probe(prompt_scores_take_adapters_of_samples),
    "prompt-embeds-shift-adapters-of-tokens": layer_probe(
        embedded_tokens_take_adapters_of_prompt_embeds
    ),
    "failed-reload-is-served": layer_probe(failed_reload_is_served),
}


@dataclass(frozen=True, slots=True)
class _Host:
    """A server's configuration, and what its layers read of a step."""

    layers: VllmLayers
    device: str
    lora: Any
    wrapper: Any

    @classmethod
    def of(cls, layers: VllmLayers, device: str) -> _Host:
        lora = layers.config.LoRAConfig(
            max_lora_rank=layers.rank_of_buffers(_RANK),
            max_loras=_SLOTS,
            lora_dtype=torch.float16,
        )
        return cls(layers, device, lora, layers.wrapper(64, 64, device, lora_config=lora))

    def embedding(self) -> Any:
        """The input embedding, with both adapters."""
        vocabulary: Any = self.layers.module("model_executor.layers.vocab_parallel_embedding")
        with self._building():
            plain = vocabulary.VocabParallelEmbedding(_VOCABULARY, _SIZE)
            plain.weight.data.zero_()
            layer = self.layers.from_layer(plain, _SLOTS, self.lora, [], None)
        return self._loaded(layer, _VOCABULARY, _SIZE)

    def logits(self) -> Any:
        """The output layer, with both adapters: a function of hidden states."""
        vocabulary: Any = self.layers.module("model_executor.layers.vocab_parallel_embedding")
        processor: Any = self.layers.module("model_executor.layers.logits_processor")
        with self._building():
            head = vocabulary.ParallelLMHead(_VOCABULARY, _SIZE)
            head.weight.data.zero_()
            layer = self.layers.module("lora.utils").from_layer_logits_processor(
                processor.LogitsProcessor(_VOCABULARY), head, _SLOTS, self.lora, None
            )
        layer = self._loaded(layer, _SIZE, _VOCABULARY)
        return lambda hidden: layer(head, hidden)

    def linears(self) -> dict[str, Any]:
        """Linear layers whose slots are empty."""
        with self._building():
            plain = {
                name: self.layers.linear.ReplicatedLinear(_SIZE, _SIZE, bias=False, prefix=name)
                for name in _LAYERS
            }
            return {
                name: self.layers.from_layer(layer, _SLOTS, self.lora, [], None)
                for name, layer in plain.items()
            }

    def prepare(self, of_rows: Sequence[int], of_samples: Sequence[int]) -> None:
        """A step whose rows, and whose samples, have these adapters; 0 is none."""
        mapping = self.layers.mapping(tuple(of_rows), tuple(of_samples), is_prefill=True)
        resident: list[int | None] = [slot + 1 for slot in range(_SLOTS)]
        self.wrapper.update_metadata(mapping, resident, _SLOTS + 1, _VOCABULARY)

    def _loaded(self, layer: Any, inputs: int, outputs: int) -> Any:
        for slot in range(_SLOTS):
            layer.set_lora(slot, *_factors(slot + 1, inputs, outputs))
        layer.set_mapping(self.wrapper)
        return layer

    @contextmanager
    def _building(self) -> Iterator[None]:
        config, dtype = self.layers.config, torch.get_default_dtype()
        server = config.VllmConfig(
            device_config=config.DeviceConfig(device=self.device),
            compilation_config=config.CompilationConfig(mode=config.CompilationMode.NONE),
            lora_config=self.lora,
        )
        torch.set_default_dtype(torch.float16)
        try:
            with config.set_current_vllm_config(server), torch.device(self.device):
                yield
        finally:
            torch.set_default_dtype(dtype)


def _factors(number: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    a = torch.full((_RANK, inputs), number, dtype=torch.float16)
    return a, torch.full((outputs, _RANK), number, dtype=torch.float16)


def _delta(number: int) -> float:
    """What an adapter adds to each number of a row."""
    return float(_RANK * number * number)


def _of_rows(x: Tensor) -> list[float]:
    """The first number of each row."""
    return [float(value) for value in x[:, 0]]


def _listed(found: dict[str, list[float]]) -> str:
    return ", ".join(f"{values} of {name}" for name, values in found.items())


def _runner_with_prompt_embeds(embedding: Any, is_token: NDArray[np.bool_], device: str) -> Any:
    """What a model runner reads to embed the tokens of a step; its other rows are zero."""
    rows = len(is_token)
    given = torch.zeros(rows, _SIZE, dtype=torch.float16, device=device)
    return SimpleNamespace(
        model_config=SimpleNamespace(is_encoder_decoder=False),
        speculative_config=None,
        supports_mm_inputs=False,
        enable_prompt_embeds=True,
        is_token_ids=SimpleNamespace(np=is_token, gpu=torch.from_numpy(is_token).to(device)),
        input_ids=SimpleNamespace(gpu=torch.arange(rows, device=device)),
        inputs_embeds=SimpleNamespace(gpu=given),
        model=SimpleNamespace(embed_input_ids=lambda input_ids: embedding(input_ids)),
        device=device,
        uses_mrope=False,
        uses_xdrope_dim=0,
        positions=torch.arange(rows, device=device),
        _init_model_kwargs=dict,
    )


def _prompt_scores(
    layers: VllmLayers, logits: Any, lengths: Sequence[int], device: str
) -> list[list[float]]:
    """For each prompt the logits of its tokens, in a step of whole prompts that ask for these."""
    worker = layers.module("v1.worker.gpu.sample.prompt_logprob").PromptLogprobsWorker(
        len(lengths), "raw_logits"
    )
    rows, total = np.arange(len(lengths)), sum(lengths)
    names = [f"request {row}" for row in rows]
    for row, name in enumerate(names):
        worker.add_request(name, row, SimpleNamespace(prompt_logprobs=0))
    starts, zeros = np.cumsum([0, *lengths], dtype=np.int32), np.zeros(len(lengths), dtype=np.int32)
    batch = SimpleNamespace(
        req_ids=names,
        idx_mapping=torch.from_numpy(rows).to(device),
        idx_mapping_np=rows,
        num_scheduled_tokens=np.array(lengths),
        num_tokens=total,
        query_start_loc=torch.from_numpy(starts).to(device),
        query_start_loc_np=starts,
        num_computed_prefill_tokens_np=zeros,
        prefill_len_np=np.array(lengths),
    )
    hidden = torch.zeros(total, _SIZE, dtype=torch.float16, device=device)
    hidden[:, 0] = 1
    tokens = torch.zeros(len(lengths), max(lengths) + 1, dtype=torch.int32, device=device)
    computed = torch.from_numpy(zeros).to(device)
    step = (logits, hidden, batch, tokens, computed, np.array(lengths))
    found = worker.compute_prompt_logprobs(*step)
    return [_of_rows(found[name].logprobs) for name in names]


def _worker(layers: VllmLayers, manager: Any, adapters: dict[bool, Any]) -> Any:
    """What loads adapters for a worker: one by a first load, the other by a reload in place."""
    kind = layers.module("lora.worker_manager").LRUCacheWorkerLoRAManager
    worker = kind.__new__(kind)
    worker._adapter_manager = manager
    worker._load_adapter = lambda request: adapters[request.load_inplace]
    return worker


def _adapter(layers: VllmLayers, number: int) -> Any:
    """Adapter 1, with the factors of a number."""
    weights = layers.module("lora.lora_weights").LoRALayerWeights
    own = _factors(number, _SIZE, _SIZE)
    factors = {name: weights(name, _RANK, _RANK, *own) for name in _LAYERS}
    return layers.module("lora.lora_model").LoRAModel(1, _RANK, factors)


def _misfit(layers: VllmLayers, number: int) -> Any:
    """The same, but for a model whose second layer is wider."""
    adapter = _adapter(layers, number)
    adapter.loras[_LAYERS[1]].lora_b = _factors(number, _SIZE, 2 * _SIZE)[1]
    return adapter
