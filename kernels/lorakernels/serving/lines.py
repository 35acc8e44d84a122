"""Who uses a decoder: its lines, and the adapters in it.

Invariant: the lines have one user at a time. Another one would overwrite what the requests of the
first one still read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from lorakernels.serving.decoder import Decoder


class LineUser(Protocol):
    """What has requests for a decoder, such as a Generation."""

    @property
    def num_in_lines(self) -> int:
        """How many requests need what the lines hold."""

    def requests_with(self, name: str) -> list[int]:
        """The numbers of its requests that need an adapter."""


# a user that is dropped is none any more
_USERS: WeakKeyDictionary[Decoder, WeakSet[LineUser]] = WeakKeyDictionary()


def add_user(decoders: Iterable[Decoder], user: LineUser) -> None:
    for decoder in decoders:
        _USERS.setdefault(decoder, WeakSet()).add(user)


def other_users(decoder: Decoder, user: LineUser) -> list[LineUser]:
    return [other for other in _USERS.get(decoder, ()) if other is not user]


def check_lines(decoders: Iterable[Decoder], user: LineUser) -> None:
    """RuntimeError while another user has requests in the lines of one of them."""
    for decoder in decoders:
        for other in other_users(decoder, user):
            if other.num_in_lines:
                raise RuntimeError(
                    f"the decoder has {other.num_in_lines} requests of another Generation, whose "
                    "lines this one would take: step it until nothing is left, or drop it"
                )
