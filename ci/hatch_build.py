"""Puts into a wheel what a checkout has beside the packages and the gate needs.

An editable install takes these files from the checkout, and gets no copies.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# `loragate.core.checkout.data_root` finds them there
_TARGET = "loragate/data"
_FILES = (
    "cases",
    "ci/baselines/resources.json",
    "conftest.py",
    # the options of pytest
    "pyproject.toml",
)


class DataHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"] |= {name: f"{_TARGET}/{name}" for name in _FILES}
