from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.23")

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate_with_adapters.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_the_example_prints_a_different_answer_for_each_adapter() -> None:
    done = run("--max-new-tokens", "3", "--drafts", "2")
    assert done.returncode == 0, done.stderr
    answers = dict(
        line.removeprefix("answer of ").split(": ")
        for line in done.stdout.splitlines()
        if line.startswith("answer of")
    )
    assert list(answers) == ["base", "french", "german"]
    assert len(set(answers.values())) == 3
    assert all(answer.count(",") == 2 for answer in answers.values())


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """In this process, which has imported transformers already."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_the_example_reports_in_one_line_what_is_wrong_with_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_here(monkeypatch, str(tmp_path), str(tmp_path / "none"))
    message = str(ended.value.code)
    assert "none: must be a folder with adapter_config.json" in message
    assert len(message.splitlines()) == 1


def test_the_example_loads_a_checkpoint_and_answers_in_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    from lorakernels.serving.tiny import tiny_model

    model = tiny_model("qwen3_moe", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "checkpoint")
    words = {f"w{token}": token for token in range(64)} | {"unknown": 64}
    words_only = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="unknown"))
    words_only.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words_only, unk_token="unknown")
    fast.save_pretrained(tmp_path / "checkpoint")
    options = peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False)
    peft.get_peft_model(model, options).save_pretrained(tmp_path / "adapter")
    folders = [str(tmp_path / "checkpoint"), str(tmp_path / "adapter")]
    capsys.readouterr()
    run_here(monkeypatch, *folders, "--prompt", "w3 w1", "--max-new-tokens", "2")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["prompt: w3 w1", f"{folders[1]}: slot 0"]
    for name, answer, tokens in zip(("base", folders[1]), lines[2::2], lines[3::2], strict=True):
        first, second = tokens.removeprefix("  tokens: [").removesuffix("]").split(", ")
        assert answer == f"answer of {name}: 'w{first} w{second}'"
