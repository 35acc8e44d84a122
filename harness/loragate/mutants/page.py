"""What a run found, for a terminal and as a page of Markdown. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loragate.mutants.counts import Outcome, counted, markdown, terminal
from loragate.mutants.model import Fate, Mutant, Result, Sources
from loragate.mutants.sources import diff_of

_LISTED = (Fate.BROKEN, Fate.SURVIVED, Fate.NEEDS_GPU)


def render_terminal(outcomes: Sequence[Outcome], sources: Sources) -> str:
    """Survivors as diffs, then the tables."""
    parts = [
        f"{result.fate.value.upper()} {mutant.id} in {mutant.function or 'the module'}\n"
        f"{_why(mutant, result)}\n{diff_of(mutant, sources)}\n"
        for mutant, result in _listed(outcomes)
    ]
    parts += [terminal(title, table) + "\n" for title, table in counted(outcomes).items()]
    return "\n".join(parts).rstrip("\n")


def render_page(title: str, outcomes: Sequence[Outcome], sources: Sources) -> str:
    """The same for a file, with what killed each of the others."""
    parts = [f"# {title}", *(markdown(name, table) for name, table in counted(outcomes).items())]
    for fate in _LISTED:
        own = [(mutant, result) for mutant, result in outcomes if result.fate is fate]
        if own:
            parts.append(f"## {fate.value} ({len(own)})")
        for mutant, result in own:
            reach = f"reached by {result.units} cases and tests, {result.seconds:.0f} s"
            text = f"{_why(mutant, result)}\n\n".lstrip()
            parts.append(f"### {mutant.id}\n\n{mutant.function or 'the module'}; {reach}")
            parts.append(f"{text}```diff\n{diff_of(mutant, sources)}\n```")
    killed = [
        f"- `{mutant.id}`: {result.judge}, {result.kind}, `{result.killer}`"
        for mutant, result in outcomes
        if result.fate is Fate.KILLED
    ]
    return "\n\n".join([*parts, f"## killed ({len(killed)})", "\n".join(killed)]) + "\n"


def _listed(outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    for fate in _LISTED:
        yield from (outcome for outcome in outcomes if outcome[1].fate is fate)


def _why(mutant: Mutant, result: Result) -> str:
    """What somebody has to know of a mutant that is not killed."""
    if result.fate is Fate.BROKEN:
        return result.message
    return mutant.shows or result.message
