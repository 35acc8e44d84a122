"""The rows of `bench engine`: what whole engines of vLLM are timed at. Pure; no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from loragate.bench.graphs_rows import MODELS

# so many that a step takes longer on the device than on the host of an engine, which would hide
# what adapters add. Qwen3-8B is whole; three engines of all 48 layers of the other do not fit
LAYERS = MappingProxyType({"qwen3_8b": 36, "qwen3_30b_a3b": 16})
ADAPTERS = 4
DECODE_BATCHES = (16, 64)
# of a step: what vLLM takes on such a device by itself, and what 16 prompts of 1024 tokens fill. Of
# steps of 4096 tokens engines of the 16 layers wait for the host: what adapters added to a token
# was 2.5 to 8.1 us with the plug-in and 3.5 to 10 us without it, on five hosts
BATCHED_TOKENS = 16384
_DECODE_PROMPT, _DECODE_TOKENS = 32, (16, 144)
_PREFILL_PROMPT, _PREFILL_STEPS = 1024, (1, 3)
_SERVE_REQUESTS, _SERVE_PROMPT, _SERVE_TOKENS = 64, 128, 64


class Serving(StrEnum):
    """How an engine serves adapters."""

    # not at all
    BASE = "base"
    # with its own kernels
    VLLM = "vllm"
    # with the plug-in
    LORAKERNELS = "lorakernels"


class Work(StrEnum):
    """What a row is the time of."""

    # a step of a full batch
    DECODE = "decode"
    # a token of a prompt
    PREFILL = "prefill"
    # a token of requests from their prompts to their ends
    SERVE = "serve"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are generated together. They take the adapters in turns, and the base model in
    its turn if `serves_base`."""

    requests: int
    prompt: int
    new_tokens: int
    serves_base: bool = False

    def adapter_of(self, request: int) -> int | None:
        """The adapter of a request, from 0; None is the base model."""
        turn = request % (ADAPTERS + self.serves_base)
        return turn if turn < ADAPTERS else None


@dataclass(frozen=True, slots=True)
class EngineRow:
    """`batch`: requests of a decode step, of a prefill step, or of all."""

    model: str
    work: Work
    batch: int

    @property
    def id(self) -> str:
        return f"{self.model}.{self.work}.b{self.batch}"

    @property
    def loads(self) -> tuple[Load, ...]:
        """What is timed: one load, or two that differ by `units` alone."""
        match self.work:
            case Work.DECODE:
                return tuple(Load(self.batch, _DECODE_PROMPT, tokens) for tokens in _DECODE_TOKENS)
            case Work.PREFILL:
                return tuple(
                    Load(steps * self.batch, _PREFILL_PROMPT, 1) for steps in _PREFILL_STEPS
                )
            case Work.SERVE:
                return (Load(self.batch, _SERVE_PROMPT, _SERVE_TOKENS, serves_base=True),)

    @property
    def units(self) -> int:
        """Steps, tokens of prompts or new tokens that the time is divided by."""
        match self.work:
            case Work.DECODE:
                return _DECODE_TOKENS[1] - _DECODE_TOKENS[0]
            case Work.PREFILL:
                return (_PREFILL_STEPS[1] - _PREFILL_STEPS[0]) * self.batch * _PREFILL_PROMPT
            case Work.SERVE:
                return self.batch * _SERVE_TOKENS

    def microseconds(self, seconds: Callable[[Load], float]) -> float:
        """Of one unit; `seconds` serves a load and times it. What two loads have in common, as the
        handling of requests and their first steps, is in neither of their differences."""
        times = [seconds(load) for load in self.loads]
        return (times[-1] - sum(times[:-1])) / self.units * 1e6


def engine_rows() -> tuple[EngineRow, ...]:
    """Rows of one model are adjacent."""
    found: list[EngineRow] = []
    for model in MODELS:
        found += [EngineRow(model, Work.DECODE, batch) for batch in DECODE_BATCHES]
        found.append(EngineRow(model, Work.PREFILL, BATCHED_TOKENS // _PREFILL_PROMPT))
        found.append(EngineRow(model, Work.SERVE, _SERVE_REQUESTS))
    return tuple(found)


MAX_LENGTH = max(load.prompt + load.new_tokens for row in engine_rows() for load in row.loads)
MAX_REQUESTS = max(DECODE_BATCHES)
