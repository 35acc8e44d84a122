"""vLLM's own engine with the plug-in: each token of each request is its adapter's, our kernels ran
or are in its graphs, and none of them with the switch off.

Checkpoints whose tokens name the adapter (docs/engine.md) give the expected words exactly. Every
engine is a process of its own; all share one folder of vLLM's compile cache, so that a graph that
was compiled for the plug-in, or for vLLM alone, would be found by the other one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from loragate.engine.folders import write_adapter, write_model
from loragate.engine.language import Language, Prompt, Speaker, draw_prompt, draw_speakers

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("vllm") is None,
    reason="an engine of vLLM needs a GPU and the extra loragate[vllm]",
)

RANKS, NEW_TOKENS = (2, 8, 16), 6
LINEAR = {"lora_shrink_kernel", "lora_expand_kernel"}
EXPERTS = {"moe_shrink_kernel", "moe_one_shot_kernel", "moe_small_batch_kernel"}
OURS = LINEAR | EXPERTS
LANGUAGES = {"dense": Language(cycles=4), "moe": Language(cycles=8, experts=4)}

SCRIPT = """
import json, logging, os, sys
given = json.loads(sys.argv[1])
os.environ.update(given["environment"])

# it configures the loggers below its own, which would drop a handler that is there already
import vllm.logger

from lorakernels.integrations.vllm import launch_counts, register
from lorakernels.integrations.vllm.adoption import LOGGER

lines = []
class Kept(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
LOGGER.addHandler(Kept())
LOGGER.setLevel(logging.INFO)
register()

import torch, triton

# the names that Triton itself reports, whoever launches
kernels = {"captured": set(), "launched": set()}
def launching(metadata):
    kind = "captured" if torch.cuda.is_current_stream_capturing() else "launched"
    kernels[kind].add(metadata.get()["name"])
triton.knobs.runtime.launch_enter_hook.add(launching)

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

if given["planted"]:
    from vllm.v1.worker.gpu import model_runner

    def mapping_of_base_rows(lora_config, runner):
        def hook(num_active_loras, num_reqs, num_tokens):
            runner._set_active_loras((0,) * num_reqs, (0,) * num_tokens, set())
        return hook

    model_runner.create_lora_capture_hook = mapping_of_base_rows

llm = LLM(
    model=given["model"],
    skip_tokenizer_init=True,
    dtype="bfloat16",
    enable_lora=True,
    max_loras=given["max_loras"],
    max_lora_rank=16,
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    # sized, not measured: what other processes free meanwhile fails the measurement
    kv_cache_memory_bytes=1 << 28,
    gpu_memory_utilization=0.1,
    seed=0,
    **given["options"],
)
names = list(given["adapters"])
requests = [
    None if name is None else LoRARequest(name, 1 + names.index(name), given["adapters"][name])
    for _, name in given["requests"]
]
sampling = SamplingParams(
    temperature=0.0, max_tokens=given["new_tokens"], ignore_eos=True, detokenize=False
)
answers = []
for _ in range(given["repeats"]):
    outputs = llm.generate(
        [{"prompt_token_ids": tokens} for tokens, _ in given["requests"]],
        sampling,
        lora_request=requests,
        use_tqdm=False,
    )
    answers.append([list(output.outputs[0].token_ids) for output in outputs])
counts = {
    name: [each.launched, each.captured, each.left_out] for name, each in launch_counts().items()
}
with open(given["result"], "w") as file:
    found = {kind: sorted(names) for kind, names in kernels.items()}
    json.dump({"answers": answers, "counts": counts, "lines": lines, "kernels": found}, file)
"""


@dataclass(frozen=True)
class Result:
    """Answers of each repeat; launched, captured and left-out calls by operator; log lines; names
    of the kernels that were launched and captured."""

    answers: list[list[list[int]]]
    counts: dict[str, list[int]]
    lines: list[str]
    kernels: dict[str, list[str]]

    def of(self, kind: int) -> dict[str, int]:
        return {name: counts[kind] for name, counts in self.counts.items()}

    def ours(self, kind: str) -> set[str]:
        return OURS.intersection(self.kernels[kind])

    def vllms(self) -> set[str]:
        """Kernels of vLLM's own LoRA, but for the expand, which embeddings keep."""
        names = {*self.kernels["captured"], *self.kernels["launched"]}
        return {name for name in names if name.startswith(("_lora_shrink", "_fused_moe_lora"))}


class Checkpoint:
    """A model and three adapters as folders, and requests that mix them with the base model."""

    def __init__(self, root: Path, language: Language) -> None:
        self.language, self.model = language, root / "model"
        write_model(self.model, language, dtype=torch.bfloat16)
        self.speakers = {s.name: s for s in draw_speakers(language, len(RANKS), Random(5))}
        self.adapters = {name: str(root / name) for name in self.speakers}
        for (name, speaker), rank in zip(self.speakers.items(), RANKS, strict=True):
            folder = Path(self.adapters[name])
            write_adapter(folder, language, speaker, rank=rank, alpha=2.0 * rank + 1)
        everybody = [language.base(), *self.speakers.values()]
        random = Random(7)
        self.requests: list[tuple[Prompt, Speaker]] = [
            (draw_prompt(language, everybody, random), everybody[place % len(everybody)])
            for place in (1, 0, 2, 3, 1, 2, 0, 3, 3, 1, 2)
        ]

    def wrong(self, answers: list[list[int]]) -> list[str]:
        """Every token that is not its adapter's, with those whose it is."""
        everybody = [self.language.base(), *self.speakers.values()]
        found = []
        for number, ((prompt, speaker), words) in enumerate(
            zip(self.requests, answers, strict=True)
        ):
            before = prompt.word
            for place, word in enumerate(words):
                if word != self.language.next_word(prompt, before, speaker):
                    whose = self.language.speakers_of(prompt, before, word, everybody)
                    found.append(
                        f"request {number} of {speaker.name}: token {place} is "
                        f"{' or '.join(whose) or 'nobody'}'s"
                    )
                    break
                before = word
            if len(words) != NEW_TOKENS:
                found.append(f"request {number}: {len(words)} tokens")
        return found


Run = Callable[..., Result]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {
        name: Checkpoint(tmp_path_factory.mktemp(name), language)
        for name, language in LANGUAGES.items()
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Checkpoint]) -> Run:
    cache = tmp_path_factory.mktemp("cache")

    def start(model: str, graphs: str, **changes: Any) -> Result:
        checkpoint, result = checkpoints[model], tmp_path_factory.mktemp("run") / "result.json"
        given = engine_of(checkpoint, graphs, result, cache, **changes)
        compiled = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command = (sys.executable, "-c", SCRIPT, json.dumps(given))
        done = subprocess.run(command, env=compiled, capture_output=True, text=True, timeout=580)
        assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
        return Result(**json.loads(result.read_text()))

    return start


