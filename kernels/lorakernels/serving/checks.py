"""What is asked of the arguments of a decoder, before its model runs or is changed."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from torch import nn
from transformers import PreTrainedConfig


def check_tokens(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    """ValueError unless all are integers from 0 to `vocabulary` - 1."""
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ValueError(f"{name} must be integers from 0 to {vocabulary - 1} (got {token!r})")


def check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        # True is no number of anything
        if type(size) is not int or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1 (got {size})")


def check_rope(config: PreTrainedConfig) -> None:
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    # with these the longest request of a batch changes the results of the others
    if kind in ("dynamic", "longrope"):
        raise ValueError(f"rope_type must not depend on the lengths in a batch (got {kind})")


def check_calls(name: str, module: nn.Module | None) -> None:
    """ValueError if a call of a module does more than its class says."""
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    own = {} if module is None else vars(module)
    if "forward" in own or any(own.get(kind) for kind in hooks):
        raise ValueError(
            f"{name} must have no hooks and no forward of its own, which the layer in its place "
            "would not call"
        )


def check_counts(**given: Sized) -> None:
    """ValueError unless all have one entry for each request."""
    counts = {name: len(values) for name, values in given.items()}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(f"{' and '.join(counts)} must be equally many (got {found})")
