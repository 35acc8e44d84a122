"""Greedy decoding of many requests, each with its own adapter or none.

Requests join as lines of the cache become free and leave when they end. The live requests are
always in the first lines: the last one moves into the line of one that has ended.

With a drafter a step takes the drafts of each request, too, and may give it several tokens: those
that it would have got one by one.

Invariant: an adapter stays as it is and where it is from the prompt of a request to its last token
(vllm #47724).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from transformers import GenerationConfig

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.errors import AdapterError, printable
from lorakernels.serving.checks import check_tokens
from lorakernels.serving.choice import Said, most_likely
from lorakernels.serving.config import check_config, end_tokens
from lorakernels.serving.decoder import Decoder
from lorakernels.serving.lines import add_user, check_lines, other_users
from lorakernels.serving.speculation import DraftCounts, Drafter, Text, accepted_drafts


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and the name of a resident adapter or None for the base model."""

    prompt: tuple[int, ...]
    adapter: str | None = None


@dataclass(slots=True)
class _Live:
    """A request in a line of the cache. The last of `tokens` is not in the cache yet. `logprobs`:
    theirs, where they are wanted."""

    number: int
    request: Request
    slot: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def text(self) -> Text:
        return Text((*self.request.prompt, *self.tokens), self.request.adapter)


