"""Whose requests are in the lines of a decoder.

Invariant: the lines have one user at a time. Another one would overwrite what the requests of the
first one still read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from lorakernels.serving.decoder import Decoder


class LineUser(Protocol):
    """What has requests in lines, such as a Generation."""

    @property
    def num_in_lines(self) -> int:
        """How many requests need what the lines hold."""


# whose requests were the last ones in the lines of a decoder
_USERS: WeakKeyDictionary[Decoder, ReferenceType[LineUser]] = WeakKeyDictionary()


def take_lines(decoders: Iterable[Decoder], user: LineUser) -> None:
    """From now on the lines of all of them are those of `user`. RuntimeError, with nothing taken,
    while another user has requests in one of them."""
    decoders = tuple(decoders)
    for decoder in decoders:
        known = _USERS.get(decoder)
        other = None if known is None else known()
        if other is not None and other is not user and other.num_in_lines:
            raise RuntimeError(
                f"the decoder has {other.num_in_lines} requests of another Generation, whose lines "
                "this one would take: step it until nothing is left, or drop it"
            )
    for decoder in decoders:
        _USERS[decoder] = ref(user)