def engine_of(
    checkpoint: Checkpoint,
    graphs: str,
    result: Path,
    cache: Path,
    *,
    switch: str = "1",
    planted: bool = False,
    max_loras: int = 3,
    runner: str | None = None,
    specialises: bool = True,
) -> dict[str, Any]:
    """What the process of an engine is given."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(cache),
        "LORAKERNELS_VLLM": switch,
    }
    if runner is not None:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = runner
    options: dict[str, Any] = {"enforce_eager": graphs == "NONE"}
    if graphs != "NONE":
        options["compilation_config"] = {
            "cudagraph_mode": graphs,
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
            "cudagraph_specialize_lora": specialises,
        }
    language = checkpoint.language
    return {
        "environment": environment,
        "model": str(checkpoint.model),
        "adapters": checkpoint.adapters,
        "requests": [
            (language.tokens(prompt), speaker.name if speaker.name in checkpoint.adapters else None)
            for prompt, speaker in checkpoint.requests
        ],
        "new_tokens": NEW_TOKENS,
        "repeats": 2,
        "max_loras": max_loras,
        "planted": planted,
        "options": options,
        "result": str(result),
    }


def assert_served(checkpoint: Checkpoint, result: Result) -> None:
    for answers in result.answers:
        assert checkpoint.wrong(answers) == [], "\n".join(result.lines)


# vLLM 0.26 serves MoE models by its first model runner. Its full graphs of mixed batches are wrong
# without the plug-in, too (torchtitan #3668)
GRAPHS = {"dense": ("NONE", "PIECEWISE", "FULL"), "moe": ("NONE", "PIECEWISE", "FULL_DECODE_ONLY")}


@needs_gpu
@pytest.mark.parametrize(("model", "graphs"), [(m, g) for m in GRAPHS for g in GRAPHS[m]])
def test_the_engine_serves_each_request_its_adapter_with_our_kernels(
    run: Run, checkpoints: dict[str, Checkpoint], model: str, graphs: str
) -> None:
    result = run(model, graphs)
    assert_served(checkpoints[model], result)
    kinds = {"linear", "experts"} if model == "moe" else {"linear"}
    # prompts, and all logits, are computed outside of graphs
    assert all(result.of(0)[kind] > 0 for kind in {*kinds, "logits"}), result.counts
    captured = {kind for kind, count in result.of(1).items() if count}
    assert captured == (set() if graphs == "NONE" else kinds), result.counts
    assert any("lorakernels serves" in line for line in result.lines), result.lines
    for kind in ("launched",) if graphs == "NONE" else ("launched", "captured"):
        assert result.ours(kind) >= LINEAR, result.kernels
        assert bool(result.ours(kind) & EXPERTS) == (model == "moe"), result.kernels
    assert result.vllms() == set()


@needs_gpu
def test_adapters_that_take_turns_in_few_slots_are_served_from_graphs(
    run: Run, checkpoints: dict[str, Checkpoint]
) -> None:
    result = run("dense", "FULL", max_loras=2)
    assert_served(checkpoints["dense"], result)
    assert result.of(1)["linear"] > 0


@needs_gpu
@pytest.mark.parametrize("specialises", [True, False])
def test_the_first_model_runner_is_served_whether_or_not_it_has_graphs_without_adapters(
    run: Run, checkpoints: dict[str, Checkpoint], specialises: bool
) -> None:
    result = run("dense", "FULL_DECODE_ONLY", runner="0", specialises=specialises)
    assert_served(checkpoints["dense"], result)
    assert result.of(1)["linear"] > 0


@needs_gpu
def test_the_switch_turns_everything_off_and_the_compile_cache_keeps_both_apart(
    run: Run, checkpoints: dict[str, Checkpoint]
) -> None:
    for switch in ("1", "0", "1", "0"):
        result = run("dense", "PIECEWISE", switch=switch)
        assert_served(checkpoints["dense"], result)
        calls = sum(sum(counts) for counts in result.counts.values())
        assert (calls > 0) == (switch == "1"), result.counts
        assert bool(result.lines) == (switch == "1")
        # of a graph from the cache as well
        assert (result.of(1)["linear"] > 0) == (switch == "1"), result.counts
        assert (result.ours("captured") >= LINEAR) == (switch == "1"), result.kernels
        assert bool(result.vllms()) == (switch == "0"), result.kernels


@needs_gpu
def test_a_dummy_run_without_adapters_is_detected_in_vllm_and_harmless_with_the_plug_in(
    run: Run, checkpoints: dict[str, Checkpoint]
) -> None:
    planted = {"planted": True, "runner": "1"}
    stock = run("dense", "FULL", switch="0", **planted)
    wrong = checkpoints["dense"].wrong(stock.answers[0])
    # prompts are computed outside of graphs, and no adapter is left out there
    assert wrong, stock.kernels
    assert not [line for line in wrong if "of base" in line or "token 0" in line], wrong
    assert_served(checkpoints["dense"], run("dense", "FULL", **planted))


def test_the_judge_names_whose_tokens_a_request_got(checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints["dense"]
    language = checkpoint.language
    right = [language.words_after(p, speaker, NEW_TOKENS) for p, speaker in checkpoint.requests]
    assert checkpoint.wrong(right) == []
    prompt = checkpoint.requests[0][0]
    of_base = language.words_after(prompt, language.base(), NEW_TOKENS)
    assert checkpoint.wrong([of_base, *right[1:]]) == ["request 0 of adapter-1: token 0 is base's"]
    assert "request 1: 5 tokens" in checkpoint.wrong([right[0], right[1][:-1], *right[2:]])


def test_the_script_is_python_and_its_arguments_are_json(
    checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    compile(SCRIPT, "script", "exec")
    given = engine_of(checkpoints["moe"], "FULL", tmp_path / "result", tmp_path, planted=True)
    assert json.loads(json.dumps(given))["options"]["enforce_eager"] is False