class Generation:
    """Requests that are being decoded. `add` as many as wanted, at any time; `step` until it says
    that nothing is left; `answers` maps the number of a request to its new tokens, the one that
    ended it included, and `logprobs` to the natural logarithms of their probabilities.

    config: max_new_tokens must be set. eos_token_id is taken from the model's own generation
        config where it is None. Options that sample or change greedy decoding are refused.
    drafter: guesses tokens that the decoder then verifies; `drafts` counts them. None: no drafts.
    logprobs: whether they are wanted. They are those of the model's own logits.
    A decoder decodes, or drafts, the requests of one Generation at a time. Raises ValueError.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: GenerationConfig,
        *,
        drafter: Drafter | None = None,
        logprobs: bool = False,
    ) -> None:
        check_config(config)
        if drafter is not None:
            if not decoder.num_drafts:
                raise ValueError("num_drafts of the decoder must be at least 1 with a drafter")
            drafter.check(decoder)
        self._drafter, self.drafts = drafter, DraftCounts()
        self.decoder, self._max_new_tokens = decoder, config.max_new_tokens
        self._ends = end_tokens(config, decoder.model.generation_config)
        self._waiting: deque[_Live] = deque()
        self._live: list[_Live] = []
        self._added = 0
        # whether a step has failed that cannot be repeated
        self._is_lost = False
        self._wants_logprobs = logprobs
        self.answers: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self._decoders = (decoder, *(() if drafter is None else drafter.decoders))
        add_user(self._decoders, self)

    def add(self, request: Request) -> int:
        """The number of the request. ValueError, AdapterError if its adapter is not resident."""
        decoder = self.decoder
        tokens = request.prompt
        if len(tokens) == 0:
            raise ValueError("prompt must have a token (got none)")
        check_tokens("prompt", tokens, decoder.config.vocab_size)
        if len(tokens) > decoder.max_prompt_tokens:
            raise ValueError(
                f"prompt may have {decoder.max_prompt_tokens} tokens (got {len(tokens)})"
            )
        # the last token of an answer is not in the cache
        needed = len(tokens) + self._max_new_tokens - 1
        if needed > decoder.max_length:
            raise ValueError(
                f"prompt and answer may have {decoder.max_length} tokens in the cache "
                f"(got {needed})"
            )
        slot = -1 if request.adapter is None else decoder.slots.slot_of(request.adapter)
        # a list may grow before the request has ended
        request = replace(request, prompt=tuple(tokens))
        number, self._added = self._added, self._added + 1
        self._waiting.append(_Live(number, request, slot))
        return number

    def step(self) -> bool:
        """Let requests join and give each live request one more token, and those of its drafts
        that were accepted. Whether any request is left.

        Where it raises, no request is lost, and it may be called again; but not for a model with
        gated delta nets once their states may have changed. RuntimeError then, and while another
        Generation has requests in the decoder, or in that of the drafts.
        """
        if self._is_lost:
            raise RuntimeError(
                "an earlier step failed, and the states of gated delta nets may be those behind "
                "it: add its requests to another Generation"
            )
        self._join()
        if self._live:
            drafts = self._propose()
            try:
                if any(drafts):
                    self._verify(drafts)
                else:
                    self._decode()
            except BaseException:
                self._is_lost = not self.decoder.takes_back
                raise
        return bool(self._live or self._waiting)

    def activate(self, adapter: Adapter) -> int:
        """Load an adapter, as `AdapterSlots.activate`. AdapterError, also if an adapter of that
        name is in use."""
        self._refuse_in_use(adapter.name)
        return self.decoder.slots.activate(adapter)

    def evict(self, name: str) -> None:
        """Empty an adapter's slot. AdapterError, also if it is in use."""
        self._refuse_in_use(name)
        self.decoder.slots.evict(name)

    def _refuse_in_use(self, name: str) -> None:
        for user in (self, *other_users(self.decoder, self)):
            if users := user.requests_with(name):
                numbers = ", ".join(map(str, users))
                whose = "" if user is self else " of another Generation"
                raise AdapterError(
                    f"adapter {printable(name)} is in use by request {numbers}{whose}"
                )

    def requests_with(self, name: str) -> list[int]:
        """The numbers of the requests, live or waiting, with this adapter; none where a step has
        failed that cannot be repeated."""
        users = [x.number for x in (*self._live, *self._waiting) if x.request.adapter == name]
        return [] if self._is_lost else users

    def _join(self) -> None:
        """Prompt passes, until all requests live or no line is free."""
        while self._waiting and len(self._live) < self.decoder.max_requests:
            check_lines(self._decoders, self)
            first, joining = len(self._live), self._next_prompts()
            chosen = self._prefill(first, joining)
            # not before, so that a pass that fails loses no request
            for _ in joining:
                self._waiting.popleft()
            self._live += joining
            self._append(first, chosen)

    @property
    def num_in_lines(self) -> int:
        """How many requests need what the lines of the decoder hold."""
        return 0 if self._is_lost else len(self._live)

    def _next_prompts(self) -> list[_Live]:
        """The first waiting requests that fit into the free lines and into one prompt pass."""
        free, longest = self.decoder.max_requests - len(self._live), 0
        joining: list[_Live] = []
        for request in self._waiting:
            longest = max(longest, len(request.request.prompt))
            rows = (len(joining) + 1) * longest
            if len(joining) == free or rows > self.decoder.max_prompt_tokens:
                break
            joining.append(request)
        return joining

    def _prefill(self, first: int, joining: Sequence[_Live]) -> list[Said]:
        """The first token of each of these requests, which get the lines from `first` on."""
        logits = self.decoder.prefill(
            [request.request.prompt for request in joining],
            [request.slot for request in joining],
            first_line=first,
        )
        if self._drafter is not None:
            self._drafter.join(first, [request.text for request in joining])
        return self._chosen(logits[:, None])

    def _propose(self) -> list[list[int]]:
        live = self._live
        if self._drafter is None:
            return [[] for _ in live]
        # with a token that is not a draft behind them
        left = [self._max_new_tokens - len(request.tokens) - 1 for request in live]
        counts = [min(self.decoder.num_drafts, most) for most in left]
        proposed = self._drafter.propose([request.text for request in live], counts)
        # a request that is given more would go on beyond its last token
        return [list(own[:count]) for own, count in zip(proposed, counts, strict=True)]

    def _decode(self) -> None:
        live = self._live
        logits = self.decoder.decode(
            [request.tokens[-1] for request in live],
            [request.position for request in live],
            [request.slot for request in live],
        )
        self._append(0, self._chosen(logits[:, None]))

    def _verify(self, drafts: Sequence[Sequence[int]]) -> None:
        live = self._live
        logits = self.decoder.verify(
            [[request.tokens[-1], *own] for request, own in zip(live, drafts, strict=True)],
            [request.position for request in live],
            [request.slot for request in live],
        )
        answers = []
        for own, said in zip(drafts, self._chosen(logits), strict=True):
            chosen = said.tokens
            count = accepted_drafts(own, chosen)
            answer = self._up_to_end(chosen[: count + 1])
            self.drafts = self.drafts.plus(min(count, len(answer)), verified=len(own))
            answers.append(Said(answer, said.logprobs[: len(answer)]))
        self._append(0, answers)

    def _up_to_end(self, tokens: list[int]) -> list[int]:
        ends = (index + 1 for index, token in enumerate(tokens) if token in self._ends)
        return tokens[: next(ends, len(tokens))]

    def _chosen(self, logits: Tensor) -> list[Said]:
        return most_likely(logits, logprobs=self._wants_logprobs)

    def _append(self, first: int, answers: Sequence[Said]) -> None:
        """Give the requests from line `first` on their next tokens."""
        for request, said in zip(self._live[first:], answers, strict=True):
            request.tokens += said.tokens
            request.logprobs += said.logprobs
        # from the end: the request that moves into a line has not ended
        for line in reversed(range(first, len(self._live))):
            tokens = self._live[line].tokens
            if tokens[-1] in self._ends or len(tokens) == self._max_new_tokens:
                self._leave(line)

    def _leave(self, line: int) -> None:
        ended, last = self._live[line], self._live.pop()
        if last is not ended:
            self._live[line] = last
            self.decoder.cache.move(len(self._live), line)
            if self._drafter is not None:
                self._drafter.move(len(self._live), line)
        self.answers[ended.number] = ended.tokens
        if self._wants_logprobs:
            self.logprobs[ended.number] = ended.logprobs


def generate(
    decoder: Decoder,
    requests: Sequence[Request],
    config: GenerationConfig,
    *,
    drafter: Drafter | None = None,
) -> list[list[int]]:
    """The new tokens of each request; see `Generation`."""
    generation = Generation(decoder, config, drafter=drafter)
    numbers = [generation.add(request) for request in requests]
    while generation.step():
        pass
    return [generation.answers[number] for number in numbers]
