"""Models and adapters of random weights, in which every token sees all others and their places.

The language reads numbers of the prompt alone, whatever stands elsewhere in the cache and wherever
it stands. Here each key, value and position takes part in the next token, which nobody knows but a
reference. Names, shapes and configurations are those of the language.

The head has a part of the embeddings, so that a token is often said again: n-grams and a model with
the same embeddings draft what is right as well as what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from loragate.engine.folders import as_stored, model_config, save_adapter, write_checkpoint
from loragate.engine.language import Language, Speaker
from loragate.engine.weights import adapter_deltas, base_weights

# of a logit: the best two of a few hundred differ by some units, 1e4 times what fp32 rounds
_SPREAD = 16.0
# of the logit of the token itself, beside it
_REPEATED = 50.0
# of q and k after their norms: scores spread by the square of it
_SHARPNESS = 1.3
# of what an adapter adds to a projection, in parts of its own spread
_CHANGE = 0.5
# many pairs of a head turn visibly from one place to the next
_THETA = 100.0
# of what attention adds to a token, whose own values spread by 1
_ATTENTION = 2.0
_OUTPUTS = ("self_attn.o_proj.weight", "linear_attn.out_proj.weight")
_NORMS_OF_HEADS = ("q_norm.weight", "k_norm.weight")


def write_random_model(
    folder: Path, language: Language, *, seed: int, dtype: torch.dtype, layers: int | None = None
) -> None:
    """A checkpoint of the form that `language` has. layers: so many of them alone, which draft what
    all of them say, or not."""
    config = model_config(language, dtype) | {"rope_theta": _THETA}
    if layers is not None:
        config |= {"num_hidden_layers": layers}
    left_out = tuple(
        f"model.layers.{n}." for n in range(layers or language.layers, language.layers)
    )
    weights = {
        name: _random_weight(name, value, seed)
        for name, value in base_weights(language).items()
        if not name.startswith(left_out)
    }
    embedded = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] += embedded * _REPEATED / embedded.shape[1]
    write_checkpoint(folder, as_stored(language, weights), config, dtype)


def write_random_adapter(
    folder: Path,
    language: Language,
    speaker: Speaker,
    *,
    rank: int,
    alpha: float,
    seed: int,
    targets: Collection[str] | None = None,
    without: str = "",
) -> None:
    """An adapter of the modules that `speaker` changes, as `write_adapter` has it; but for the
    projection `without`. Shared experts stay as they are: PEFT drops their factors where others
    have some, too."""
    factors = {}
    for module, (b, a) in adapter_deltas(language, speaker).items():
        projection = module.rpartition(".")[2]
        if projection != without and (targets is None or projection in targets):
            own = f"{speaker.name} {module}"
            spread = _SPREAD if module == "lm_head" else 1.0
            change = 0.0 if ".shared_expert." in module else _CHANGE
            scale = change * spread * math.sqrt(rank) / alpha
            factors[module] = (
                _drawn(f"{own}.B", torch.Size((b.shape[0], rank)), seed) * scale,
                _drawn(f"{own}.A", torch.Size((rank, a.shape[1])), seed) / math.sqrt(a.shape[1]),
            )
    save_adapter(folder, factors, rank=rank, alpha=alpha)


def _random_weight(name: str, like: Tensor, seed: int) -> Tensor:
    drawn = _drawn(name, like.shape, seed)
    if name.endswith(_NORMS_OF_HEADS):
        return _SHARPNESS * (1 + 0.1 * drawn)
    if like.dim() == 1:
        return 1 + 0.1 * drawn
    if name == "model.embed_tokens.weight":
        return drawn
    spread = _ATTENTION if name.endswith(_OUTPUTS) else 1.0
    if name == "lm_head.weight":
        spread = _SPREAD
    # of a product with values that spread by 1
    return drawn * spread / math.sqrt(like[0].numel())


def _drawn(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The same for a name, whatever else is drawn."""
    generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, dtype=torch.float64, generator=generator)
