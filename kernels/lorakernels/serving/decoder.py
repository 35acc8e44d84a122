"""A transformers model that serves many adapters at once: tokens in, logits of the next token out.

A prompt pass takes several prompts, padded on the left; a decode step takes one token of each
request. A step has static shapes, reads nothing back from the device and decides nothing from
data, so that it can be captured. Greedy decoding of whole requests is in generation.py.

Invariant: each row of a pass has the slot of its request, and a row that is padding is a base row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lorakernels.adapters.slots import AdapterSlots
from lorakernels.runtime.device import keep_address, upload
from lorakernels.serving.buffers import ServingBuffers
from lorakernels.serving.cache import RequestCache, layer_types
from lorakernels.serving.checks import check_counts, check_rope, check_sizes, check_tokens
from lorakernels.serving.graph_runner import GraphRunner
from lorakernels.serving.inputs import InputSpec, StepInputs
from lorakernels.serving.keys import plan_keys
from lorakernels.serving.replace import replace_layers


class Decoder:
    """Takes over `model`, whose linears, experts and, on request, head and embedding are replaced
    in place, on its device.

    num_slots, rank: how many adapters are resident at a time, and the largest rank of one.
    max_requests: how many requests are decoded at a time. max_length: tokens of a request, prompt
        and answer. max_prompt_tokens: tokens of one prompt pass, padding included.
    lm_head, embed_tokens: whether adapters may change the head, and the embedding.
    graph_sizes: numbers of requests for which `capture` makes graphs of the decode step. A step
        takes the smallest one that fits, and runs eagerly where none does.
    num_drafts: most drafts of a request that a step may verify; 0 for none, and for a model with
        gated delta nets, whose state cannot be taken back.
    Raises ValueError with the model unchanged.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        rank: int,
        max_requests: int,
        max_length: int,
        max_prompt_tokens: int,
        lm_head: bool = False,
        embed_tokens: bool = False,
        graph_sizes: Sequence[int] = (),
        num_drafts: int = 0,
    ) -> None:
        self.config = model.config
        check_rope(self.config)
        check_sizes(
            num_slots=num_slots,
            rank=rank,
            max_requests=max_requests,
            max_length=max_length,
            max_prompt_tokens=max_prompt_tokens,
        )
        self._mixes_layers = "linear_attention" in layer_types(self.config)
        self._check_drafts(num_drafts)
        # a step has one row for each request, or `width`: a token and its drafts
        self.num_drafts, self.width = num_drafts, 1 + num_drafts
        max_rows = max_requests * self.width
        graph_sizes = tuple(graph_sizes)
        plan_keys(graph_sizes, max_tokens=max_rows, widths={1, self.width})
        replaced = replace_layers(
            model, num_slots=num_slots, rank=rank, lm_head=lm_head, embed_tokens=embed_tokens
        )
        model.eval()
        model.set_attn_implementation("sdpa")
        self.model, self.device = model, model.device
        self.max_requests, self.max_length = max_requests, max_length
        self.max_prompt_tokens = max_prompt_tokens
        self.layers, self.slots = replaced.layers, AdapterSlots(replaced.layers)
        # before the cache, which may take what is left of the memory
        self.buffers = ServingBuffers.reserve(
            replaced.layers,
            max_tokens=max(max_rows, max_prompt_tokens),
            top_k=getattr(self.config, "num_experts_per_tok", None),
        )
        replaced.place.buffers = self.buffers
        self.cache = RequestCache(
            self.config,
            num_lines=max_requests,
            # rows without a draft go behind the last token
            length=max_length + num_drafts,
            dtype=model.dtype,
            device=self.device,
        )
        self._entries = keep_address(torch.arange(self.cache.length, device=self.device))
        # padding is token 0 at position 0
        specs = {name: InputSpec(dtype=torch.int64) for name in ("input_ids", "positions")}
        self.inputs = StepInputs(specs, max_tokens=max_rows, device=self.device)
        wide = {self.width: partial(self.step, width=self.width)} if num_drafts else {}
        self.runner = GraphRunner(
            self.step, self.inputs, self.buffers, sizes=graph_sizes, wide_steps=wide
        )

    @property
    def takes_back(self) -> bool:
        """Whether a line can go back to an earlier token of its request."""
        return not self._mixes_layers

    def capture(self) -> None:
        """Capture the decode steps of `graph_sizes`; nothing where the device has no graphs. The
        cache must hold no request, because the dummy runs write into its lines. Adapters may be
        loaded and evicted before and afterwards."""
        self.runner.capture()

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int], *, first_line: int
    ) -> Tensor:
        """Logits [prompts, vocabulary] of the token behind each prompt. The prompts go into the
        lines of the cache from `first_line` on. slots: that of each prompt, -1 for the base model.
        Raises ValueError."""
        lengths = [len(prompt) for prompt in prompts]
        self._check_prompts(lengths, first_line)
        check_counts(prompts=prompts, slots=slots)
        for prompt in prompts:
            self._check_tokens(prompt)
        longest = max(lengths)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64, device="cpu")
        rows = torch.full(ids.shape, -1, dtype=torch.int32, device="cpu")
        for row, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt, device="cpu")
            rows[row, longest - len(prompt) :] = slot
        self.cache.begin_prompts(first_line, lengths)
        self.buffers.batch.prepare(rows.flatten())
        padding = _on_host([longest - length for length in lengths], torch.int64)
        hidden = self._prompt_pass(self._on_device(ids), self._on_device(padding))
        # the head has a row for each prompt
        self.buffers.batch.prepare(_on_host(slots, torch.int32))
        logits: Tensor = self.model.lm_head(hidden)
        return logits

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> Tensor:
        """Logits [requests, vocabulary] of the token behind `tokens`, of which request i, in line
        i of the cache, has one at position i of `positions`. They are valid until the next step.
        Raises ValueError."""
        check_counts(tokens=tokens, positions=positions, slots=slots)
        self._check_step(positions)
        self._check_tokens(tokens)
        return self.runner.run(
            _on_host(slots, torch.int32),
            input_ids=_on_host(tokens, torch.int64),
            positions=_on_host(positions, torch.int64),
        )

    def verify(
        self, tokens: Sequence[Sequence[int]], positions: Sequence[int], slots: Sequence[int]
    ) -> Tensor:
        """Logits [requests, width, vocabulary] of the token behind each of `tokens`. Request i, in
        line i of the cache, has 1 to `width` of them, the first one at position i of `positions`;
        the logits behind them are those of padding. They are valid until the next step.

        The cache holds all these tokens then. The next step of a request begins at the position
        behind the last one that is kept. Raises ValueError.
        """
        check_counts(tokens=tokens, positions=positions, slots=slots)
        self._check_verified(tokens, positions)
        ids = torch.zeros(len(tokens), self.width, dtype=torch.int64, device="cpu")
        rows = torch.full(ids.shape, -1, dtype=torch.int32, device="cpu")
        for row, (own, slot) in enumerate(zip(tokens, slots, strict=True)):
            ids[row, : len(own)] = torch.tensor(own, device="cpu")
            rows[row, : len(own)] = slot
        places = _on_host(positions, torch.int64)[:, None] + torch.arange(self.width, device="cpu")
        logits = self.runner.run(
            rows.flatten(),
            width=self.width,
            input_ids=ids.flatten(),
            positions=places.flatten(),
        )
        return logits.view(len(tokens), self.width, -1)

    @torch.no_grad()
    def step(self, rows: int, *, width: int = 1) -> Tensor:
        """Logits [rows, vocabulary] for the first rows of `inputs`, of which each request has
        `width`, with the mapping in `buffers`. The rows of a request that is padding have token 0
        at position 0, which goes into a line without a request.
        """
        ids, positions = (
            self.inputs[name][:rows].view(-1, width) for name in ("input_ids", "positions")
        )
        self.cache.begin_step(positions)
        visible = self._entries <= positions[:, :, None]
        hidden = self._body(ids, positions, visible[:, None], None)
        logits: Tensor = self.model.lm_head(hidden.flatten(0, 1))
        return logits

    def _prompt_pass(self, ids: Tensor, padding: Tensor) -> Tensor:
        """The last hidden state of each prompt. ids [prompts, tokens], padding [prompts]: how many
        of the first tokens of a prompt are padding."""
        tokens = torch.arange(ids.shape[1], device=self.device)
        is_live = tokens >= padding[:, None]
        visible = (tokens <= tokens[:, None]) & is_live[:, None]
        # a token of the padding sees itself, because a softmax over nothing is NaN
        visible |= torch.eye(len(tokens), dtype=torch.bool, device=self.device)
        positions = (tokens - padding[:, None]).clamp(min=0)
        return self._body(ids, positions, visible[:, None], is_live)[:, -1]

    def _body(
        self, ids: Tensor, positions: Tensor, visible: Tensor, is_live: Tensor | None
    ) -> Tensor:
        """The hidden states [requests, tokens, hidden]. visible [requests, 1, tokens, entries];
        is_live [requests, tokens], None where no token is padding."""
        # models with one kind of layer take the mask itself; delta nets have no other mask than
        # that they must not read padding
        mask = {"full_attention": visible, "linear_attention": is_live}
        out = self.model.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask if self._mixes_layers else visible,
            past_key_values=self.cache,
            use_cache=True,
            # whatever the config says
            return_dict=True,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _on_device(self, host: Tensor) -> Tensor:
        return upload(host, self.device) if self.device.type == "cuda" else host

    def _check_prompts(self, lengths: Sequence[int], first_line: int) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"prompts must have a token each (got lengths {list(lengths)})")
        padded = len(lengths) * max(lengths)
        if padded > self.max_prompt_tokens:
            raise ValueError(
                f"a prompt pass may have {self.max_prompt_tokens} tokens, with padding "
                f"(got {padded}: {len(lengths)} prompts of up to {max(lengths)})"
            )
        if max(lengths) > self.max_length:
            raise ValueError(f"prompts may have {self.max_length} tokens (got {max(lengths)})")
        if first_line < 0 or first_line + len(lengths) > self.max_requests:
            raise ValueError(
                f"prompts must fit into {self.max_requests} lines "
                f"(got {len(lengths)} from line {first_line} on)"
            )

    def _check_drafts(self, num_drafts: int) -> None:
        if type(num_drafts) is not int or num_drafts < 0:
            raise ValueError(f"num_drafts must be an integer of at least 0 (got {num_drafts})")
        if num_drafts and not self.takes_back:
            raise ValueError(
                "num_drafts must be 0 for a model with gated delta nets, whose state cannot be "
                f"taken back from a rejected draft (got {num_drafts})"
            )

    def _check_verified(self, tokens: Sequence[Sequence[int]], positions: Sequence[int]) -> None:
        counts = [len(own) for own in tokens]
        if counts and not 1 <= min(counts) <= max(counts) <= self.width:
            raise ValueError(f"a request may have 1 to {self.width} tokens (got {counts})")
        for own in tokens:
            self._check_tokens(own)
        self._check_step(positions)
        self._check_step([place + n - 1 for place, n in zip(positions, counts, strict=True)])

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        # on a GPU an id that the embedding lacks would end the process
        check_tokens("tokens", tokens, self.config.vocab_size)

    def _check_step(self, positions: Sequence[int]) -> None:
        if not 1 <= len(positions) <= self.max_requests:
            raise ValueError(f"a step may have {self.max_requests} rows (got {len(positions)})")
        if not 0 <= min(positions) <= max(positions) < self.max_length:
            raise ValueError(
                f"positions must be 0 to {self.max_length - 1} "
                f"(got {min(positions)} to {max(positions)})"
            )


def _on_host(values: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")
