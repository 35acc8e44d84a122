"""The columns of the input projections of a gated delta net, as gdn_in_proj has them. Pure.

Two slices, in_proj_qkvz and in_proj_ba: the columns of a key head, and of all value heads that
share it, stand together. Four slices, in_proj_qkv, in_proj_z, in_proj_b and in_proj_a: each kind of
columns stands together, and is cut by its own heads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Columns:
    """A kind of columns of a slice: over tp ranks it is cut between heads. Where there are fewer
    heads than ranks, several ranks hold the same one."""

    width: int
    heads: int

    def local(self, tp: int, rank: int) -> tuple[int, int]:
        """The first of a rank's columns, and the one behind its last."""
        parts = min(self.heads, tp)
        size = self.width // parts
        start = rank * parts // tp * size
        return start, start + size


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The heads, and the columns of q or k, and of v or z, of each."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int


def delta_net(slices: tuple[int, ...], key_heads: int) -> DeltaNet:
    """The net whose projections have these widths. Raises ValueError where there is none."""
    match slices:
        case (qkvz, ba):
            return _grouped(qkvz, ba, key_heads)
        case (qkv, z, b, a):
            return _separate(qkv, z, b, a, key_heads)
    raise ValueError("allowed: two slices, qkvz and ba, or four, qkv, z, b and a")


def columns_of(slices: tuple[int, ...], key_heads: int) -> tuple[tuple[Columns, ...], ...]:
    """The kinds of columns of each slice, in their order. Raises ValueError as `delta_net`."""
    net = delta_net(slices, key_heads)
    if len(slices) == 2:
        return tuple((Columns(width, key_heads),) for width in slices)
    keys = Columns(key_heads * net.key_size, key_heads)
    values = Columns(net.value_heads * net.value_size, net.value_heads)
    scalars = Columns(net.value_heads, net.value_heads)
    return (keys, keys, values), (values,), (scalars,), (scalars,)


def _grouped(qkvz: int, ba: int, key_heads: int) -> DeltaNet:
    value_heads, odd = divmod(ba, 2)
    if odd or value_heads % key_heads:
        raise ValueError(f"allowed: ba of twice a multiple of the {key_heads} key heads")
    shared, half = value_heads // key_heads, qkvz // (2 * key_heads)
    if qkvz % (2 * key_heads) or half <= shared:
        raise ValueError(
            f"allowed: qkvz of twice the {key_heads} key heads times more than {shared} columns"
        )
    # how the columns of a key head are divided does not matter: they are never cut
    value_size = (half - 1) // shared
    return DeltaNet(key_heads, value_heads, half - shared * value_size, value_size)


def _separate(qkv: int, z: int, b: int, a: int, key_heads: int) -> DeltaNet:
    if a != b or b % key_heads:
        raise ValueError(f"allowed: b and a of one multiple of the {key_heads} key heads")
    if z % b:
        raise ValueError(f"allowed: z that the {b} value heads divide")
    if qkv <= z or (qkv - z) % (2 * key_heads):
        raise ValueError(f"allowed: qkv above z by a multiple of twice the {key_heads} key heads")
    return DeltaNet(key_heads, b, (qkv - z) // (2 * key_heads), z // b)
