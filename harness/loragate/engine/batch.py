"""The requests of a case of engines.

They differ in length, before and behind: steps of an engine that treat all alike, or take the
length of another request, must show. What stands in a prompt beside its numbers and its last word
changes no answer but those of random weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from loragate.engine.drafts import WRONG_PLACES, drafted_word
from loragate.engine.language import Language, Prompt, Speaker, draw_prompt
from loragate.engine.requests import Request
from loragate.matrix.case import Case
from loragate.matrix.engine_case import Prefill, PrefixCaching, Speculation, Weights

# of the requests of a batch, one after the other and then again. An answer is longer than a step
# with three drafts gives, or not; a sample leads an n-gram to as many drafts that are right, and
# one: behind these all are accepted and cut at the end of the answer, none, all, or one
_NEW_TOKENS, _SAMPLES = (4, 6, 5, 4), (4, 1, 5, 2)
# of random weights, where what was answered before takes part
_LONGER = 5
# of prompts that are no longer than they must be, and of those that fill blocks of any engine: one
# of whole blocks, one of a token more, which is the last chunk of a prompt, too
_MORE, _BEHIND_BLOCKS = (0, 3, 1, 2), (0, 1, -5, 14)
_BLOCK, _LEAST_FILLER = 16, 40
# drafts are those of `drafted_word`
_DRAFTED = frozenset({Speculation.DRAFT_MODEL, Speculation.EAGLE, Speculation.MTP})


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and what it was made of."""

    request: Request
    prompt: Prompt
    speaker: Speaker


def draw_batch(
    case: Case,
    language: Language,
    speakers: Sequence[Speaker],
    active: Sequence[str],
    random: Random,
) -> list[Asked]:
    """One prompt for the base model and all active adapters, and one more for the last of these."""
    base, by_name = language.base(), {speaker.name: speaker for speaker in speakers}
    users: list[Speaker] = [base, *(by_name[name] for name in active)]
    while True:
        shared, own = (draw_prompt(language, [base, *speakers], random) for _ in range(2))
        said = [*((shared, user) for user in users), (own, users[-1])]
        if case.speculation not in _DRAFTED or _has_both_drafts(language, said):
            break
    return list(_asked(case, language, said, random))


def _has_both_drafts(language: Language, said: Sequence[tuple[Prompt, Speaker]]) -> bool:
    """Whether of the drafts behind the first words of all answers some are right and some wrong."""
    right = set()
    for prompt, speaker in said:
        first, second = language.words_after(prompt, speaker, 2)
        right.add(drafted_word(language, prompt.word, first, WRONG_PLACES) == second)
    return len(right) == 2


def _asked(
    case: Case, language: Language, said: Sequence[tuple[Prompt, Speaker]], random: Random
) -> Iterator[Asked]:
    heads = [language.tokens(prompt)[:-1] for prompt, _ in said]
    tails = [
        _tail(case, language, prompt, speaker, _SAMPLES[number % len(_SAMPLES)])
        for number, (prompt, speaker) in enumerate(said)
    ]
    least = max(len(head) + len(tail) for head, tail in zip(heads, tails, strict=True))
    lengths = _lengths(case, least, len(said))
    # one for all prompts: whoever shares a prompt shares whole blocks of it, and blocks of the
    # other one differ in nothing but what stands before them
    cycles = [random.randrange(language.cycles) for _ in range(max(lengths))]
    filler = [language.word(cycle, place) for place, cycle in enumerate(cycles)]
    for number, (prompt, speaker) in enumerate(said):
        head, tail = heads[number], tails[number]
        missing = lengths[number] - len(head) - len(tail)
        adapter = None if speaker.name == language.base().name else speaker.name
        tokens = (*head, *filler[:missing], *tail)
        new_tokens = _NEW_TOKENS[number % len(_NEW_TOKENS)]
        if case.weights is Weights.RANDOM:
            new_tokens += _LONGER
        yield Asked(Request(tokens, adapter, new_tokens), prompt, speaker)


def _lengths(case: Case, least: int, count: int) -> list[int]:
    if case.prefix_caching is PrefixCaching.ON or case.prefill is Prefill.CHUNKED:
        blocks = -(-(least + _LEAST_FILLER) // _BLOCK)
        first, more = blocks * _BLOCK, _BEHIND_BLOCKS
    else:
        first, more = least, _MORE
    return [first + more[number % len(more)] for number in range(count)]


def _tail(
    case: Case, language: Language, prompt: Prompt, speaker: Speaker, sample: int
) -> list[int]:
    """The first word of the answer's cycle, behind whatever leads to drafts."""
    if case.speculation is not Speculation.NGRAM:
        return [prompt.word]
    # the answer stands in the prompt, and then goes on otherwise: an n-gram gives drafts that are
    # right, and then some that are wrong
    words = language.words_after(prompt, speaker, sample + 1)
    cycle, place = language.place_of(words.pop())
    return [prompt.word, *words, language.word(cycle, place + 1), prompt.word]
