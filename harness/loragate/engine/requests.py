"""What the checks of an engine need of it, and nothing of how it works. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt for one adapter, by the name it was loaded under; None is the base model.

    Exactly `new_tokens` tokens are wanted, whatever they are: each is the most likely one. But an
    answer ends with the first one that is in `stop`, which is its last token then.
    """

    prompt: tuple[int, ...]
    adapter: str | None
    new_tokens: int
    stop: tuple[int, ...] = ()

    def wanted(self, answer: Sequence[int]) -> int:
        """How many tokens an answer that begins with these must have."""
        ends = (n for n, token in enumerate(answer[: self.new_tokens], 1) if token in self.stop)
        return next(ends, self.new_tokens)


@dataclass(frozen=True, slots=True)
class Completion:
    """The new tokens of a request, without its prompt.

    logprobs: the natural logarithms of their probabilities by the model's own logits, one for each;
        None where the case does not ask for them. Rounding changes them with a batch, so that
        completions are equal whose tokens are.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What an engine did since it was started; None is what it cannot say.

    kernels_launched: of adapters, outside of captures. kernels_captured: of adapters, in graphs,
    each of which launches them again when it is replayed. others_launched, others_captured: of
    another implementation, for layers that this one serves.
    """

    drafts_accepted: int | None
    drafts_rejected: int | None
    graphs_replayed: int | None
    kernels_launched: int | None
    kernels_captured: int | None = None
    others_launched: int | None = None
    others_captured: int | None = None

    def since(self, before: EngineCounts) -> EngineCounts:
        """What was added to `before`, but for captures, which remain what they were."""
        return EngineCounts(
            _added(before.drafts_accepted, self.drafts_accepted),
            _added(before.drafts_rejected, self.drafts_rejected),
            _added(before.graphs_replayed, self.graphs_replayed),
            _added(before.kernels_launched, self.kernels_launched),
            self.kernels_captured,
            _added(before.others_launched, self.others_launched),
            self.others_captured,
        )

    def fallen(self, before: EngineCounts) -> str:
        """The first count that is less than in `before`, as text; "" where there is none."""
        for field_ in fields(self):
            was, now = getattr(before, field_.name), getattr(self, field_.name)
            if was is not None and now is not None and now < was:
                return f"{field_.name} {now} after {was}"
        return ""


def _added(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


class Engine(Protocol):
    """A model that is served with adapters.

    All requests of a call to `generate` are served together, and the completions are in their
    order. Loading under a name that is taken replaces the adapter.
    """

    def load(self, name: str, folder: Path) -> None: ...

    def unload(self, name: str) -> None: ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def counts(self) -> EngineCounts: ...

    def trace(self, tokens: Sequence[int], adapter: str | None) -> Mapping[str, Tensor]:
        """What a prompt pass over `tokens` computes, as loragate.engine.bisection.Trace has it:
        asked for behind a defect only, and optional in the process of an engine."""

    def close(self) -> None: ...
