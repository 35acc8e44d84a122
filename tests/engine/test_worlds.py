"""The requests of a case of engines, and what is known about their answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from loragate.engine.drafts import WRONG_PLACES, drafted_word
from loragate.engine.reference import Reference
from loragate.engine.world import World, build_world, unwritten
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.engine_case import (
    Active,
    Model,
    PrefixCaching,
    Speculation,
    Targets,
    Weights,
)


def case_of(**axes: object) -> Case:
    fixed = {"site": Site.ENGINE, "rank": 8, "slots": 2, "dtype": Dtype.FP32}
    return Case(**{**fixed, **axes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "axes",
    [
        {"speculation": Speculation.NGRAM, "prefix_caching": PrefixCaching.ON},
        {"model": Model.MOE, "targets": Targets.EXPERTS},
        {"targets": Targets.LM_HEAD, "active": Active.BEYOND_SLOTS},
        {"targets": Targets.ATTENTION, "dtype": Dtype.BF16},
        {"model": Model.HYBRID, "active": Active.BEYOND_SLOTS},
        {"model": Model.HYBRID, "targets": Targets.ATTENTION, "rank": 5},
        {"model": Model.MOE, "speculation": Speculation.EAGLE, "dtype": Dtype.BF16},
        {"model": Model.HYBRID, "speculation": Speculation.MTP, "dtype": Dtype.BF16},
    ],
    ids=["samples", "experts", "lm_head", "attention", "hybrid", "delta nets", "eagle", "mtp"],
)
def test_the_reference_says_the_words_of_each_request_behind_whatever_stands_in_its_prompt(
    axes: dict[str, object], tmp_path: Path
) -> None:
    world = build_world(case_of(**axes), 5, tmp_path)
    for asked in world.batch:
        request = asked.request
        words = world.language.words_after(asked.prompt, asked.speaker, request.new_tokens)
        folder = None if request.adapter is None else world.adapters[request.adapter]
        judged = Reference(world.model, folder).judge(request.prompt, words)
        assert [token.best for token in judged] == words
        assert min(token.margin for token in judged) > 6
    first = {
        asked.speaker.name: world.language.next_word(
            asked.prompt, asked.request.prompt[-1], asked.speaker
        )
        for asked in world.batch
        if asked.prompt == world.batch[0].prompt
    }
    assert len(set(first.values())) == len(first)


@pytest.mark.parametrize(
    ("active", "used", "loaded"),
    [
        (Active.NONE, 0, 2),
        (Active.ONE, 1, 2),
        (Active.SOME, 1, 2),
        (Active.ALL, 2, 2),
        (Active.BEYOND_SLOTS, 3, 3),
    ],
)
def test_a_batch_has_base_rows_and_as_many_adapters_as_its_case_says(
    active: Active, used: int, loaded: int, tmp_path: Path
) -> None:
    world = build_world(case_of(active=active), 7, tmp_path)
    names = {asked.request.adapter for asked in world.batch}
    assert None in names
    assert (len(names - {None}), len(world.adapters)) == (used, loaded)
    last = world.batch[world.last].request
    if world.exchange is None:
        assert active is Active.NONE
        return
    assert last.adapter not in (None, world.exchange.other)
    assert world.exchange.folder == world.adapters[world.exchange.other]


def test_an_adapter_that_is_unloaded_was_loaded_amid_the_others(tmp_path: Path) -> None:
    for slots, active, last, loaded in (
        (1, Active.ALL, 1, [1, 2]),
        (2, Active.ALL, 2, [2, 1]),
        (3, Active.ONE, 3, [1, 3, 2]),
        # it is loaded when there is no slot left
        (2, Active.BEYOND_SLOTS, 3, [1, 2, 3]),
    ):
        world = build_world(case_of(slots=slots, active=active), 7, tmp_path / f"{slots} {active}")
        assert world.batch[world.last].request.adapter == f"adapter-{last}"
        assert [*world.adapters] == [f"adapter-{number}" for number in loaded]


def targets_of(world: World) -> list[set[str]]:
    return [
        set(json.loads((folder / "adapter_config.json").read_text())["target_modules"])
        for folder in world.adapters.values()
    ]


def test_an_adapter_has_factors_for_its_targets_alone(tmp_path: Path) -> None:
    for targets, wanted in (
        (Targets.MLP, {"gate_proj", "up_proj", "down_proj"}),
        (Targets.LM_HEAD, {"lm_head"}),
    ):
        world = build_world(case_of(targets=targets), 3, tmp_path / targets)
        assert targets_of(world) == [wanted, wanted]


def test_no_two_adapters_have_the_same_rank_and_no_scale_is_one(tmp_path: Path) -> None:
    world = build_world(case_of(targets=Targets.LM_HEAD, slots=3), 3, tmp_path)
    configs = [
        json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        for folder in world.adapters.values()
    ]
    assert sorted(config["r"] for config in configs) == [6, 7, 8]
    assert {config["lora_alpha"] / config["r"] for config in configs} == {1.5}


def test_no_adapter_of_random_weights_lacks_the_only_projection_that_is_asked_for(
    tmp_path: Path,
) -> None:
    case = case_of(weights=Weights.RANDOM, targets=Targets.LM_HEAD, slots=4, active=Active.NONE)
    assert targets_of(build_world(case, 7, tmp_path)) == [{"lm_head"}] * 4


@pytest.mark.parametrize("model", [Model.DENSE, Model.MOE])
@pytest.mark.parametrize("active", [Active.NONE, Active.ALL])
def test_a_model_that_drafts_is_right_and_wrong_whoever_speaks(
    model: Model, active: Active, tmp_path: Path
) -> None:
    """Of the first drafts of a batch some are accepted and some rejected, by any engine."""
    for seed in range(3):
        case = case_of(model=model, active=active, speculation=Speculation.DRAFT_MODEL)
        world = build_world(case, seed, tmp_path / str(seed))
        assert world.drafts is not None
        drafts, right = Reference(world.drafts), []
        for asked in world.batch:
            first, second = world.language.words_after(asked.prompt, asked.speaker, 2)
            drafted = drafts.next_tokens([*asked.request.prompt, first], [second])
            right.append(drafted == [second])
        assert set(right) == {True, False}


def test_an_eagle_head_is_a_folder_of_its_own(tmp_path: Path) -> None:
    world = build_world(case_of(speculation=Speculation.EAGLE), 3, tmp_path)
    assert world.drafts is not None
    config = json.loads((world.drafts / "config.json").read_text())
    assert config["architectures"] == ["Eagle3Qwen3ForCausalLM"]


def weights_of(world: World) -> set[str]:
    with safe_open(world.model / "model.safetensors", "pt") as weights:
        return set(weights.keys())


def test_layers_that_draft_are_in_the_folder_of_the_model_and_there_alone_where_asked_for(
    tmp_path: Path,
) -> None:
    plain, drafting = (
        build_world(case_of(model=Model.HYBRID, speculation=found), 3, tmp_path / found)
        for found in (Speculation.NONE, Speculation.MTP)
    )
    assert drafting.drafts is None
    more = weights_of(drafting) - weights_of(plain)
    assert weights_of(plain) < weights_of(drafting)
    assert {name.partition(".")[0] for name in more} == {"mtp"}


@pytest.mark.parametrize("active", [Active.NONE, Active.ALL])
def test_a_batch_for_mtp_has_words_that_are_drafted_right_and_words_that_are_not(
    active: Active, tmp_path: Path
) -> None:
    for seed in range(8):
        case = case_of(model=Model.HYBRID, active=active, speculation=Speculation.MTP)
        world, right = build_world(case, seed, tmp_path), set()
        for asked in world.batch:
            first, second = world.language.words_after(asked.prompt, asked.speaker, 2)
            drafted = drafted_word(world.language, asked.prompt.word, first, WRONG_PLACES)
            right.add(drafted == second)
        assert right == {True, False}


def test_a_speaker_of_delta_nets_has_all_its_projections(tmp_path: Path) -> None:
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    linear = {"in_proj_qkvz", "in_proj_ba", "out_proj"}
    world = build_world(case_of(model=Model.HYBRID, targets=Targets.ATTENTION), 3, tmp_path)
    assert targets_of(world) == [attention | linear] * 2


def test_what_has_no_checkpoint_says_so() -> None:
    for model in (Model.DENSE, Model.MOE):
        reason = f"{model} is a model without layers for speculation mtp; hybrid has them"
        assert unwritten(case_of(model=model, speculation=Speculation.MTP)) == reason
    assert unwritten(case_of(model=Model.HYBRID, speculation=Speculation.MTP)) is None
    for found in (Speculation.EAGLE, Speculation.DRAFT_MODEL, Speculation.NONE):
        assert unwritten(case_of(speculation=found, model=Model.HYBRID)) is None


def test_random_weights_are_written_where_near_ties_are_rare_and_drafts_come_from_a_model() -> None:
    random = {"weights": Weights.RANDOM}
    assert unwritten(case_of(**random)) is None
    assert unwritten(case_of(speculation=Speculation.DRAFT_MODEL, **random)) is None
    for dtype in (Dtype.FP16, Dtype.BF16):
        assert unwritten(case_of(dtype=dtype, **random)) is None
        reason = f"random weights of moe in {dtype} have too many near ties; fp32 has none"
        assert unwritten(case_of(dtype=dtype, model=Model.MOE, **random)) == reason
    eagle = case_of(speculation=Speculation.EAGLE, **random)
    assert unwritten(eagle) == "there are no random weights for speculation eagle"
    mtp = case_of(speculation=Speculation.MTP, model=Model.HYBRID, **random)
    assert unwritten(mtp) == "there are no random weights for speculation mtp"
