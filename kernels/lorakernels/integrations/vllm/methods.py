"""What the plug-in changes of vLLM's wrapper around its LoRA kernels.

The methods that layers call and `update_metadata`, with the names and parameters of vLLM; all else
is inherited. They are in a class without that base, which tests put before another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lorakernels.integrations.vllm.adoption import MAX_SLICES, Adoption
from lorakernels.integrations.vllm.declaration import DECLARATION, runs_adapters
from lorakernels.integrations.vllm.experts import ExpertDeltas
from lorakernels.integrations.vllm.launches import Operator
from lorakernels.integrations.vllm.linear import add_linear_delta
from lorakernels.integrations.vllm.tables import StepTables
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.runtime.device import keep_address
from lorakernels.runtime.streams import is_capturing


class LoraKernelsMethods:
    """Goes before `PunicaWrapperGPU` among the bases of a class. Serves the layers that
    `adoption.adopt` has adopted; others must get `stock`. refusal: why all must, or None."""

    refusal: str | None = None

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)  # type: ignore[call-arg]
        config = kwargs["lora_config"]
        sizes = {"max_tokens": max_num_batched_tokens, "max_slots": config.max_loras}
        self.token_step = StepTables(**sizes, device=device)
        self.sample_step = StepTables(**sizes, device=device)
        self.adoption = Adoption()
        self._sizes, self._place = sizes, torch.device(device)
        self._experts: dict[tuple[int, int], ExpertDeltas] = {}
        values = config.max_loras * MAX_SLICES
        ranks = torch.empty(values, dtype=torch.int32, device=device)
        scales = torch.empty(values, dtype=torch.float32, device=device)
        self._rank, self._constants = (
            config.max_lora_rank,
            (keep_address(ranks), keep_address(scales)),
        )
        self._fill_constants()

    def _fill_constants(self) -> None:
        """Every slot has all ranks of the buffers, and its scale is in B."""
        ranks, scales = self._constants
        ranks.fill_(self._rank)
        scales.fill_(1)

    @property
    def stock(self) -> Any:
        """vLLM's own wrapper with the state of this one."""
        classes = type(self).__mro__
        base = classes[classes.index(LoraKernelsMethods) + 1]
        wrapper: Any = object.__new__(base)
        wrapper.__dict__ = self.__dict__
        return wrapper

    def reserve_experts(self, *, top_k: int, num_experts: int) -> ExpertDeltas:
        """What serves the MoE layers of these sizes, with its tables. ValueError where there is
        none yet and a graph is captured, whose pool would hold them."""
        known = self._experts.get((top_k, num_experts))
        if known is not None:
            return known
        if is_capturing(self._place):
            raise ValueError(
                f"topk_ids and lora_a_stacked must be of {self._reserved} while a CUDA graph is "
                f"captured (got {_sizes_of_experts(top_k, num_experts)})"
            )
        sizes = {"top_k": top_k, "num_experts": num_experts, **self._sizes}
        pairs = PairMetadata(**sizes, device=self._place)
        made = self._experts[top_k, num_experts] = ExpertDeltas(pairs, self._constants)
        return made

    def update_metadata(
        self,
        mapping: Any,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        base: Any = super()
        base.update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        DECLARATION.mapping_installed(*map(self._no_lora, (Operator.LINEAR, Operator.LOGITS)))
        # a server that wakes up may have lost what its memory held
        self._fill_constants()
        state: Any = self
        # also for a mapping without adapters: a graph with adapters may be replayed for it
        self.token_step.prepare(state.token_lora_indices)
        self.sample_step.prepare(state.sampler_indices)
        self.adoption.log_once()

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        _check_scale(scale)
        if len(lora_b_stacked) == 1 and y.dtype != lora_b_stacked[0].dtype:
            # such as the scores of a router, in a higher precision than the adapters'
            base: Any = super()
            base.add_lora_linear(
                *(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices),
                buffer=buffer,
                **kwargs,
            )
            return
        # `add_inputs` is not looked at: layers that do not add hand in zeros
        self._add_delta(
            Operator.LINEAR,
            self.token_step,
            _rows(y),
            _rows(x),
            lora_a_stacked[0],
            lora_b_stacked[0],
            list(output_slices),
        )

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        *,
        buffer: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        _check_scale(scale)
        if y.dtype != lora_b_stacked.dtype:
            # logits of a higher precision than the adapters'
            base: Any = super()
            base.add_lora_logits(
                y, x, lora_a_stacked, lora_b_stacked, scale, buffer=buffer, **kwargs
            )
            return
        # behind them are logits of padding of the vocabulary
        width = lora_b_stacked.shape[2]
        self._add_delta(
            *(Operator.LOGITS, self.sample_step, _rows(y)[:, :width], _rows(x)),
            *(lora_a_stacked, lora_b_stacked, [width]),
        )

    def add_lora_w13(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None,
        w1: Tensor,
        w2: Tensor,
        num_tokens: int,
        top_k_num: int,
        max_loras: int,
        adapter_enabled: Tensor,
        local_num_experts: int,
        top_k: int,
        num_slices: int,
        fully_sharded: bool,
        use_tuned_config: bool,
        add_inputs: bool = True,
        token_lora_mapping: Tensor | None = None,
    ) -> tuple[None, None, None, None]:
        _check_absent("expert_map", expert_map)
        _check_absent("token_lora_mapping", token_lora_mapping)
        if self._runs_experts(x):
            # layers may route to more experts of a token than they said when they were adopted
            experts = self.reserve_experts(
                top_k=topk_ids.shape[1], num_experts=lora_a_stacked[0].shape[1]
            )
            experts.prepare(topk_ids, self.token_step.row_slots)
            experts.add(
                *(y, x, lora_a_stacked, lora_b_stacked),
                router_weights=None,
                add_inputs=add_inputs,
            )
        # vLLM hands on to w2 what its own kernels would need
        return None, None, None, None

    def add_lora_w2(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        topk_weights: Tensor,
        sorted_token_ids_lora: Tensor | None,
        expert_ids_lora: Tensor | None,
        num_tokens_post_padded_lora: Tensor | None,
        token_lora_mapping: Tensor | None,
        num_tokens: int,
        w1: Tensor,
        w2: Tensor,
        top_k_num: int,
        max_loras: int,
        adapter_enabled: Tensor,
        top_k: int,
        fully_sharded: bool,
        tp_rank: int,
        use_tuned_config: bool,
        add_inputs: bool = True,
    ) -> None:
        if self._runs_experts(x):
            experts = self.experts_of(topk_weights.shape[1], lora_a_stacked)
            experts.add(
                *(y, x, lora_a_stacked, lora_b_stacked),
                router_weights=topk_weights.float().contiguous(),
                add_inputs=add_inputs,
            )

    def _add_delta(
        self,
        operator: Operator,
        step: StepTables,
        y: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        slice_widths: list[int],
    ) -> None:
        add_linear_delta(
            *(x, a, b, slice_widths, *self._constants),
            *(step, self._no_lora(operator), y, operator),
        )

    def _no_lora(self, operator: Operator) -> Tensor:
        state: Any = self
        is_logits = operator is Operator.LOGITS
        meta = state.prompt_mapping_meta if is_logits else state.token_mapping_meta
        flag: Tensor = meta.no_lora_flag_cpu
        return flag

    def _runs_experts(self, x: Tensor) -> bool:
        return runs_adapters(Operator.EXPERTS, x.device, self._no_lora(Operator.EXPERTS))

    def experts_of(self, top_k: int, a: Sequence[Tensor]) -> ExpertDeltas:
        """What was reserved for layers of these experts. ValueError where nothing was."""
        found = self._experts.get((top_k, a[0].shape[1]))
        if found is None:
            raise ValueError(
                f"topk_weights and lora_a_stacked must be of {self._reserved}, as w13 was "
                f"(got {_sizes_of_experts(top_k, a[0].shape[1])})"
            )
        return found

    @property
    def _reserved(self) -> str:
        """The sizes of experts that have tables, in words."""
        return (
            " or ".join(_sizes_of_experts(*sizes) for sizes in self._experts) or "an adopted layer"
        )


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])


def _sizes_of_experts(top_k: int, num_experts: int) -> str:
    return f"top {top_k} of {num_experts} experts"


def _check_absent(name: str, given: Tensor | None) -> None:
    """What vLLM has for experts or rows elsewhere alone, whose layers are not adopted."""
    if given is not None:
        raise ValueError(
            f"{name} must be None, since layers with experts or rows of other ranks keep vLLM's "
            f"kernels "
            f"(got a tensor of shape {list(given.shape)})"
        )


def _check_scale(scale: float) -> None:
    if scale != 1.0:
        raise ValueError(f"scale must be 1, since it is in B (got {scale})")
