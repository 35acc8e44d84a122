"""The requests of a batch: how long they are, what they share, and which drafts they lead to."""

from __future__ import annotations

from random import Random

import pytest

from loragate.engine.batch import Asked, draw_batch
from loragate.engine.language import KINDS, draw_speakers
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.engine_case import Model, Prefill, PrefixCaching, Speculation

NAMES = ("adapter-1", "adapter-2")
BLOCK, DRAFTS = 16, 3


def batch_of(seed: int = 3, **axes: object) -> list[Asked]:
    """Of the base model, two adapters and the second one again, with another prompt."""
    fixed = {"site": Site.ENGINE, "rank": 8, "slots": 2, "dtype": Dtype.FP32}
    case = Case(**{**fixed, **axes})  # type: ignore[arg-type]
    language, random = KINDS[case.model], Random(seed)
    speakers = draw_speakers(language, len(NAMES), random)
    return draw_batch(case, language, speakers, NAMES, random)


def shared(one: Asked, other: Asked) -> int:
    """How many tokens the prompts have in common, from the first one on."""
    pairs = zip(one.request.prompt, other.request.prompt, strict=False)
    return next(number for number, (a, b) in enumerate(pairs) if a != b)


@pytest.mark.parametrize("model", [*Model])
@pytest.mark.parametrize("speculation", [Speculation.NONE, Speculation.NGRAM])
def test_where_prefixes_are_kept_base_and_adapters_share_whole_blocks(
    model: Model, speculation: Speculation
) -> None:
    on = PrefixCaching.ON
    base, *others, _ = batch_of(model=model, speculation=speculation, prefix_caching=on)
    assert [asked.request.adapter for asked in (base, *others)] == [None, *NAMES]
    assert all(shared(base, other) >= 2 * BLOCK for other in others)


def test_two_prompts_have_the_same_second_block_behind_different_first_ones() -> None:
    *_, one, own = (a.request for a in batch_of(prefix_caching=PrefixCaching.ON))
    assert one.adapter == own.adapter
    assert one.prompt[:BLOCK] != own.prompt[:BLOCK]
    assert one.prompt[BLOCK : 2 * BLOCK] == own.prompt[BLOCK : 2 * BLOCK]


@pytest.mark.parametrize(
    "axes",
    [
        {"prefix_caching": PrefixCaching.ON},
        {"prefill": Prefill.CHUNKED},
        {"prefix_caching": PrefixCaching.ON, "speculation": Speculation.NGRAM},
    ],
)
def test_prompts_that_are_cut_fill_their_blocks_or_end_one_token_behind(
    axes: dict[str, object],
) -> None:
    lengths = [len(asked.request.prompt) for asked in batch_of(**axes)]
    assert {0, 1} < {length % BLOCK for length in lengths}
    assert min(lengths) > 2 * BLOCK
    assert len(set(lengths)) == len(lengths)


def test_no_two_prompts_of_a_batch_are_equally_long_and_answers_differ_in_length() -> None:
    requests = [asked.request for asked in batch_of()]
    assert len({len(request.prompt) for request in requests}) == len(requests)
    assert len({request.new_tokens for request in requests}) > 2


def accepted(asked: Asked) -> tuple[int, int]:
    """How many drafts an n-gram gives behind the first token of an answer, and how many of these
    are right."""
    language, prompt = KINDS[Model.DENSE], asked.request.prompt
    words = language.words_after(asked.prompt, asked.speaker, asked.request.new_tokens)
    text = [*prompt, words[0]]
    start = next(n for n in range(len(text) - 2) if text[n : n + 2] == text[-2:])
    drafts = text[start + 2 :][:DRAFTS][: len(words) - 2]
    same = [a == b for a, b in zip(drafts, words[1:], strict=False)]
    return len(drafts), [*same, False].index(False)


def test_of_the_drafts_of_an_ngram_all_are_right_or_some_or_the_first_one_is_wrong() -> None:
    for seed in range(10):
        found = [accepted(asked) for asked in batch_of(seed, speculation=Speculation.NGRAM)]
        # the first answer ends within its drafts, the third one goes on behind them
        assert found == [(2, 2), (3, 0), (3, 3), (2, 1)]
