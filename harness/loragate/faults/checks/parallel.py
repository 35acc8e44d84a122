"""How a layer is cut over ranks and packed from modules, against index lists."""

from __future__ import annotations

from collections import Counter
from itertools import product

import torch
from torch import Tensor

from lorakernels.dense.weights import LoRAFactors, SlotWeights
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.partition import Parallel, Shard, Slice, cut_layer

_IN = 4
_WIDTHS = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "z_proj": 8}
_FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "kv": ("k_proj", "v_proj")}


def check_partition() -> str | None:
    """Plain and padded widths are held once, heads as often as there are ranks for each."""
    for tp, padded in product((1, 2, 4), (24, 32)):
        part = Slice("up_proj", 22, padded_width=padded)
        cuts = [_columns(part, tp, rank) for rank in range(tp)]
        inputs = [_inputs(22, padded, tp, rank) for rank in range(tp)]
        size = padded // tp
        for rank, shard in (*enumerate(cuts), *enumerate(inputs)):
            # what the base layer holds of the padded dimension, as far as the model has it
            wanted = [i for i in range(rank * size, (rank + 1) * size) if i < 22]
            if list(range(shard.start, shard.stop)) != wanted or shard.size != size:
                return f"rank {rank} of {tp} holds {shard} of 22 padded to {padded}"
    whole = cut_layer([Slice("gate_proj", 8)], 6, tp_size=2, tp_rank=1)
    if (*whole.columns, whole.inputs) != (Shard(0, 8, 8), Shard(0, 6, 6)):
        return f"rank 1 of 2 holds {whole.columns[0]} and {whole.inputs} of a replicated layer"
    for tp, heads in product((1, 2, 4, 8), (1, 2, 4)):
        wrong = _check_heads(tp, heads)
        if wrong is not None:
            return wrong
    return None


def _check_heads(tp: int, heads: int) -> str | None:
    part = Slice("k_proj", heads * 3, heads=heads)
    cuts = [_columns(part, tp, rank) for rank in range(tp)]
    held = Counter(column for cut in cuts for column in range(cut.start, cut.stop))
    wanted = max(1, tp // heads)
    if held != Counter(dict.fromkeys(range(part.width), wanted)):
        return f"{heads} heads over {tp} ranks: columns are held {sorted(held.items())} times"
    # neighbouring ranks share a head
    order = [cut.start for cut in cuts]
    return None if order == sorted(order) else f"{heads} heads over {tp} ranks start at {order}"


def _columns(part: Slice, tp: int, rank: int) -> Shard:
    cut = cut_layer([part], _IN, parallel=Parallel.COLUMN, tp_size=tp, tp_rank=rank)
    return cut.columns[0]


def _inputs(width: int, padded: int, tp: int, rank: int) -> Shard:
    part = Slice("down_proj", 4)
    return cut_layer(
        [part],
        width,
        parallel=Parallel.ROW,
        tp_size=tp,
        tp_rank=rank,
        padded_in_features=padded,
    ).inputs


def check_packing() -> str | None:
    """Fused or single modules, whole or cut, fill the rows of exactly their own slices."""
    everything = {name: _factors(name) for name in _WIDTHS}
    qkv = LoRAFactors(
        everything["q_proj"].a,
        torch.cat([everything[name].b for name in _FUSED["qkv"]]),
        everything["q_proj"].scale,
    )
    shared = {name: LoRAFactors(qkv.a, everything[name].b, qkv.scale) for name in _FUSED["qkv"]}
    only_v, z = {"v_proj": everything["v_proj"]}, {"z_proj": everything["z_proj"]}
    loads: dict[str, tuple[dict[str, LoRAFactors], dict[str, LoRAFactors]]] = {
        "single modules": (everything, everything),
        "one module": (only_v, only_v),
        "a fused module and one more": ({"qkv": qkv} | z, shared | z),
    }
    for tp_size in (1, 2):
        for tp_rank in range(tp_size):
            layer = _layer(tp_size, tp_rank)
            for what, (parts, wanted) in loads.items():
                try:
                    layer.load_adapter(0, parts)
                except ValueError as error:
                    return f"{what} are refused: {error}"
                wrong = _compare(layer.slots, wanted, tp_size, tp_rank)
                if wrong is not None:
                    return f"{what}, rank {tp_rank} of {tp_size}: {wrong}"
    return _refuses_a_list(_layer(1, 0), list(everything.values()))


def _layer(tp_size: int, tp_rank: int) -> LoRALinear:
    return LoRALinear(
        torch.zeros(sum(_WIDTHS.values()), _IN),
        slices=[Slice(name, width) for name, width in _WIDTHS.items()],
        num_slots=2,
        rank=2,
        fused=_FUSED,
        parallel=Parallel.COLUMN,
        tp_size=tp_size,
        tp_rank=tp_rank,
    )


def _factors(name: str) -> LoRAFactors:
    """Constants that identify the module, the row and the rank."""
    tag, width = 100.0 * (1 + list(_WIDTHS).index(name)), _WIDTHS[name]
    a = tag + torch.arange(2 * _IN).view(2, _IN)
    b = tag + torch.arange(width * 2).view(width, 2)
    return LoRAFactors(a, b, tag)


def _compare(
    slots: SlotWeights, wanted: dict[str, LoRAFactors], tp_size: int, tp_rank: int
) -> str | None:
    column = 0
    for index, (name, width) in enumerate(_WIDTHS.items()):
        size = width // tp_size
        have = wanted.get(name)
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        zero_a, zero_b = torch.zeros(2, _IN), torch.zeros(width, 2)
        a, b = (have.a, have.b) if have else (zero_a, zero_b)
        pairs["a"] = (slots.a[0, index], a)
        mine = b[tp_rank * size : (tp_rank + 1) * size]
        pairs["b"] = (slots.b[0, column : column + size], mine)
        pairs["rank"] = (slots.ranks[0, index], torch.tensor(2 if have else 0))
        pairs["scale"] = (slots.scales[0, index], torch.tensor(have.scale if have else 0.0))
        for what, (found, right) in pairs.items():
            if not torch.equal(found, right.to(found.dtype)):
                return f"{what} of {name} is {found.tolist()}, should be {right.tolist()}"
        column += size
    return None


def _refuses_a_list(layer: LoRALinear, factors: list[LoRAFactors]) -> str | None:
    try:
        layer.load_adapter(0, factors)  # type: ignore[arg-type]
    except ValueError:
        return None
    except Exception as error:
        return f"a list of factors raises {type(error).__name__} instead of ValueError"
    return "a list of factors was taken for a mapping"
