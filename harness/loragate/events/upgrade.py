"""Records of older schemas in the form of the present one. Pure; imports no torch.

Schema 1 counted attempts, each with random data of its own: an attempt is what is now a draw that
runs once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WITH_ATTEMPT = frozenset({"case_started", "case_finished"})


def upgrade(schema: int, kind: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an event that was written with `schema`, as the present schema names them.

    Fields of another type than expected are left to the validation that follows.
    """
    fields = dict(event)
    if schema >= 2:
        return fields
    if kind == "run_started" and "attempts" in fields:
        fields["draws"] = fields.pop("attempts")
    if kind in _WITH_ATTEMPT and "attempt" in fields:
        fields["draw"] = fields.pop("attempt")
    if isinstance(fields.get("replay"), str):
        fields["replay"] = fields["replay"].replace(" --attempt ", " --draw ")
    return fields
