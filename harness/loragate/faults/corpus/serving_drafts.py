"""Faults of speculative decoding: drafts, their verification, and what becomes of rejected ones."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_generation = planting("lorakernels.serving.generation", Group.DRAFTS)
_speculation = planting("lorakernels.serving.speculation", Group.DRAFTS)
_decoder = planting("lorakernels.serving.decoder", Group.DRAFTS)
_cache = planting("lorakernels.serving.cache", Group.DRAFTS)
_runner = planting("lorakernels.serving.graph_runner", Group.DRAFTS)
_slots = planting("lorakernels.adapters.slots", Group.DRAFTS)

_ROWS = "            rows[row, : len(own)] = slot\n"
_ACCEPTED = "            count = accepted_drafts(own, chosen)\n"
_ANSWER = "            answer = self._up_to_end(chosen[: count + 1])\n"

FAULTS = (
    _decoder(
        "drafts-verified-with-the-adapter-of-another-request",
        _ROWS,
        "            rows[row, 0] = slot\n            rows[row - 1, 1 : len(own)] = slot\n",
        source="vllm #38606",
        why="The rows of drafts have the slot of the request behind.",
    ),
    _decoder(
        "drafts-verified-without-an-adapter",
        _ROWS,
        "            rows[row, 0] = slot\n",
        source="vllm #42120",
        why="The mapping has one entry for each request where each of its rows needs one.",
        only=True,
    ),
    _decoder(
        "place-without-a-draft-has-the-slot-of-its-request",
        _ROWS,
        "            rows[row] = slot\n",
        source="own",
        why="Padding behind the drafts of a request is computed with its adapter.",
    ),
    _decoder(
        "slots-repeated-as-blocks",
        "            rows.flatten(),\n            width",
        "            rows.T.flatten(),\n            width",
        source="own",
        why="The slots of all first rows come before those of all second ones, the rows do not.",
    ),
    _decoder(
        "mapping-of-the-first-verification-kept",
        "            rows.flatten(),\n            width",
        "            self.__dict__.setdefault('_wide', {}).setdefault(len(tokens), rows.flatten())"
        ",\n            width",
        source="vllm #42120",
        why="A verification of as many requests as before has their mapping.",
    ),
    _decoder(
        "draft-sees-the-drafts-behind-it",
        "        visible = self._entries <= positions[:, :, None]\n",
        "        visible = self._entries <= positions[:, -1:, None].expand(-1, width, -1)\n",
        source="own",
        why="All rows of a request have the mask of its last one.",
    ),
    _cache(
        "drafts-kept-in-one-entry",
        "        return self.positions[:, None, :, None]\n",
        "        return self.positions[:, None, :1, None].expand("
        "-1, -1, self.positions.shape[1], -1)\n",
        source="own",
        why="The keys and values of all rows of a request go where its first one belongs.",
    ),
    _generation(
        "rejected-drafts-counted-as-verified",
        _ACCEPTED,
        "            count = len(own)\n",
        source="own",
        why="What the model says behind wrong drafts becomes part of the answer.",
    ),
    _generation(
        "draft-given-in-place-of-the-token-of-the-model",
        _ANSWER,
        "            answer = self._up_to_end([*own, chosen[-1]][: count + 1])\n",
        source="own",
        why="Where a draft was rejected the answer has the draft.",
    ),
    _generation(
        "token-behind-the-drafts-dropped",
        _ANSWER,
        "            answer = self._up_to_end(chosen[: max(count, 1)])\n",
        source="own",
        why="Of a step whose drafts were right the model's own token is thrown away.",
    ),
    _generation(
        "probabilities-of-rejected-drafts-kept",
        "said.logprobs[: len(answer)]",
        "said.logprobs",
        source="own",
        why="Behind a rejected draft each token has the probability of one before it.",
    ),
    _generation(
        "drafts-behind-the-end-kept",
        "        return tokens[: next(ends, len(tokens))]\n",
        "        return tokens if ends else []\n",
        source="own",
        why="An answer goes on behind its end if the end was a draft.",
    ),
    _generation(
        "more-drafts-than-tokens-left",
        "        counts = [min(self.decoder.num_drafts, most) for most in left]\n",
        "        counts = [self.decoder.num_drafts if most else 0 for most in left]\n",
        source="own",
        why="An answer is longer than asked for, and its line may be too short for it.",
    ),
    _generation(
        "drafts-behind-the-end-counted-as-accepted",
        "self.drafts.plus(min(count, len(answer)), ",
        "self.drafts.plus(count, ",
        source="own",
        why="The counters say that drafts became part of answers which end before them.",
    ),
    _generation(
        "draft-model-not-told-of-a-move",
        "                self._drafter.move(len(self._live), line)\n",
        "                self._drafter.move(line, line)\n",
        source="vllm #38606",
        why="The model that drafts goes on with the text of a request that has ended.",
    ),
    _speculation(
        "last-draft-not-read-by-its-model",
        "        for ahead in range(most + 1 if most else 0):\n",
        "        for ahead in range(most):\n",
        source="own",
        why="After a step whose drafts were all right the model that drafts lacks a token.",
    ),
    _speculation(
        "drafts-without-the-adapter-of-the-request",
        "            return self._decoder.slots.slot_of(adapter)\n",
        "            self._decoder.slots.slot_of(adapter)\n            return -1\n",
        source="own",
        why="The model that drafts ignores the adapter, and most drafts are rejected.",
    ),
    _speculation(
        "ngram-followed-by-itself",
        "        return list(tokens[place : place + count]) if best else []\n",
        "        return list(tokens[place - best :][:count]) if best else []\n",
        source="own",
        why="A request drafts the tokens that it has just said, and all drafts are rejected.",
        only=True,
    ),
    _slots(
        "adapter-loaded-again-keeps-its-weights",
        "        bound = bind(adapter, {",
        "        if adapter.name in self._residents:\n"
        "            return self._residents[adapter.name].slot\n"
        "        bound = bind(adapter, {",
        source="vllm #38606",
        why="An adapter that is loaded under a name that is taken changes nothing.",
        only=True,
    ),
    _runner(
        "wide-graph-of-decode-steps",
        "        return self._steps[key.width](key.num_tokens)\n",
        "        return self._steps[1](key.num_tokens)\n",
        source="own",
        why="The graph of a verification takes each draft for a request of its own.",
    ),
    _runner(
        "graph-of-another-width",
        "        sizes = self._sizes.get(width, ())\n",
        "        sizes, width = self._sizes.get(1, ()), 1\n",
        source="vllm #36370",
        why="A verification is replayed from the graph of a decode step of as many rows.",
    ),
)
