"""A language whose every token says which adapter produced it. Pure.

A word is a place on one of several cycles. The next word is on the same cycle, some places ahead:
how many is the sum of numbers that stand in the prompt, one for each layer, and of the shifts of
the adapter. Of the numbers that a prompt has for a layer the adapter selects one. So a single token
tells which adapter computed it, and whether all parts of that adapter took part.

    prompt: BOS, four numbers for each layer, a word
    number n of a layer is read where (n >> 1, n & 1) are the switches of q and k in that layer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from loragate.matrix.engine_case import MOST_ADAPTERS

PLACES = 13
# of a prompt and a layer: selected by a switch of q and one of k
CHOICES = 4
BOS = 0
# of one prompt, with the base model; a cycle has room for more, but hardly any prompt
MOST_SPEAKERS = 1 + MOST_ADAPTERS
# what the parts of linear attention may shift: half the sum of any two is no shift that is near
BA_SHIFTS = (3, 6, 9)
Z_SHIFT = 2


class Part(Enum):
    """A projection of a layer that shifts the next word."""

    V = "v_proj"
    O = "o_proj"  # noqa: E741
    # of linear attention only
    Z = "z"
    BA = "in_proj_ba"
    GATE = "gate_proj"
    UP = "up_proj"
    DOWN = "down_proj"


@dataclass(frozen=True, slots=True)
class LayerShifts:
    """What an adapter changes in a layer.

    q, k: whether these projections select another number of the prompt.
    attention: shifts of v and o, in linear attention of z and ba as well.
    mlp: shifts of gate, up and down: one number for all words, or one for each expert.
    """

    q: bool
    k: bool
    attention: Mapping[Part, int]
    # by expert; a layer without experts has one
    mlp: Sequence[Mapping[Part, int]]

    @property
    def choice(self) -> int:
        return 2 * self.q + self.k

    def shift(self, expert: int) -> int:
        return sum(self.attention.values()) + sum(self.mlp[expert].values())


@dataclass(frozen=True, slots=True)
class Speaker:
    """An adapter, or the base model: `shifts` of each layer, and that of the output layer."""

    name: str
    layers: tuple[LayerShifts, ...]
    head: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """`numbers` of each layer, and the first word."""

    numbers: tuple[tuple[int, ...], ...]
    word: int


@dataclass(frozen=True, slots=True)
class Language:
    """`cycles` of PLACES words each; models of `layers` layers with `experts` pairs of experts,
    1 where they have none. The words of a cycle use the same experts. `linear_layers` have linear
    attention; ValueError for such a model without experts, which engines do not load. Adapters
    shift the last word unless `adapts_head` is false."""

    cycles: int = 16
    layers: int = 2
    experts: int = 1
    linear_layers: tuple[int, ...] = ()
    adapts_head: bool = True

    def __post_init__(self) -> None:
        if self.linear_layers and self.experts == 1:
            raise ValueError("a language with linear_layers must have 2 experts or more (got 1)")

    @property
    def first_word(self) -> int:
        return 1 + self.layers * CHOICES * PLACES

    @property
    def num_tokens(self) -> int:
        return self.first_word + self.cycles * PLACES

    def word(self, cycle: int, place: int) -> int:
        return self.first_word + cycle * PLACES + place % PLACES

    def place_of(self, word: int) -> tuple[int, int]:
        """The cycle and the place of a word. ValueError for another token."""
        if not self.first_word <= word < self.num_tokens:
            raise ValueError(
                f"token must be a word, {self.first_word} to {self.num_tokens - 1} (got {word})"
            )
        return divmod(word - self.first_word, PLACES)

    def number(self, layer: int, choice: int, value: int) -> int:
        """The token of a number that a layer may read."""
        return 1 + (layer * CHOICES + choice) * PLACES + value % PLACES

    def expert_of(self, cycle: int) -> int:
        return cycle % self.experts

    def base(self) -> Speaker:
        """The model without an adapter."""
        none = LayerShifts(False, False, {}, [{} for _ in range(self.experts)])
        return Speaker("base", (none,) * self.layers)

    def next_word(self, prompt: Prompt, word: int, speaker: Speaker) -> int:
        """The word after `word`."""
        cycle, place = self.place_of(word)
        expert = self.expert_of(cycle)
        for numbers, layer in zip(prompt.numbers, speaker.layers, strict=True):
            place += numbers[layer.choice] + layer.shift(expert)
        return self.word(cycle, place + speaker.head)

    def words_after(self, prompt: Prompt, speaker: Speaker, count: int) -> list[int]:
        """The `count` words after a prompt."""
        words = [prompt.word]
        for _ in range(count):
            words.append(self.next_word(prompt, words[-1], speaker))
        return words[1:]

    def tokens(self, prompt: Prompt) -> list[int]:
        """A prompt as the model reads it."""
        numbers = [
            self.number(layer, choice, value)
            for layer, values in enumerate(prompt.numbers)
            for choice, value in enumerate(values)
        ]
        return [BOS, *numbers, prompt.word]

    def speakers_of(
        self, prompt: Prompt, word: int, after: int, speakers: Sequence[Speaker]
    ) -> list[str]:
        """The names of those who say `after` after `word`."""
        return [s.name for s in speakers if self.next_word(prompt, word, s) == after]


# what checkpoints are written for
KINDS = {
    "dense": Language(),
    "moe": Language(experts=4),
    # as the real model: full attention in each fourth layer. vLLM 0.26 refuses adapters of its head
    "hybrid": Language(layers=4, experts=4, linear_layers=(0, 1, 2), adapts_head=False),
}


def draw_speakers(language: Language, count: int, random: Random) -> list[Speaker]:
    """Adapters in which every projection takes part, and of which no two, nor one and the base
    model, always say the same word."""
    found = [language.base()]
    while len(found) <= count:
        speaker = _drawn(language, f"adapter-{len(found)}", random)
        if all(_can_differ(language, speaker, other) for other in found):
            found.append(speaker)
    return found[1:]


def _drawn(language: Language, name: str, random: Random) -> Speaker:
    def shifts(*parts: Part) -> dict[Part, int]:
        return {part: random.randrange(1, PLACES) for part in parts}

    def layer_shifts(layer: int) -> LayerShifts:
        q, k = random.random() < 0.5, random.random() < 0.5
        attention = shifts(Part.V, Part.O)
        if layer in language.linear_layers:
            attention |= {Part.Z: Z_SHIFT, Part.BA: random.choice(BA_SHIFTS)}
        mlp = [shifts(Part.GATE, Part.UP, Part.DOWN) for _ in range(language.experts)]
        return LayerShifts(q, k, attention, mlp)

    layers = tuple(layer_shifts(layer) for layer in range(language.layers))
    head = random.randrange(1, PLACES) if language.adapts_head else 0
    return Speaker(name, layers, head)


def _can_differ(language: Language, one: Speaker, other: Speaker) -> bool:
    """Whether for each expert there are prompts after which the two say different words."""
    if [layer.choice for layer in one.layers] != [layer.choice for layer in other.layers]:
        return True
    return all(
        _shift(one, expert) % PLACES != _shift(other, expert) % PLACES
        for expert in range(language.experts)
    )


def _shift(speaker: Speaker, expert: int) -> int:
    return sum(layer.shift(expert) for layer in speaker.layers) + speaker.head


def draw_prompt(language: Language, speakers: Sequence[Speaker], random: Random) -> Prompt:
    """A prompt after which all speakers, of which there are at most 8, say different words and none
    the same word again, and which has different numbers for each layer."""
    assert len(speakers) <= MOST_SPEAKERS, "there would be no room for so many on a cycle"
    while True:
        numbers = tuple(
            tuple(random.sample(range(PLACES), CHOICES)) for _ in range(language.layers)
        )
        word = language.word(random.randrange(language.cycles), random.randrange(PLACES))
        prompt = Prompt(numbers, word)
        said = {language.next_word(prompt, word, speaker) for speaker in speakers}
        if len(said - {word}) == len(speakers):
            return prompt
