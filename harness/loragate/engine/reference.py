"""The reference of an engine: the checkpoint with one adapter merged into its weights, run by
transformers in fp64. It shares no code with any subject."""

from __future__ import annotations

import copy
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loragate.engine.bisection import traced

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Judged:
    """A token of a request, as the reference sees it.

    best: its own token at this place. gap: the logit of `best` minus that of the token.
    margin: the logit of `best` minus the next one. log_odds: of the token.
    """

    token: int
    best: int
    gap: float
    margin: float
    log_odds: float

    @property
    def logprob(self) -> float:
        return log_sigmoid(self.log_odds)


class Reference:
    """One model with one adapter, or with none, in fp64."""

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as path:
            merged = Path(path)
            merge_adapter(model, adapter, merged)
            # the products of all experts at once are not made for fp64
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                merged, dtype=torch.float64, experts_implementation="eager"
            ).eval()

    def rounded(self, dtype: torch.dtype) -> Reference:
        """The same model in another dtype, of weights and arithmetic."""
        made = copy.copy(self)
        made.model = copy.deepcopy(self.model)
        # not the frequencies of rotary embeddings, which are no weights
        for parameter in made.model.parameters():
            parameter.data = parameter.data.to(dtype)
        return made

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> list[Judged]:
        """Each token of an answer, after the tokens that the answer itself has before it.

        A token that the vocabulary does not have, and all behind it, are infinitely far off.
        """
        size = self.num_tokens
        known = list(takewhile(lambda token: 0 <= token < size, answer))
        logits = self.logits([*prompt, *known])[len(prompt) - 1 :]
        top = logits.topk(2, dim=-1)
        tokens = torch.tensor(known, dtype=torch.int64)
        chosen = logits[:-1].gather(-1, tokens[:, None])[:, 0]
        best = top.indices[:, 0].tolist()
        margins = (top.values[:, 0] - top.values[:, 1]).tolist()
        gaps = (top.values[:-1, 0] - chosen).tolist()
        odds = log_odds(logits[:-1], tokens).tolist()
        found = list(map(Judged, known, best[:-1], gaps, margins[:-1], odds))
        return found + [
            Judged(token, best[-1], math.inf, margins[-1], -math.inf)
            for token in answer[len(known) :]
        ]

    def next_tokens(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """The reference's own token at each place of an answer."""
        best: list[int] = self.logits([*prompt, *answer])[len(prompt) - 1 : -1].argmax(-1).tolist()
        return best

    def sure_answer(self, prompt: Sequence[int], new_tokens: int, lead: float) -> list[int]:
        """Its own tokens, up to the first one that leads the next best by `lead` or less."""
        tokens = list(prompt)
        for _ in range(new_tokens):
            top = self.logits(tokens)[-1].topk(2)
            if top.values[0] - top.values[1] <= lead:
                break
            tokens.append(int(top.indices[0]))
        return tokens[len(prompt) :]

    @property
    def num_tokens(self) -> int:
        return int(self.model.config.vocab_size)

    def trace(self, tokens: Sequence[int]) -> dict[str, Tensor]:
        """[tokens, values] of what each module returns and, as NAME.input, what those without
        modules of their own read, in the order of execution. Names as transformers has them."""
        # an expert sees some of the tokens only
        modules = {
            name: module
            for name, module in self.model.named_modules()
            if name and ".experts." not in name
        }
        return traced(modules, len(tokens), lambda: self.logits(tokens))

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, vocabulary], of what follows each token."""
        with torch.no_grad(), _one_thread():
            result: Tensor = self.model(torch.tensor([list(tokens)])).logits[0]
        return result.double()


def log_odds(logits: Tensor, tokens: Tensor) -> Tensor:
    """[n]: log(p / (1 - p)) of one token each; logits [n, vocabulary], tokens [n]. What arithmetic
    changes of logits it changes of these, whereas a probability near 1 hardly moves."""
    places = tokens[:, None]
    others = logits.scatter(-1, places, -math.inf).logsumexp(-1)
    return logits.gather(-1, places)[:, 0] - others


def log_sigmoid(odds: float) -> float:
    """The log-probability of such log-odds."""
    return min(odds, 0.0) - math.log1p(math.exp(-abs(odds)))


@contextmanager
def _one_thread() -> Iterator[None]:
    """For models whose products are so small that threads cost more than they save. Where other
    processes keep all cores busy, threads that wait for each other took 20 times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def merge_adapter(model: Path, adapter: Path | None, out: Path) -> None:
    """Write the checkpoint of `model` to `out` in fp64, with W + scale * B @ A in place of each W
    that the adapter has factors for. ValueError for factors that do not fit the model."""
    stored = load_file(model / "model.safetensors")
    weights = {name: value.double() for name, value in stored.items()}
    deltas = {} if adapter is None else _deltas(adapter)
    for module, delta in deltas.items():
        name = f"{module}.weight"
        if name not in weights:
            raise ValueError(f"{adapter} has factors for {module}, which {model} does not have")
        if weights[name].shape != delta.shape:
            raise ValueError(
                f"{adapter} changes {module} by {list(delta.shape)} "
                f"(the model has {list(weights[name].shape)})"
            )
        weights[name] = weights[name] + delta
    out.mkdir(parents=True, exist_ok=True)
    for path in model.glob("*.json"):
        shutil.copy(path, out)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def _deltas(adapter: Path) -> dict[str, Tensor]:
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    factors = load_file(adapter / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    return {
        name.removeprefix(_PREFIX).removesuffix(".lora_A.weight"): scale
        * (factors[name.replace(".lora_A.", ".lora_B.")].double() @ a.double())
        for name, a in factors.items()
        if name.endswith(".lora_A.weight")
    }
