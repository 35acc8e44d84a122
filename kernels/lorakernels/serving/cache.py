"""The static cache of a decoder: a line for each request, which holds its keys and values, or the
state of its gated delta nets.

Row i of a decode step is line i, so a step reads and writes views and gathers nothing. Each line
has a length of its own: key and value of position p are entry p of the line, whatever the prompts
beside it were padded to.

Invariant: all memory is allocated at once and never moves. A line is emptied before a prompt is
written, so that nothing of an earlier request is in it: attention multiplies what it masks by
zero, and zero times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionLayer, StaticLayer

# with 5.17 the tokens of models with delta nets are wrong, without an error
_OLDEST = Version("5.23")


@dataclass(slots=True)
class _Pass:
    """What the next forward pass of the model is, for all layers: prompts that go into the lines
    from `first` on, or tokens of each of the first lines. Exactly one has a value."""

    first: int = 0
    # of the prompts, which are padded on the left
    lengths: tuple[int, ...] | None = None
    # int64 [requests, tokens]
    positions: Tensor | None = None

    @property
    def lines(self) -> slice:
        if self.lengths is not None:
            return slice(self.first, self.first + len(self.lengths))
        return slice(0, self.entries.shape[0])

    @property
    def entries(self) -> Tensor:
        """The entries of each line that a decode step writes, [requests, 1, tokens, 1]."""
        assert self.positions is not None, "a pass is declared before the model is called"
        return self.positions[:, None, :, None]


class KeyValueLines(StaticLayer):  # type: ignore[misc]
    """keys and values [lines, heads, length, head size] of one layer."""

    def __init__(self, length: int, current: _Pass) -> None:
        super().__init__(max_cache_len=length)
        self._current = current

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """key_states and value_states [rows, heads, tokens, head size] of this pass -> those that
        its tokens may attend to: of a prompt, its own."""
        lines, lengths = self._current.lines, self._current.lengths
        for held, states in ((self.keys, key_states), (self.values, value_states)):
            if lengths is None:
                held[lines].scatter_(2, self._current.entries.expand_as(states), states)
                continue
            held[lines].zero_()
            for line, length, prompt in zip(held[lines], lengths, states, strict=True):
                line[:, :length].copy_(prompt[:, -length:])
        if lengths is None:
            return self.keys[lines], self.values[lines]
        return key_states, value_states


class DeltaNetLines(LinearAttentionLayer):  # type: ignore[misc]
    """conv_states [lines, channels, kernel size] and recurrent_states [lines, value heads, key
    size, value size] in fp32, of one layer."""

    def __init__(self, current: _Pass) -> None:
        super().__init__()
        self._current = current

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """conv_states [prompts, channels, tokens], zero where a prompt is padded. The tokens of a
        decode step update the state in place and do not come here."""
        held = self.conv_states[state_idx][self._current.lines]
        missing = max(held.shape[-1] - conv_states.shape[-1], 0)
        held.copy_(F.pad(conv_states, (missing, 0))[..., -held.shape[-1] :])
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        held: Tensor = self.recurrent_states[state_idx][self._current.lines]
        return held.copy_(recurrent_states)


class RequestCache(Cache):  # type: ignore[misc]
    """The lines of all layers of a model, and which of them the next forward pass uses.

    Raises ValueError for a model whose attention is neither full nor that of a gated delta net, and
    for one with delta nets where transformers is older than they need.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        num_lines: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._current = _Pass()
        layers: list[KeyValueLines | DeltaNetLines] = []
        for kind in layer_types(config):
            if kind == "full_attention":
                heads, size = config.num_key_value_heads, config.head_dim
                # without a token: only the sizes are read
                states = torch.empty(num_lines, heads, 0, size, dtype=dtype, device=device)
                layers.append(KeyValueLines(length, self._current))
                layers[-1].lazy_initialization(states, states)
            else:
                layers.append(DeltaNetLines(self._current))
                layers[-1].lazy_initialization(*_delta_net_states(config, num_lines, dtype, device))
        super().__init__(layers=layers)
        self.num_lines, self.length = num_lines, length

    @property
    def num_bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for held in self.layers for x in _tensors(held))

    def begin_prompts(self, first: int, lengths: Sequence[int]) -> None:
        """The next pass is of prompts of these lengths, padded on the left to the longest, which
        go into the lines from `first` on."""
        self._current.first, self._current.lengths = first, tuple(lengths)
        self._current.positions = None

    def begin_step(self, positions: Tensor) -> None:
        """The next pass is of as many tokens for each of the first lines. positions: int64
        [requests, tokens], on the device; how many tokens the line holds before each of them.

        What a line holds behind such a token is not read by it, and is overwritten by the tokens
        that come there: a draft that was rejected needs no other undoing. A delta net takes one
        token at a time, because its state cannot be taken back."""
        self._current.positions, self._current.lengths = positions, None

    def move(self, source: int, target: int) -> None:
        """Put the request of a line into another line."""
        for held in self.layers:
            for tensor in _tensors(held):
                tensor[target].copy_(tensor[source])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The states of the lines of this pass, to be updated in place; None before a prompt."""
        return self._state(self.layers[layer_idx].conv_states[state_idx])

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The states of the lines of this pass; None before a prompt."""
        return self._state(self.layers[layer_idx].recurrent_states[state_idx])

    def _state(self, held: Tensor) -> Tensor | None:
        # a prompt begins with the state of no token
        return held[self._current.lines] if self._current.lengths is None else None


def old_transformers() -> str | None:
    """Why delta nets cannot be served with the installed transformers, if they cannot."""
    if Version(transformers.__version__) >= _OLDEST:
        return None
    return (
        f"transformers must be {_OLDEST} or newer for models with delta nets, whose states older "
        f"ones keep otherwise (got {transformers.__version__})"
    )


def layer_types(config: PreTrainedConfig) -> list[str]:
    """full_attention or linear_attention for each layer. ValueError for anything else, and for
    delta nets where transformers is older than they need."""
    window = getattr(config, "sliding_window", None)
    if window is not None:
        raise ValueError(f"sliding_window must be None (got {window})")
    kinds = getattr(config, "layer_types", None)
    found = ["full_attention"] * config.num_hidden_layers if kinds is None else list(kinds)
    for kind in found:
        if kind not in ("full_attention", "linear_attention"):
            raise ValueError(
                f"layer_types may have full_attention and linear_attention (got {kind})"
            )
    if "linear_attention" in found and (reason := old_transformers()):
        raise ValueError(reason)
    return found


def _delta_net_states(
    config: PreTrainedConfig, num_lines: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads, size = config.linear_num_value_heads, config.linear_value_head_dim
    channels = 2 * keys + heads * size
    # one element each: only the sizes are read
    conv = torch.empty((), dtype=dtype, device=device)
    # the model computes the rule in fp32 and keeps its state so
    recurrent = torch.empty((), dtype=torch.float32, device=device)
    return (
        conv.expand(num_lines, channels, config.linear_conv_kernel_dim),
        recurrent.expand(num_lines, heads, config.linear_key_head_dim, size),
    )


def _tensors(held: KeyValueLines | DeltaNetLines) -> list[Tensor]:
    if isinstance(held, KeyValueLines):
        return [held.keys, held.values]
    return [held.conv_states[0], held.recurrent_states[0]]
