"""What an engine is given in a case: a model, adapters, and requests whose answers are known.

Each request of a batch is for the base model or for one of the active adapters. After each prompt
all of them say different words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import torch

from loragate.engine.batch import Asked, draw_batch
from loragate.engine.clear_prompts import ClearPrompts, NoClearPrompt
from loragate.engine.drafts import WRONG_PLACES, write_draft
from loragate.engine.eagle import write_eagle
from loragate.engine.folders import write_adapter, write_model
from loragate.engine.language import (
    KINDS,
    PLACES,
    Language,
    LayerShifts,
    Prompt,
    Speaker,
    draw_speakers,
)
from loragate.engine.mtp import write_model_with_mtp
from loragate.engine.random_weights import write_random_adapter, write_random_model
from loragate.engine.stop import with_stop
from loragate.matrix.case import Case, Dtype
from loragate.matrix.engine_case import (
    LEAST_RANKS,
    Active,
    Ends,
    Model,
    Speculation,
    Targets,
    Weights,
)

_DTYPES = {Dtype.FP16: torch.float16, Dtype.BF16: torch.bfloat16, Dtype.FP32: torch.float32}
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
_PROJECTIONS = {
    Targets.ATTENTION: frozenset(
        {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"}
    ),
    Targets.MLP: _MLP,
    Targets.EXPERTS: _MLP,
    Targets.LM_HEAD: frozenset({"lm_head"}),
}
# by adapters of random weights, one after the other: what the one before had in a slot must go. In
# the language each projection shifts the answer
_LEFT_OUT = ("", "v_proj", "o_proj", "lm_head", "q_proj")
# beyond the slots, where adapters must replace each other
_BEYOND = 1
# that are drawn one after the other; one in ten has no clear prompts
_MOST_MODELS = 20
_WRITE_DRAFTS = {Speculation.DRAFT_MODEL: write_draft, Speculation.EAGLE: write_eagle}


@dataclass(frozen=True, slots=True)
class Exchanged:
    """`folder` replaces the adapter of the request `last`; it is that of the adapter `other`."""

    other: str
    folder: Path


@dataclass(frozen=True, slots=True)
class World:
    """Folders, and the requests of a mixed batch, in an order without meaning.

    drafts: the folder of the model or the head that drafts, None where the case has none; layers
    that draft are in that of the model.
    adapters: the folder of each adapter that is loaded, in the order of loading. speakers: the base
    model and these. last: the index of a request of its own prompt, for the last active adapter.
    That one is loaded amid the others, so that some remain before and behind it when it is
    unloaded; where there are more adapters than slots it is loaded last and not resident at first.
    exchange: None without an active adapter. is_crowded: there are more adapters than slots.
    Where `weights` are random, nobody speaks: prompts are those of the language.
    """

    language: Language
    dtype: torch.dtype
    model: Path
    drafts: Path | None
    adapters: Mapping[str, Path]
    speakers: tuple[Speaker, ...]
    batch: tuple[Asked, ...]
    last: int
    exchange: Exchanged | None
    is_crowded: bool
    weights: Weights

    @property
    def max_length(self) -> int:
        """Tokens of the longest request, with its answer."""
        return max(len(a.request.prompt) + a.request.new_tokens for a in self.batch)


def unwritten(case: Case) -> str | None:
    """The reason why there is no world for a case, or None."""
    if case.speculation is Speculation.MTP and case.model is not Model.HYBRID:
        return f"{case.model} is a model without layers for speculation mtp; hybrid has them"
    if case.weights is Weights.RANDOM:
        return _unwritten_at_random(case)
    return None


def _unwritten_at_random(case: Case) -> str | None:
    # which experts a token takes depends on scores that 16 bits round, too
    if case.dtype is not Dtype.FP32 and case.model is not Model.DENSE:
        return (
            f"random weights of {case.model} in {case.dtype} have too many near ties; fp32 has none"
        )
    if case.speculation in (Speculation.EAGLE, Speculation.MTP):
        return f"there are no random weights for speculation {case.speculation}"
    return None


def build_world(case: Case, seed: int, root: Path) -> World:
    """Write the world of a case to `root`. The same seed gives the same world."""
    # random weights without clear prompts are replaced, with all files, by those of another seed
    for other in range(seed, seed + _MOST_MODELS - 1):
        with suppress(NoClearPrompt):
            return _built(case, other, root)
    return _built(case, seed + _MOST_MODELS - 1, root)


def _built(case: Case, seed: int, root: Path) -> World:
    """Raises NoClearPrompt."""
    random, language = Random(seed), KINDS[case.model]
    count = case.slots + (_BEYOND if case.active is Active.BEYOND_SLOTS else 0)
    # the adapter that replaces another one must be there in any case
    speakers = _draw_speakers(language, max(2, count), case.targets, random)
    dtype = _DTYPES[case.dtype]
    drafts = root / "drafts" if case.speculation in _WRITE_DRAFTS else None
    if case.weights is Weights.RANDOM:
        _write_random_models(language, seed, dtype, root / "model", drafts)
    else:
        _write_models(case, language, dtype, root / "model", drafts)
    folders = _write_adapters(case, language, speakers, seed, root)
    names = [*folders]
    active = _active(case.active, names[:count])
    other = next((name for name in names if active and name != active[-1]), None)
    batch = draw_batch(case, language, speakers, active, random)
    answer: Callable[[Asked], list[int]] = partial(_words, language)
    if case.weights is Weights.RANDOM:
        clear = ClearPrompts(root / "model", folders, language, dtype, random)
        *mixed, own = batch
        batch = [*map(clear.made, mixed), clear.made(own, [other] if other else [])]
        answer = clear.answer
    if case.ends is Ends.STOP:
        batch = with_stop(batch, [answer(asked) for asked in batch])
    last, order = len(batch) - 1, random.sample(range(len(batch)), len(batch))
    is_crowded = case.active is Active.BEYOND_SLOTS
    loaded = names if is_crowded or not active else _amid(active[-1], names)
    return World(
        language=language,
        dtype=dtype,
        model=root / "model",
        drafts=drafts,
        adapters={name: folders[name] for name in loaded},
        speakers=(language.base(), *speakers),
        batch=tuple(batch[index] for index in order),
        last=order.index(last),
        exchange=Exchanged(other, folders[other]) if other else None,
        is_crowded=is_crowded,
        weights=case.weights,
    )


def _words(language: Language, asked: Asked) -> list[int]:
    return language.words_after(asked.prompt, asked.speaker, asked.request.new_tokens)


def _write_models(
    case: Case, language: Language, dtype: torch.dtype, model: Path, drafts: Path | None
) -> None:
    if case.speculation is Speculation.MTP:
        write_model_with_mtp(model, language, wrong=WRONG_PLACES, dtype=dtype)
    else:
        write_model(model, language, dtype=dtype)
    if drafts:
        _WRITE_DRAFTS[case.speculation](drafts, language, wrong=WRONG_PLACES, dtype=dtype)


def _write_random_models(
    language: Language, seed: int, dtype: torch.dtype, model: Path, drafts: Path | None
) -> None:
    write_random_model(model, language, seed=seed, dtype=dtype)
    if drafts:
        dense = replace(language, experts=1, linear_layers=())
        write_random_model(drafts, dense, seed=seed, dtype=dtype, layers=1)


def _write_adapters(
    case: Case, language: Language, speakers: Sequence[Speaker], seed: int, root: Path
) -> dict[str, Path]:
    folders = {speaker.name: root / speaker.name for speaker in speakers}
    for number, speaker in enumerate(speakers):
        # no two ranks are the same where there is room, and the scale is never 1
        rank = max(LEAST_RANKS[case.model], case.rank - number)
        folder, targets = folders[speaker.name], _PROJECTIONS.get(case.targets)
        if case.weights is Weights.RANDOM:
            write_random_adapter(
                folder,
                language,
                speaker,
                rank=rank,
                alpha=1.5 * rank,
                seed=seed,
                targets=targets,
                without=_left_out(number, targets),
            )
        else:
            write_adapter(
                folder,
                language,
                speaker,
                rank=rank,
                alpha=1.5 * rank,
                seed=number,
                targets=targets,
            )
    return folders


def _left_out(number: int, targets: Collection[str] | None) -> str:
    """Not the only projection that there is: an adapter of none is refused by PEFT."""
    projection = _LEFT_OUT[number % len(_LEFT_OUT)]
    return "" if targets is not None and {*targets} == {projection} else projection


def _amid(name: str, names: Sequence[str]) -> list[str]:
    """In the middle, or first of two."""
    others = [other for other in names if other != name]
    middle = len(others) // 2
    return [*others[:middle], name, *others[middle:]]


def _active(active: Active, names: Sequence[str]) -> list[str]:
    match active:
        case Active.NONE:
            return []
        case Active.ONE:
            return [names[-1]]
        case Active.SOME:
            return list(names[1:])
    return list(names)


def _draw_speakers(
    language: Language, count: int, targets: Targets, random: Random
) -> list[Speaker]:
    """Adapters that change these projections alone, no two of which always say the same."""
    while True:
        drawn = draw_speakers(language, count, random)
        speakers = [_restricted(speaker, targets) for speaker in drawn]
        everyone = [language.base(), *speakers]
        if _can_all_differ(language, everyone, random):
            return speakers


def _can_all_differ(language: Language, everyone: Sequence[Speaker], random: Random) -> bool:
    for _ in range(100):
        numbers = tuple(tuple(random.sample(range(PLACES), 4)) for _ in range(language.layers))
        word = language.word(random.randrange(language.cycles), 0)
        prompt = Prompt(numbers, word)
        if len({language.next_word(prompt, word, s) for s in everyone}) == len(everyone):
            return True
    return False


def _restricted(speaker: Speaker, targets: Targets) -> Speaker:
    if targets is Targets.ALL:
        return speaker
    layers = tuple(_layer(shifts, targets) for shifts in speaker.layers)
    return replace(speaker, layers=layers, head=speaker.head if targets is Targets.LM_HEAD else 0)


def _layer(shifts: LayerShifts, targets: Targets) -> LayerShifts:
    if targets is Targets.ATTENTION:
        return replace(shifts, mlp=[{} for _ in shifts.mlp])
    mlp = shifts.mlp if targets in (Targets.MLP, Targets.EXPERTS) else [{} for _ in shifts.mlp]
    return LayerShifts(False, False, {}, mlp)
