"""Texts of case files, and what is reported of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loragate.matrix.load import load_cases
from loragate.matrix.problems import CaseFileError

Write = Callable[..., Path]

GOOD = """\
site: dense_delta
defaults: {dtype: bf16, rank: 8, slots: 4, tokens: 17}
groups:
  one:
    tier: smoke
    oracles: [reference]
    rows:
      - {in_features: 48, slices: [48, 16, 16]}
"""


def problems_of(*paths: Path) -> list[str]:
    """The problems of the files, one a line."""
    with pytest.raises(CaseFileError) as caught:
        load_cases(paths)
    lines = str(caught.value).splitlines()
    if len(lines) == 1:
        return [lines[0].removeprefix("nothing was run: ")]
    assert lines[0] == f"{len(lines) - 1} problems in the case files, nothing was run:"
    return [line.strip() for line in lines[1:]]
