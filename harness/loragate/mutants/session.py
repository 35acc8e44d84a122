"""One run of the command in its folder: what is there already, what is left, what was found."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from loragate.core.errors import CommandError
from loragate.core.files import write_atomically
from loragate.core.verdict import ExitCode
from loragate.mutants.counts import Outcome
from loragate.mutants.edits import Equivalents
from loragate.mutants.journal import Journal, kills_in
from loragate.mutants.measuring import measure_reach, planned_cases
from loragate.mutants.model import Fate, Mutant, Result, Sources
from loragate.mutants.page import render_page
from loragate.mutants.reach import Reach, load_reach, save_reach
from loragate.mutants.runner import failure_of_sound_code, run_all
from loragate.mutants.setup import Setup
from loragate.mutants.units import Kind, Unit

_REACH, _KNOWN = "reach.json", "host-tests.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """`name`: of the sample or of the edits; `state`: the digest of the code."""

    folder: Path
    name: str
    state: str
    sources: Sources
    jobs: int
    gpu: bool = False

    def journal(self, *, gpu: bool) -> Journal:
        suffix = "-gpu" if gpu else ""
        return Journal(self.folder / f"{self.name}{suffix}.jsonl", self.state)

    def run(self, mutants: Sequence[Mutant], equivalents: Equivalents) -> list[Outcome]:
        """Plant what has no result yet; the results of all. Raises OtherState, CommandError."""
        journal = self.journal(gpu=self.gpu)
        results = journal.open(mutants)
        chosen = self._survivors(mutants, equivalents) if self.gpu else list(mutants)
        waiting = self._not_planted(chosen, results, equivalents)
        if waiting:
            self._plant(waiting, journal, results)
        outcomes = self._judged(chosen, results, equivalents)
        title = f"Mutants: {self.name}"
        write_atomically(
            journal.path.with_suffix(".md"), render_page(title, outcomes, self.sources)
        )
        return outcomes

    def _survivors(self, mutants: Sequence[Mutant], equivalents: Equivalents) -> list[Mutant]:
        """What the run without a GPU has left; CommandError if it is not complete."""
        results = self.journal(gpu=False).open(mutants)
        missing = len(self._not_planted(mutants, results, equivalents))
        if missing:
            text = f"{missing} mutants were not planted without --gpu in {self.folder}"
            raise CommandError(text, ExitCode.USAGE)
        known = self._judged(mutants, results, equivalents)
        return [m for m, result in known if result.fate in (Fate.SURVIVED, Fate.NEEDS_GPU)]

    def _not_planted(
        self, mutants: Sequence[Mutant], results: Mapping[str, Result], equivalents: Equivalents
    ) -> list[Mutant]:
        """What has no result and needs one. Nothing kills a mutant that changes nothing, after it
        has gone through everything that reaches it, which takes minutes: it is not planted."""
        return [
            mutant
            for mutant in mutants
            if mutant.id not in results and not equivalents.reason(mutant, self.sources)
        ]

    def _judged(
        self, mutants: Sequence[Mutant], results: Mapping[str, Result], equivalents: Equivalents
    ) -> list[Outcome]:
        # what was not planted is listed
        found = [(m, results.get(m.id) or Result(id=m.id, fate=Fate.SURVIVED)) for m in mutants]
        return list(judged(found, equivalents, self.sources))

    def _plant(
        self, waiting: Sequence[Mutant], journal: Journal, results: dict[str, Result]
    ) -> None:
        setup = self._setup(waiting)
        begin = time.monotonic()
        with closing(run_all(waiting, self.sources, setup)) as found:
            for number, (mutant, result) in enumerate(found, 1):
                journal.add(mutant, result)
                results[mutant.id] = result
                left = (time.monotonic() - begin) / number * (len(waiting) - number)
                _note(
                    f"{number} of {len(waiting)}: {result.fate.value} {mutant.id} "
                    f"{result.judge} ({result.seconds:.0f} s; about {left / 60:.0f} min left)"
                )

    def _setup(self, waiting: Sequence[Mutant]) -> Setup:
        reach = self._reach()
        known = self.folder / _KNOWN
        write_atomically(known, "\n".join(reach.host_tests))
        gpu_names = planned_cases("premerge", gpu=True) if self.gpu else ()
        setup = Setup(
            reach=reach,
            known=known,
            logs=self.folder,
            jobs=self.jobs,
            gpu_cases=tuple(Unit(Kind.CASE, name) for name in gpu_names),
            kills=[] if self.gpu else list(kills_in(self.folder)),
        )
        _note("running cases and tests without a mutant")
        if message := failure_of_sound_code(setup, waiting):
            raise CommandError(message, ExitCode.INFRASTRUCTURE)
        return setup

    def _reach(self) -> Reach:
        reach = load_reach(self.folder / _REACH, self.state)
        if reach is None:
            _note("measuring which cases and host tests reach which line, which takes minutes")
            reach = measure_reach(self.state, self.jobs, _note)
            save_reach(reach, self.folder / _REACH)
        return reach


def judged(
    outcomes: Iterable[Outcome], equivalents: Equivalents, sources: Sources
) -> Iterator[Outcome]:
    """Outcomes in which survivors that are listed as equivalent say so."""
    for mutant, result in outcomes:
        reason = equivalents.reason(mutant, sources)
        if reason and result.fate in (Fate.SURVIVED, Fate.NEEDS_GPU):
            yield mutant, replace(result, fate=Fate.EQUIVALENT, message=reason)
        else:
            yield mutant, result


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
