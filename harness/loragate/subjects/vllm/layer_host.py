"""What a server of vLLM provides to its layers: configuration, metadata of a step, the context of a
forward pass, and the option for two streams.

vLLM reads the option from the environment when a layer is built, when it runs, and when its kernels
are launched. It is set for each of these by itself, so that instances with one stream and with two
live side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from loragate.inputs.draw import torch_dtype
from loragate.matrix.case import Case, Sharing, Streams
from loragate.subjects.vllm.layer_package import VllmLayers
from loragate.subjects.vllm.package import DUAL_STREAM, environment

# the mapping has the ids of adapters, of which 0 is none; adapter s + 1 is in slot s
_FIRST_ID = 1
# of the embedding, which no layer here has
_VOCABULARY = 1


class LayerHost:
    def __init__(self, package: VllmLayers, case: Case, device: str) -> None:
        self._option = {DUAL_STREAM: str(int(case.streams is Streams.DUAL))}
        self._package, self._slots = package, case.slots
        with environment(self._option):
            self._lora_config = package.config.LoRAConfig(
                max_lora_rank=package.rank_of_buffers(case.rank),
                max_loras=case.slots,
                lora_dtype=torch_dtype(case.dtype),
                enable_moe_shared_loras=case.sharing is Sharing.SHARED_OUTER,
            )
            self._config = self._make_config(device)
            rows = case.max_tokens
            self._wrapper = package.wrapper(rows, rows, device, lora_config=self._lora_config)

    def _make_config(self, device: str) -> Any:
        config = self._package.config
        # what torch.compile would make of a model around the layer is another question
        eager = config.CompilationConfig(mode=config.CompilationMode.NONE)
        return config.VllmConfig(
            device_config=config.DeviceConfig(device=device),
            compilation_config=eager,
            lora_config=self._lora_config,
        )

    @contextmanager
    def configured(self) -> Iterator[None]:
        """Within, vLLM finds the configuration of this server, and the option as it is here."""
        with environment(self._option), self._package.config.set_current_vllm_config(self._config):
            yield

    @contextmanager
    def building(self) -> Iterator[None]:
        """Within, layers are built. Their parameters have no memory: they get that of the base."""
        with self.configured(), torch.device("meta"):
            yield

    def with_adapters(self, layer: Any, names: list[str]) -> Any:
        """The layer by which a server replaces a layer whose slices have these names."""
        with self.configured():
            replaced = self._package.from_layer(layer, self._slots, self._lora_config, names, None)
            assert replaced is not layer, f"vLLM has no adapters for {type(layer).__name__}"
            replaced.set_mapping(self._wrapper)
        return replaced

    def prepare(self, token_slots: Tensor) -> None:
        ids = [slot + _FIRST_ID for slot in token_slots.tolist()]
        mapping = self._package.mapping(ids, ids, is_prefill=True)
        resident: list[int | None] = [slot + _FIRST_ID for slot in range(self._slots)]
        # as its server does, with one more than there are slots
        self._wrapper.update_metadata(mapping, resident, self._slots + 1, _VOCABULARY)

    def host_tensors(self) -> list[Tensor]:
        """What vLLM keeps on the CPU beside every device, and reads in each step."""
        kept = vars(self._wrapper.token_mapping_meta), vars(self._wrapper.prompt_mapping_meta)
        return [meta[name] for meta in kept for name in meta if name.endswith("_cpu")]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, layers run, as in the forward pass of a model."""
        contexts = self._package.forward_context
        # each pass has its own: MoE layers may count in it how many of them have run
        context = contexts.create_forward_context(None, self._config)
        with (
            environment(self._option),
            contexts.override_forward_context(context),
            torch.no_grad(),
        ):
            yield
