"""The one id function and the one seed function. Pure; both are pinned by literal tests."""

from __future__ import annotations

import hashlib

from loragate.matrix.case import Case, Site


def case_id(case: Case) -> str:
    """Stable, readable, unique: the site, then sorted `axis-value` pairs joined by dots."""
    axes = {
        "dtype": case.dtype.value,
        "exec": case.execution.value,
        "in": str(case.in_features),
        "layout": case.layout.value,
        "mix": case.mix.value,
        "rank": str(case.rank),
        "ranks": case.ranks.value,
        "slices": "x".join(map(str, case.slices)),
        "slots": str(case.slots),
        "tokens": str(case.tokens),
    }
    if case.site == "lora_linear":
        axes |= {"parallel": case.parallel.value, "tp": str(case.tp)}
    if case.site is Site.MOE_DELTA:
        axes |= _moe_axes(case)
    if case.site is Site.MOE_LAYER:
        axes |= _layer_axes(case)
    return ".".join([case.site.value, *(f"{axis}-{axes[axis]}" for axis in sorted(axes))])


def _moe_axes(case: Case) -> dict[str, str]:
    return {
        "experts": str(case.experts),
        "map": case.expert_map.value,
        "path": case.path.value,
        "router": case.router.value,
        "routing": case.routing.value,
        "sharing": case.sharing.value,
        "source": case.source.value,
        "topk": str(case.top_k),
        "write": case.write.value,
    }


def _layer_axes(case: Case) -> dict[str, str]:
    return {
        "ep": str(case.ep),
        "experts": str(case.experts),
        "quant": case.quantisation.value,
        "router": case.router.value,
        "routing": case.routing.value,
        "sharing": case.sharing.value,
        "topk": str(case.top_k),
        "tp": str(case.tp),
    }


def run_id(subject: str, case: Case) -> str:
    """Id of one case of one subject, as pytest and `loragate replay` know it."""
    return f"{subject}.{case_id(case)}"


def seed_of(case: Case, draw: int) -> int:
    """63-bit seed of a draw. Every subject sees the same data for a case."""
    text = f"{case_id(case)}#{draw}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
