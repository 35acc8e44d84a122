"""Checkpoints of random weights: all that an engine keeps takes part in what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from loragate.engine import clear_prompts
from loragate.engine.batch import Asked
from loragate.engine.clear_prompts import ClearPrompts, NoClearPrompt
from loragate.engine.folders import digests
from loragate.engine.judge import MOST_NOISE, Judge
from loragate.engine.language import KINDS
from loragate.engine.random_weights import write_random_model
from loragate.engine.reference import Reference
from loragate.engine.requests import Completion, Request
from loragate.engine.world import World, build_world
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.engine_case import (
    Active,
    Model,
    PrefixCaching,
    Speculation,
    Targets,
    Weights,
)


def world_of(root: Path, seed: int = 3, **axes: Any) -> World:
    fixed = {"site": Site.ENGINE, "rank": 8, "slots": 2, "dtype": Dtype.FP32}
    return build_world(Case(**{**fixed, "weights": Weights.RANDOM, **axes}), seed, root)


def last_of(world: World) -> Request:
    return world.batch[world.last].request


def said_by(reference: Reference, request: Request) -> list[int]:
    tokens = list(request.prompt)
    for _ in range(request.new_tokens):
        tokens.append(int(reference.logits(tokens)[-1].argmax()))
    return tokens[len(request.prompt) :]


class Said:
    """What the reference says to each request of a world."""

    def __init__(self, world: World) -> None:
        self.world, self.references = world, dict[str | None, Reference]()
        self.answers = [self.answer(asked) for asked in world.batch]

    def of(self, name: str | None) -> Reference:
        if name not in self.references:
            folder = None if name is None else self.world.adapters[name]
            self.references[name] = Reference(self.world.model, folder)
        return self.references[name]

    def answer(self, asked: Asked) -> list[int]:
        return said_by(self.of(asked.request.adapter), asked.request)

    def changed(self, wrong: Callable[[Tensor, int], dict[str, Tensor]]) -> list[int]:
        """How many tokens of each answer are others with these arguments of the model, made of
        places and the length of the prompt."""
        counts = []
        for asked, answer in zip(self.world.batch, self.answers, strict=True):
            length = len(asked.request.prompt)
            tokens = torch.tensor([[*asked.request.prompt, *answer]])
            given = wrong(torch.arange(tokens.shape[1]), length)
            with torch.no_grad():
                logits = self.of(asked.request.adapter).model(tokens, **given).logits[0]
            says = logits[length - 1 : -1].argmax(-1).tolist()
            counts.append(sum(a != b for a, b in zip(says, answer, strict=True)))
        return counts


IN_FP32 = [(Model.DENSE, Dtype.FP32), (Model.MOE, Dtype.FP32)]


@pytest.fixture(scope="module", params=[*IN_FP32, (Model.DENSE, Dtype.BF16)], ids="-".join)
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Said:
    model, dtype = request.param
    return Said(world_of(tmp_path_factory.mktemp(model), model=model, dtype=dtype))


def test_places_take_part(said: Said) -> None:
    """Without places at all, and with an answer that begins one place too late."""
    nowhere = said.changed(lambda places, _: {"position_ids": (0 * places)[None]})
    late = said.changed(lambda places, start: {"position_ids": (places + (places >= start))[None]})
    assert min(nowhere) > 0
    assert sum(late) > len(late)


def test_tokens_of_the_answer_are_read_from_the_cache(said: Said) -> None:
    """Its first tokens are hidden from the later ones."""

    def hidden(places: Tensor, start: int) -> dict[str, Tensor]:
        seen = places[:, None] >= places
        first = (places >= start) & (places < start + 2)
        seen &= ~(first & (places[:, None] > start + 1))
        return {"attention_mask": seen[None, None]}

    assert sum(said.changed(hidden)) > len(said.answers)


def test_each_adapter_speaks_for_itself(said: Said) -> None:
    for asked, answer in zip(said.world.batch, said.answers, strict=True):
        for name in {None, *said.world.adapters} - {asked.request.adapter}:
            assert said.of(name).next_tokens(asked.request.prompt, answer) != answer


# of 16 bits another test says that there are none
@pytest.mark.parametrize("said", IN_FP32, indirect=True, ids="-".join)
def test_near_ties_are_rare_in_fp32(said: Said) -> None:
    world, requests = said.world, [asked.request for asked in said.world.batch]
    judge = Judge(world.model, world.adapters, dtype=torch.float32)
    report = judge.judge(requests, [Completion(tuple(answer)) for answer in said.answers])
    assert (report.near_ties, report.defects) == (0, ())
    margins = [
        token.margin
        for request, answer in zip(requests, said.answers, strict=True)
        for token in said.of(request.adapter).judge(request.prompt, answer)
    ]
    assert sorted(margins)[len(margins) // 2] > 1000 * report.noise


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
def test_in_16_bits_each_answer_is_clear_and_so_is_that_of_the_adapter_that_is_exchanged(
    tmp_path: Path, dtype: Dtype, seed: int
) -> None:
    """Beyond what the judge lets pass as noise, and beyond what rounding all modules does."""
    world = world_of(tmp_path, seed, dtype=dtype, speculation=Speculation.NGRAM)
    assert world.exchange is not None
    last = last_of(world)
    requests = [asked.request for asked in world.batch]
    requests.append(replace(last, adapter=world.exchange.other))
    judge = Judge(world.model, world.adapters, dtype=world.dtype)
    for request in requests:
        folder = None if request.adapter is None else world.adapters[request.adapter]
        reference = Reference(world.model, folder)
        lead = 2 * MOST_NOISE[world.dtype]
        answer = reference.sure_answer(request.prompt, request.new_tokens, lead)
        assert answer == said_by(reference.rounded(world.dtype), request)
        report = judge.judge([request], [Completion(tuple(answer))])
        assert (report.near_ties, report.defects) == (0, ())


@pytest.mark.parametrize(("model", "dtype"), [(Model.DENSE, Dtype.BF16), (Model.MOE, Dtype.FP16)])
def test_a_rounded_reference_computes_what_transformers_does_in_that_dtype(
    tmp_path: Path, model: Model, dtype: Dtype
) -> None:
    """Which keeps buffers, such as the frequencies of rotary embeddings, in fp32."""
    world = world_of(tmp_path, model=model, dtype=dtype)
    served = AutoModelForCausalLM.from_pretrained(
        world.model, dtype=world.dtype, experts_implementation="eager"
    )
    exact = Reference(world.model)
    rounded = exact.rounded(world.dtype)
    prompt = list(last_of(world).prompt)
    with torch.no_grad():
        logits = served.eval()(torch.tensor([prompt])).logits[0].double()
    assert torch.equal(rounded.logits(prompt), logits)
    # the exact one remains what it was
    assert not torch.equal(exact.logits(prompt), logits)


@pytest.mark.parametrize("seed", range(3))
def test_no_answer_merely_repeats_a_token(tmp_path: Path, seed: int) -> None:
    said = Said(world_of(tmp_path, seed, dtype=Dtype.BF16))
    assert min(len(set(answer)) for answer in said.answers) > 3


def test_a_model_that_has_no_clear_prompt_is_replaced_with_all_files_by_that_of_another_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = world_of(tmp_path / "next", seed=4)
    judged, asked = ClearPrompts._is_clear, count()
    tries = clear_prompts._MOST_PROMPTS
    monkeypatch.setattr(
        ClearPrompts,
        "_is_clear",
        lambda self, *given: next(asked) >= tries and judged(self, *given),
    )
    found = world_of(tmp_path / "found", seed=3)
    write_random_model(tmp_path / "alone", KINDS[Model.DENSE], seed=4, dtype=torch.float32)
    assert digests(found.model) == digests(tmp_path / "alone")
    assert digests(tmp_path / "found") == digests(tmp_path / "next")
    assert found.batch == wanted.batch


def test_a_search_that_finds_no_clear_prompt_ends_and_says_of_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClearPrompts, "_is_clear", lambda *given: False)
    with pytest.raises(NoClearPrompt, match="none of 500 prompts has a clear answer of the model"):
        world_of(tmp_path)


def test_prompts_of_16_bits_share_all_but_their_last_tokens(tmp_path: Path) -> None:
    """Else a prefix that is kept for another adapter would not be found."""
    on = PrefixCaching.ON
    world = world_of(tmp_path, dtype=Dtype.BF16, prefix_caching=on)
    prompts = [asked.request.prompt for asked in world.batch if asked.request != last_of(world)]
    least = min(map(len, prompts)) - 5
    assert least >= 2 * 16
    assert len({prompt[:least] for prompt in prompts}) == 1


def test_a_model_of_fewer_layers_drafts_what_is_right_and_what_is_wrong(tmp_path: Path) -> None:
    said = Said(world_of(tmp_path, speculation=Speculation.DRAFT_MODEL))
    assert said.world.drafts is not None
    assert json.loads((said.world.drafts / "config.json").read_text())["num_hidden_layers"] == 1
    drafts = Reference(said.world.drafts)
    right = [
        a == b
        for asked, answer in zip(said.world.batch, said.answers, strict=True)
        for a, b in zip(drafts.next_tokens(asked.request.prompt, answer), answer, strict=True)
    ]
    assert len(right) / 5 < sum(right) < 4 * len(right) / 5


def test_each_adapter_but_the_first_lacks_another_projection(tmp_path: Path) -> None:
    def targets(**axes: Any) -> list[set[str]]:
        world = world_of(tmp_path, active=Active.BEYOND_SLOTS, **axes)
        configs = [folder / "adapter_config.json" for folder in world.adapters.values()]
        return [set(json.loads(path.read_text())["target_modules"]) for path in configs]

    first, second, third = targets()
    assert (first - second, first - third) == ({"v_proj"}, {"o_proj"})
    assert targets(targets=Targets.MLP) == [{"gate_proj", "up_proj", "down_proj"}] * 3


def test_shared_experts_have_factors_that_change_nothing(tmp_path: Path) -> None:
    world = world_of(tmp_path, model=Model.HYBRID)
    for folder in world.adapters.values():
        factors = load_file(folder / "adapter_model.safetensors")
        b = {name: value for name, value in factors.items() if name.endswith("lora_B.weight")}
        still = {name for name, value in b.items() if not value.any()}
        assert still
        assert still == {name for name in b if ".shared_expert." in name}


def test_the_same_seed_gives_the_same_weights_and_another_one_gives_others(tmp_path: Path) -> None:
    files = [
        (world_of(tmp_path / str(n), seed=seed).model / "model.safetensors").read_bytes()
        for n, seed in enumerate((3, 3, 4))
    ]
    assert files[0] == files[1] != files[2]
