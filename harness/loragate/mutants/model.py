"""Data model of mutants. Pure; imports no torch.

A mutant is one module with one piece of its text replaced: by a generator, or by somebody who does
not know what the gate checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Group(StrEnum):
    """What kind of change a mutant is; a part of the table."""

    # operators of cosmic-ray, which know Python and nothing of kernels
    COARSE = "coarse"
    # operators of this project, which make the mistakes that people make in kernels
    SUBTLE = "subtle"
    # written by hand, without a look at what detects it
    BLIND = "blind"
    # changes how fast a kernel is and no result; counted and never planted
    SPEED = "speed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`module`: the path of the file below the package. The text from `start` to `end` is replaced
    by `new`. `line` and `end_line`: the lines of the replaced text, from 1. `function`: the
    qualified name of the function around it, "" for code of the module or of a class."""

    id: str
    module: str
    start: int
    end: int
    new: str
    operator: str
    group: Group
    line: int
    end_line: int
    function: str = ""
    needs_gpu: bool = False
    shows: str = ""

    def apply(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]


class Fate(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    # survived, and is listed as a change that no caller can observe
    EQUIVALENT = "equivalent"
    # survived without a GPU, and shows on a GPU only
    NEEDS_GPU = "needs a GPU"
    # nothing ran for it because of an error outside of the mutant
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`killer`: the case or test that failed, or the leg; `judge`: what of it failed, such as an
    oracle; `kind`: how. `units`: how many cases and tests reach the mutant. `message`: the evidence
    of a kill, or why a mutant is broken."""

    id: str
    fate: Fate
    killer: str = ""
    judge: str = ""
    kind: str = ""
    message: str = ""
    units: int = 0
    seconds: float = 0.0


Sources = Mapping[str, str]
