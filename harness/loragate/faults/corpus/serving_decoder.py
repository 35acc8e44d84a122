"""Faults of the decoder: packed projections, prompts and their padding, the cache, requests."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_projections = planting("lorakernels.serving.projections", Group.DECODER)
_replace = planting("lorakernels.serving.replace", Group.DECODER)
_cache = planting("lorakernels.serving.cache", Group.DECODER)
_decoder = planting("lorakernels.serving.decoder", Group.DECODER)
_generation = planting("lorakernels.serving.generation", Group.DECODER)
_config = planting("lorakernels.serving.config", Group.DECODER)
_choice = planting("lorakernels.serving.choice", Group.DECODER)

_ROWS = "            rows[row, longest - len(prompt) :] = slot\n"
_LOOKED_UP = (
    "        out: Tensor = self.layer(ids, buffers.batch, buffers.dense)\n"
    "        return out\n\n\nclass ServedExperts"
)
_ALONE = "nn.functional.embedding(ids, self.layer.weight)"

FAULTS = (
    _projections(
        "columns-of-k-and-v-exchanged",
        "        found = self._columns[index]\n",
        "        order = (0, 2, 1) if len(self._members) == 3 else (0, 1)\n"
        "        found = self._columns[order[index]]\n",
        source="own",
        why="The keys of an attention are those columns that are its values.",
    ),
    _projections(
        "columns-of-another-input-handed-out",
        "        elif index != self._next or x is not self._input:\n",
        "        elif not self._columns:\n",
        source="own",
        why="A module that is called with another input gets the columns of the first one.",
    ),
    _projections(
        "router-weights-dropped",
        "            top_k_weights.float(),\n",
        "            top_k_weights.float().fill_(1.0),\n",
        source="own",
        why="Each chosen expert counts the same.",
    ),
    _replace(
        "embedding-of-the-model-kept",
        "        setattr(parent, site.name, ServedEmbedding(tokens, place))\n",
        "        ServedEmbedding(tokens, place)\n",
        source="own",
        why="Adapters of the embedding are loaded, and no pass of the model uses them.",
    ),
    _projections(
        "embedding-served-as-if-for-base-rows",
        _LOOKED_UP,
        _LOOKED_UP.replace("self.layer(ids, buffers.batch, buffers.dense)", _ALONE),
        source="own",
        why="Rows are looked up, and the deltas of their adapters are left out.",
    ),
    _replace(
        "tied-head-stored-twice",
        "        weights[0] if alone else torch.cat(weights),\n",
        "        torch.cat(weights),\n",
        source="own",
        why="A weight that is not packed is copied: a head that is tied to the embedding is there "
        "twice.",
    ),
    _replace(
        "unknown-linear-kept",
        "        if isinstance(module, nn.Linear) or any(",
        "        if not isinstance(module, nn.Linear) and any(",
        source="vllm-ascend #11555",
        why="A linear that is not known stays as it is, and adapters have no effect on it.",
    ),
    _decoder(
        "slot-of-a-prompt-for-its-last-token",
        _ROWS,
        "            rows[row, -1] = slot\n",
        source="own",
        why="The slots of requests are not repeated over the tokens of their prompts.",
    ),
    _decoder(
        "padding-of-a-prompt-has-its-slot",
        _ROWS,
        "            rows[row] = slot\n",
        source="own",
        why="The rows in front of a short prompt are computed with its adapter.",
    ),
    _decoder(
        "head-of-prompts-keeps-their-mapping",
        "        self.buffers.batch.prepare(_on_host(slots, torch.int32))\n",
        "        self.buffers.batch.prepare(rows.flatten()[: len(slots)])\n",
        source="own",
        why="The head has a row for each prompt, and takes the slots of the first tokens.",
    ),
    _decoder(
        "mapping-of-the-first-step-kept",
        "            _on_host(slots, torch.int32),\n            input_ids",
        "            self.__dict__.setdefault('_first', _on_host(slots, torch.int32))"
        "[: len(slots)],\n"
        "            input_ids",
        source="vllm #42120",
        why="Rows keep the slots that they had in the first decode step.",
    ),
    _decoder(
        "delta-nets-read-padding",
        '"linear_attention": is_live}',
        '"linear_attention": None}',
        source="own",
        why="The state of a delta net begins with the padding in front of a short prompt.",
    ),
    _decoder(
        "padding-counts-for-positions",
        "        positions = (tokens - padding[:, None]).clamp(min=0)\n",
        "        positions = tokens.expand_as(ids)\n",
        source="own",
        why="The first token of a short prompt is at the position of its column.",
    ),
    _decoder(
        "token-does-not-see-itself",
        "        visible = self._entries <= positions[:, :, None]\n",
        "        visible = self._entries < positions[:, :, None]\n",
        source="own",
        why="A decode step masks the entry that it has just written.",
    ),
    _cache(
        "line-not-emptied-for-a-prompt",
        "            held[lines].zero_()\n",
        "",
        source="own",
        why="Behind a prompt stand entries of an earlier request; masked ones that are NaN count.",
    ),
    _cache(
        "prompt-kept-with-its-padding",
        "copy_(prompt[:, -length:])",
        "copy_(prompt[:, :length])",
        source="own",
        why="Of a short prompt the padding in front goes into the cache.",
    ),
    _cache(
        "convolution-of-a-short-prompt-aligned-left",
        "F.pad(conv_states, (missing, 0))",
        "F.pad(conv_states, (0, missing))",
        source="own",
        why="A prompt shorter than the convolution is followed by zeros, not preceded by them.",
    ),
    _cache(
        "moved-request-leaves-half-of-its-state",
        "            for tensor in _tensors(held):\n",
        "            for tensor in _tensors(held)[:1]:\n",
        source="own",
        why="A request takes its keys to another line and leaves its values.",
    ),
    _generation(
        "position-behind-its-token",
        "        return len(self.request.prompt) + len(self.tokens) - 1\n",
        "        return len(self.request.prompt) + len(self.tokens)\n",
        source="own",
        why="The first token behind a prompt is decoded one position too far.",
    ),
    _generation(
        "request-in-the-line-of-another",
        "            self.decoder.cache.move(len(self._live), line)\n",
        "            self.decoder.cache.move(line, line)\n",
        source="vllm #38606",
        why="A request goes on with the cache of one that has ended.",
    ),
    _generation(
        "slot-of-an-ended-request-kept",
        "            self._live[line] = last\n",
        "            self._live[line] = last\n            last.slot = ended.slot\n",
        source="vllm #47724",
        why="A request that moves into the line of an ended one gets its adapter, too.",
    ),
    _generation(
        "adapter-of-a-waiting-request-evicted",
        "for x in (*self._live, *self._waiting) if",
        "for x in self._live if",
        source="vllm #47724",
        why="The slot of a request that waits is given to another adapter.",
    ),
    _choice(
        "probability-over-the-sum-of-another-row",
        "[..., 0] - sums\n",
        "[..., 0] - sums.roll(1, dims=0)\n",
        source="own",
        why="The tokens of a batch are right, and their probabilities are divided by other sums.",
    ),
    _choice(
        "probability-beside-the-most-likely-token",
        "    sums = torch.logsumexp(logits.float(), dim=-1)\n",
        "    sums = logits.float().amax(dim=-1)\n",
        source="own",
        why="Each token has the probability 1: the most likely one is where logits begin.",
    ),
    _config(
        "end-of-the-model-ignored",
        "    ends = default.eos_token_id if config.eos_token_id is None else config.eos_token_id\n",
        "    ends = config.eos_token_id\n",
        source="own",
        why="An answer goes on behind the end token of its model.",
    ),
)
