"""Folders of checkpoints: whole, equal, and written once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from loragate.cli import main
from loragate.core.verdict import ExitCode
from loragate.engine import checkpoints
from loragate.engine.checkpoints import checkpoint
from loragate.engine.drafts import WRONG_PLACES, drafted_word, write_draft
from loragate.engine.language import KINDS, PLACES, Language
from loragate.engine.reference import Reference
from loragate.matrix.engine_case import MOST_ADAPTERS


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Of each file, with the time at which it was written."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def command(*arguments: str) -> int:
    return main(["checkpoints", *arguments])


def test_a_second_call_verifies_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--folder", str(tmp_path), "--model", "dense", "--adapters", "2")
    assert command(*arguments) == ExitCode.OK
    first = content(tmp_path)
    assert command(*arguments) == ExitCode.OK
    assert content(tmp_path) == first
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{tmp_path / 'dense'}: written", f"{tmp_path / 'dense'}: unchanged"]
    # nothing else stays behind
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]
    assert sorted(p.name for p in (tmp_path / "dense" / "adapters").iterdir()) == [
        "adapter-1",
        "adapter-2",
    ]


def test_two_folders_have_the_same_bytes(tmp_path: Path) -> None:
    made = [checkpoint(tmp_path / name, "dense", 1)[0].folder for name in ("one", "two")]
    one, two = ({name: data for name, (data, _) in content(f).items()} for f in made)
    assert one == two


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model" / "model.safetensors").write_bytes(b"short"),
        lambda folder: (folder / "model" / "config.json").unlink(),
    ],
    ids=["changed", "missing"],
)
def test_a_damaged_folder_is_written_anew(tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    made, _ = checkpoint(tmp_path, "dense", 1)
    whole = {name: data for name, (data, _) in content(made.folder).items()}
    damage(made.folder)
    assert checkpoint(tmp_path, "dense", 1) == (made, True)
    assert {name: data for name, (data, _) in content(made.folder).items()} == whole
    assert checkpoint(tmp_path, "dense", 1) == (made, False)


def test_another_number_of_adapters_or_other_code_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path, "dense", 1)
    assert checkpoint(tmp_path, "dense", 2)[1]
    recipe = checkpoints._recipe
    monkeypatch.setattr(checkpoints, "_recipe", lambda *given: recipe(*given) | {"code": "other"})
    assert checkpoint(tmp_path, "dense", 2)[1]


def test_a_write_that_fails_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path, "dense", 1)
    before = content(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoints, "write_draft", fail)
    assert command("--folder", str(tmp_path), "--model", "dense") == ExitCode.INFRASTRUCTURE
    assert content(tmp_path) == before


def test_what_is_no_checkpoint_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "thesis.txt").write_text("mine")
    assert command("--folder", str(tmp_path), "--model", "dense") == ExitCode.USAGE
    assert "holds 'thesis.txt', which is not of a checkpoint" in capsys.readouterr().err
    assert (tmp_path / "dense" / "thesis.txt").read_text() == "mine"
    (tmp_path / "moe").write_text("mine")
    assert command("--folder", str(tmp_path), "--model", "moe") == ExitCode.USAGE
    (tmp_path / "hybrid").symlink_to(tmp_path / "nowhere")
    assert command("--folder", str(tmp_path), "--model", "hybrid") == ExitCode.USAGE
    assert f"{tmp_path / 'hybrid'} must be a folder" in capsys.readouterr().err


def test_a_file_beside_those_that_were_written_is_never_removed(tmp_path: Path) -> None:
    made, _ = checkpoint(tmp_path, "dense", 1)
    mine = made.folder / "adapters" / "mine" / "adapter_model.safetensors"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ValueError, match="holds 'adapters/mine/"):
        checkpoint(tmp_path, "dense", 2)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    "text",
    [None, "{", "[]", 100_000 * "["],
    ids=["no manifest", "half of one", "no list", "nested too deeply"],
)
def test_files_that_no_manifest_names_are_never_removed(tmp_path: Path, text: str | None) -> None:
    made, _ = checkpoint(tmp_path, "dense", 1)
    manifest = made.folder / "manifest.json"
    manifest.unlink() if text is None else manifest.write_text(text)
    before = content(made.folder)
    with pytest.raises(ValueError, match="which is not of a checkpoint"):
        checkpoint(tmp_path, "dense", 1)
    assert content(made.folder) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--adapters", "0"), f"adapters must be 1 to {MOST_ADAPTERS} (got 0)"),
        (("--adapters", "8"), f"adapters must be 1 to {MOST_ADAPTERS} (got 8)"),
    ],
)
def test_a_number_that_cannot_be_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert command("--folder", str(tmp_path / "new"), *arguments) == ExitCode.USAGE
    assert capsys.readouterr().err == f"loragate checkpoints: {message}\n"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_all_adapters_of_a_written_checkpoint_say_their_words(tmp_path: Path, kind: str) -> None:
    made, _ = checkpoint(tmp_path, kind, 2)
    (prompt,) = made.prompts(1, seed=0)
    everyone = [(made.language.base(), None)]
    everyone += [(s, made.adapters[s.name]) for s in made.speakers]
    for speaker, folder in everyone:
        words = made.language.words_after(prompt, speaker, 3)
        said = Reference(made.model, folder).next_tokens(made.language.tokens(prompt), words)
        assert said == words
    # of a size that engines have kernels for
    for folder in made.adapters.values():
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["r"] in (8, 16, 32)
        assert config["r"] != config["lora_alpha"]
        assert ("lm_head" in config["target_modules"]) == (kind != "hybrid")


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_has_factors_for_every_linear_that_it_targets(tmp_path: Path, kind: str) -> None:
    """A reader may take what is targeted and has none for a damaged file."""
    made, _ = checkpoint(tmp_path, kind, 1)
    (folder,) = made.adapters.values()
    targets = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    with safe_open(folder / "adapter_model.safetensors", "pt") as factors:
        names = set(factors.keys())
    linears = [
        name
        for name, module in Reference(made.model).model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets
    ]
    assert linears
    missing = [n for n in linears if f"base_model.model.{n}.lora_A.weight" not in names]
    assert missing == []


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_drafts_are_right_and_wrong_where_it_is_said_whoever_speaks(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    made, _ = checkpoint(tmp_path, kind, 2)
    draft, language = Reference(made.draft).rounded(dtype), made.language
    (prompt,) = made.prompts(1, seed=1)
    for speaker in (language.base(), *made.speakers):
        words = language.words_after(prompt, speaker, 4 * PLACES)
        judged = draft.judge(language.tokens(prompt), words)
        walk = [prompt.word, *words]
        # the first one is a guess
        said = [token.best for token in judged[1:]]
        assert said == [
            drafted_word(language, before, word, WRONG_PLACES)
            for before, word in itertools.pairwise(walk[:-1])
        ]
        assert min(token.margin for token in judged[1:]) > 6
        # each round visits all places
        rejected = sum(a != b for a, b in zip(said[-PLACES:], words[-PLACES:], strict=True))
        assert rejected == WRONG_PLACES


def test_what_makes_no_draft_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"wrong must be 0 or from 2 to 13 \(got 1\)"):
        write_draft(tmp_path, Language(), wrong=1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"at least 2 layers \(got 1\)"):
        write_draft(tmp_path, Language(layers=1), wrong=2, dtype=torch.bfloat16)
    language = Language()
    with pytest.raises(ValueError, match=r"must be of one cycle \(got 0 and 1\)"):
        drafted_word(language, language.word(0, 0), language.word(1, 0), 2)
