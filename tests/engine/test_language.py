"""Checkpoints whose every token says which adapter produced it, run by transformers and PEFT."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from loragate.engine.folders import write_adapter, write_model
from loragate.engine.language import (
    PLACES,
    Language,
    LayerShifts,
    Part,
    Prompt,
    Speaker,
    draw_prompt,
    draw_speakers,
)
from loragate.engine.reference import Reference

DENSE, EXPERTS = Language(cycles=4), Language(cycles=8, experts=4)
HYBRID = Language(cycles=8, layers=4, experts=4, linear_layers=(0, 1, 2))
LANGUAGES = pytest.mark.parametrize(
    "language", [DENSE, EXPERTS, HYBRID], ids=["dense", "experts", "hybrid"]
)
RANKS = (5, 8, 16)


class Folders:
    """A model and three adapters of different rank and scale."""

    def __init__(self, root: Path, language: Language) -> None:
        self.language, self.model = language, root / "model"
        self.speakers = draw_speakers(language, len(RANKS), Random(5))
        write_model(self.model, language, dtype=torch.bfloat16)
        self.adapters: dict[str, Path | None] = {"base": None}
        for speaker, rank in zip(self.speakers, RANKS, strict=True):
            folder = root / speaker.name
            write_adapter(folder, language, speaker, rank=rank, alpha=12, seed=rank)
            self.adapters[speaker.name] = folder
        self.everyone = [language.base(), *self.speakers]
        random = Random(7)
        self.prompts = [draw_prompt(language, self.everyone, random) for _ in range(8)]


@pytest.fixture(scope="module", params=[DENSE, EXPERTS, HYBRID], ids=["dense", "experts", "hybrid"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("language"), request.param)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_every_adapter_says_its_own_words_with_a_wide_margin(
    folders: Folders, dtype: torch.dtype
) -> None:
    for speaker in folders.everyone:
        exact = Reference(folders.model, folders.adapters[speaker.name])
        reference = exact.rounded(dtype)
        for prompt in folders.prompts:
            words = folders.language.words_after(prompt, speaker, 3 * PLACES)
            judged = reference.judge(folders.language.tokens(prompt), words)
            assert [token.best for token in judged] == words
            # the least that words of neighbouring places differ by is 0.115 * 80
            assert min(token.margin for token in judged) > 6


def test_the_words_of_another_adapter_are_wrong_from_the_first_one(folders: Folders) -> None:
    for prompt in folders.prompts:
        first = {
            speaker.name: folders.language.words_after(prompt, speaker, 1)[0]
            for speaker in folders.everyone
        }
        assert len(set(first.values())) == len(folders.everyone)
        for name, word in first.items():
            said = folders.language.speakers_of(prompt, prompt.word, word, folders.everyone)
            assert said == [name]


def test_peft_says_the_same_words_as_the_reference(folders: Folders) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    prompt = folders.prompts[0]
    for speaker in folders.speakers:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folders.model, dtype=torch.float64, experts_implementation="eager"
        )
        adapted = peft.PeftModel.from_pretrained(model, folders.adapters[speaker.name]).double()
        words = folders.language.words_after(prompt, speaker, 20)
        tokens = [*folders.language.tokens(prompt), *words]
        with torch.no_grad():
            logits = adapted(torch.tensor([tokens])).logits[0]
        reference = Reference(folders.model, folders.adapters[speaker.name])
        torch.testing.assert_close(logits, reference.logits(tokens), rtol=0, atol=1e-6)
        assert logits.argmax(-1)[-len(words) - 1 : -1].tolist() == words
        # with the caches of a decoder: keys and values, states of convolutions and of delta rules
        said = adapted.generate(
            torch.tensor([folders.language.tokens(prompt)]), max_new_tokens=20, do_sample=False
        )
        assert said[0].tolist() == tokens


@pytest.mark.parametrize("strange", [-1, 10**6])
def test_a_token_of_no_vocabulary_and_all_behind_it_are_defects(
    folders: Folders, strange: int
) -> None:
    prompt = draw_prompt(folders.language, folders.speakers, Random(6))
    words = folders.language.words_after(prompt, folders.language.base(), 4)
    reference = Reference(folders.model)
    tokens = folders.language.tokens(prompt)
    found = reference.judge(tokens, [*words[:2], strange, words[3]])
    assert [token.gap for token in found] == [0, 0, math.inf, math.inf]
    assert [token.best for token in found[:3]] == words[:3]
    assert reference.judge(tokens, [strange])[0].best == words[0]
    assert reference.judge(tokens, []) == []


def only(speaker: Speaker, layer: int, changed: LayerShifts) -> Speaker:
    layers = list(speaker.layers)
    layers[layer] = changed
    return replace(speaker, layers=tuple(layers))


def without_parts(language: Language, speaker: Speaker) -> dict[str, Speaker]:
    """The speaker with each of its parts left out, by the name of the part."""
    found = {"lm_head": replace(speaker, head=0)}
    for number, layer in enumerate(speaker.layers):
        for part in layer.attention:
            others = {p: s for p, s in layer.attention.items() if p is not part}
            found[f"{number} {part.value}"] = only(
                speaker, number, replace(layer, attention=others)
            )
        for expert in range(language.experts):
            for part in (Part.GATE, Part.UP, Part.DOWN):
                mlp = [dict(shifts) for shifts in layer.mlp]
                del mlp[expert][part]
                found[f"{number} {part.value} {expert}"] = only(
                    speaker, number, replace(layer, mlp=mlp)
                )
        found[f"{number} q"] = only(speaker, number, replace(layer, q=not layer.q))
        found[f"{number} k"] = only(speaker, number, replace(layer, k=not layer.k))
    return found


@LANGUAGES
def test_each_part_of_an_adapter_changes_the_words(language: Language) -> None:
    random = Random(11)
    (speaker,) = draw_speakers(language, 1, random)
    prompts = [draw_prompt(language, [speaker], random) for _ in range(64)]
    for name, changed in without_parts(language, speaker).items():
        differ = [
            language.next_word(prompt, prompt.word, changed)
            != language.next_word(prompt, prompt.word, speaker)
            for prompt in prompts
        ]
        # parts of an expert change the words of the cycles that use it
        own = name.rpartition(" ")[2]
        if language.experts > 1 and own.isdigit():
            cycles = [language.place_of(prompt.word)[0] for prompt in prompts]
            wanted = [language.expert_of(cycle) == int(own) for cycle in cycles]
        else:
            wanted = [True] * len(prompts)
        assert differ == wanted, name


# what of a projection of linear attention an adapter changes: [key heads, rows of each, rank]
BLOCKS = {
    "q": ("in_proj_qkvz", slice(0, 128)),
    "k": ("in_proj_qkvz", slice(128, 256)),
    "v": ("in_proj_qkvz", slice(256, 512)),
    "z": ("in_proj_qkvz", slice(512, 768)),
    "b": ("in_proj_ba", slice(0, 2)),
    "a": ("in_proj_ba", slice(2, 4)),
    "out": ("out_proj", slice(None)),
}


def test_linear_attention_without_a_part_of_its_adapter_says_wrong_words(tmp_path: Path) -> None:
    random = Random(5)
    write_model(tmp_path / "model", HYBRID, dtype=torch.bfloat16)
    # one that selects by q and by k
    speaker = draw_speakers(HYBRID, 1, random)[0]
    speaker = only(speaker, 1, replace(speaker.layers[1], q=True, k=True))
    write_adapter(tmp_path, HYBRID, speaker, rank=8, alpha=12)
    prompt = draw_prompt(HYBRID, [HYBRID.base(), speaker], random)
    words = HYBRID.words_after(prompt, speaker, 13)
    whole = load_file(tmp_path / "adapter_model.safetensors")
    for block, (module, rows) in BLOCKS.items():
        name = f"base_model.model.model.layers.1.linear_attn.{module}.lora_B.weight"
        heads = 1 if block == "out" else 2
        factor = whole[name].clone()
        factor.view(heads, -1, 8)[:, rows] = 0
        save_file(whole | {name: factor}, tmp_path / "adapter_model.safetensors")
        said = Reference(tmp_path / "model", tmp_path).next_tokens(HYBRID.tokens(prompt), words)
        assert not any(a == b for a, b in zip(said, words, strict=True)), block


@pytest.mark.parametrize("state", ["get_conv_state", "get_recurrent_state"])
def test_linear_attention_that_has_lost_a_state_says_wrong_words(
    tmp_path: Path, state: str
) -> None:
    transformers = pytest.importorskip("transformers")
    write_model(tmp_path, HYBRID, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="eager"
    )
    prompt = draw_prompt(HYBRID, [HYBRID.base()], Random(5))
    first, second = HYBRID.words_after(prompt, HYBRID.base(), 2)
    said = []
    for layer in (None, 0, 1, 2):
        with torch.no_grad():
            cache = model(torch.tensor([HYBRID.tokens(prompt)])).past_key_values
            if layer is not None:
                getattr(cache, state)(layer, state_idx=0).zero_()
            logits = model(torch.tensor([[first]]), past_key_values=cache).logits
        said.append(int(logits[0, -1].argmax()))
    assert said[0] == second
    assert second not in said[1:]


def test_a_hybrid_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must have 2 experts or more \(got 1\)"):
        Language(linear_layers=(0,))


def test_the_folders_of_one_seed_are_equal(tmp_path: Path) -> None:
    speaker = draw_speakers(DENSE, 1, Random(3))[0]
    for name in ("one", "two"):
        write_model(tmp_path / name, DENSE, dtype=torch.bfloat16)
        write_adapter(tmp_path / name / "adapter", DENSE, speaker, rank=4, alpha=8)
    paths = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.*"))
    assert len(paths) == 5
    for path in paths:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes()


def test_an_adapter_uses_all_of_its_ranks_and_a_scale_that_is_not_one(tmp_path: Path) -> None:
    speaker = draw_speakers(DENSE, 1, Random(3))[0]
    write_adapter(tmp_path, DENSE, speaker, rank=8, alpha=4)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 4)
    factors = load_file(tmp_path / "adapter_model.safetensors")
    for name, factor in factors.items():
        ranks = factor if ".lora_A." in name else factor.T
        assert ranks.shape[0] == 8
        assert (ranks != 0).any(dim=1).all()
    with pytest.raises(ValueError, match=r"rank must be at least 2 \(got 1\)"):
        write_adapter(tmp_path, DENSE, speaker, rank=1, alpha=4)


def test_factors_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", DENSE, dtype=torch.float32)
    for cycles, experts, message in (
        (4, 4, r"has factors for .*experts.*, which .* does not have"),
        (16, 1, r"changes lm_head by \[320, 64\] \(the model has \[192, 64\]\)"),
    ):
        language = Language(cycles=cycles, layers=2, experts=experts)
        adapter = tmp_path / f"adapter-{cycles}"
        (speaker,) = draw_speakers(language, 1, Random(3))
        write_adapter(adapter, language, speaker, rank=4, alpha=8)
        with pytest.raises(ValueError, match=message):
            Reference(tmp_path / "model", adapter)


def test_a_token_that_is_no_word_has_no_place() -> None:
    prompt = Prompt(((0, 1, 2, 3), (0, 1, 2, 3)), DENSE.word(0, 0))
    for token in (DENSE.first_word - 1, DENSE.num_tokens):
        with pytest.raises(ValueError, match="token must be a word"):
            DENSE.next_word(prompt, token, DENSE.base())


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "engine.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/engine.md", "exec"), {})
    assert "said by adapter-1" in capsys.readouterr().out
