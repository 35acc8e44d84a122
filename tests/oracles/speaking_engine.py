"""An engine that is right: it speaks the language of a world by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from loragate.engine.language import Speaker
from loragate.engine.requests import Completion, EngineCounts, Request
from loragate.engine.world import World

# of each call
COUNTS = EngineCounts(3, 2, 1, 9, others_launched=0)
# of the start of an engine
WARM_UP = EngineCounts(5, 5, 5, 5, 4, others_launched=2, others_captured=0)


class Speaking:
    """An engine that speaks the language of a world by itself."""

    def __init__(self, world: World) -> None:
        self.world, self.language = world, world.language
        self.prompts = {asked.request.prompt: asked.prompt for asked in world.batch}
        speakers = {speaker.name: speaker for speaker in world.speakers}
        self.folders = {folder: speakers[name] for name, folder in world.adapters.items()}
        self.loaded: dict[str | None, Speaker] = {None: self.language.base()}
        self.calls = 0

    def load(self, name: str, folder: Path) -> None:
        self.loaded[name] = self.folders[folder]

    def unload(self, name: str) -> None:
        del self.loaded[name]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.calls += 1
        return [Completion(self.answer(request)) for request in requests]

    def answer(self, request: Request) -> tuple[int, ...]:
        speaker, prompt = self.loaded[request.adapter], self.prompts[request.prompt]
        return tuple(self.language.words_after(prompt, speaker, request.new_tokens))

    def counts(self) -> EngineCounts:
        each = {name: count for name, count in asdict(COUNTS).items() if count is not None}
        done = {name: getattr(WARM_UP, name) + self.calls * each[name] for name in each}
        return replace(WARM_UP, **done)

    def trace(self, tokens: Sequence[int], adapter: str | None) -> dict[str, Tensor]:
        return {}

    def close(self) -> None:
        self.loaded.clear()
