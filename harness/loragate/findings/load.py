"""Reads the list of findings from YAML. Imports no torch.

All problems of the file are reported at once, like those of a case file.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Annotated, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
)

from loragate.core.checkout import data_root
from loragate.core.files import read_regular
from loragate.core.verdict import Failure, OracleName
from loragate.findings.ledger import Finding, Kind
from loragate.findings.pattern import MEASURED, CasePattern, Limit, Place
from loragate.findings.rate import Rate
from loragate.matrix.document import Document, Loc, parse
from loragate.matrix.problems import Problem
from loragate.matrix.validation import check


class LedgerError(ValueError):
    """Bad ledger. `problems` holds all of them, sorted by line."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(map(str, self.problems)))


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"given {text!r}; allowed: a range such as '>=0.26,<0.27'") from error
    return text


Text = Annotated[str, Field(min_length=1)]
Versions = Annotated[Text, AfterValidator(_specifier)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _as_kinds(value: object) -> object:
    return tuple(value) if isinstance(value, list) else (value,)


class RateModel(_Model):
    draws: Annotated[StrictInt, Field(gt=0, description="a number of draws above 0")]
    of: Annotated[StrictInt, Field(gt=0, description="a number of draws above 0")]


def _bounds(size: dict[Any, Any]) -> dict[str, float]:
    for metric, value in size.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (isinstance(metric, str) and number and 0 <= value < inf):
            allowed = "a metric with its largest value, such as ratio: 8, and no infinity"
            raise ValueError(f"given {metric}: {value}; allowed: {allowed}")
    return size


def _places(where: dict[Any, Any]) -> dict[str, int | str]:
    for axis, value in where.items():
        if not isinstance(axis, str) or not isinstance(value, (int, str)):
            raise ValueError(f"given {axis}: {value}; allowed: an axis with its value: slot: -1")
    return where


class CaseModel(_Model):
    run: Text = Field(description="a shell pattern on run ids, such as 'vllm.dense_delta.*'")
    oracle: OracleName
    failure: Annotated[tuple[Failure, ...], Field(min_length=1), BeforeValidator(_as_kinds)]
    size: Annotated[dict[Any, Any], AfterValidator(_bounds)] = Field(
        {}, description="metrics with their largest values, such as {ratio: 8}"
    )
    where: Annotated[dict[Any, Any], AfterValidator(_places)] = Field(
        {}, description="axes with their values, such as {slot: -1}"
    )
    seen: RateModel | None = None

    def pattern(self) -> CasePattern:
        return CasePattern(
            self.run,
            self.oracle,
            self.failure,
            tuple(Limit(metric, value) for metric, value in self.size.items()),
            tuple(Place(axis, value) for axis, value in self.where.items()),
            Rate(self.seen.draws, self.seen.of) if self.seen else None,
        )


class FindingModel(_Model):
    id: Annotated[Text, Field(pattern="^[a-z0-9]+(-[a-z0-9]+)*$")] = Field(
        description="lower-case words joined by dashes"
    )
    versions: Versions
    kind: Kind
    title: Text = Field(description="a few words")
    statement: Text = Field(description="one sentence or more")
    evidence: Text = Field(description="what was seen")
    seen_on: Text = Field(description="version and machine of the evidence")
    upstream: tuple[Text, ...] = Field((), description="a list such as ['vllm #42120']")
    probe: Text | None = Field(None, description="the name of a probe")
    case: CaseModel | None = None
    also: tuple[Text, ...] = Field((), description="a list of subjects such as [vllm_lorakernels]")


class LedgerModel(_Model):
    subject: Text = Field(description="the name of a subject")
    findings: list[Any] = Field(description="a list of findings")


def ledger_path() -> Path:
    """The path of the ledger that belongs to this version."""
    return data_root() / "cases" / "findings" / "vllm.yaml"


def own_findings() -> tuple[Finding, ...]:
    """The findings that belong to this version: none for a copy of the harness alone, which has no
    ledger, so that whatever fails there is a failure. Raises LedgerError."""
    path = ledger_path()
    return load_ledger(path) if path.exists() else ()


def load_ledger(path: Path) -> tuple[Finding, ...]:
    """The findings of one file, in its order. Raises LedgerError."""
    try:
        document = parse(read_regular(path).decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise LedgerError([Problem(str(path), 1, "", str(error))]) from error
    ledger = check(LedgerModel, document.data, (), document)
    findings = []
    if ledger is not None:
        for index, raw in enumerate(ledger.findings):
            finding = _finding(ledger.subject, raw, ("findings", index), document)
            if finding is not None:
                findings.append(finding)
        _check_ids(findings, document)
    if document.problems:
        raise LedgerError(document.problems)
    return tuple(findings)


def _finding(subject: str, raw: object, loc: Loc, document: Document) -> Finding | None:
    model = check(FindingModel, raw, loc, document)
    if model is None:
        return None
    problems = list(_problems(subject, model))
    for field, message in problems:
        document.problems.append(document.problem((*loc, *field), message))
    if problems:
        return None
    case = model.case.pattern() if model.case else None
    return Finding(subject=subject, case=case, **model.model_dump(exclude={"case"}))


def _problems(subject: str, model: FindingModel) -> Iterator[tuple[Loc, str]]:
    """Fields that contradict each other."""
    case = model.case
    if case is None:
        if model.probe is None:
            yield (), "allowed: a probe or a case that reproduces the finding, or both"
        if model.also:
            yield ("also",), "allowed: with a case, which these subjects fail as well"
        return
    if subject in model.also or len(set(model.also)) < len(model.also):
        yield (
            ("also",),
            f"given {list(model.also)}; allowed: each other subject than {subject} once",
        )
    if not case.run.startswith(f"{subject}."):
        message = f"given {case.run!r}; allowed: run ids of this subject, '{subject}.*'"
        yield ("case", "run"), message
    measured = [kind.value for kind in case.failure if kind in MEASURED]
    if measured and not case.size:
        message = (
            f"has no size; a failure {measured[0]} needs the largest values of metrics that the "
            f"oracle reports, such as 'size: {{ratio: 8}}': a finding excuses nothing larger"
        )
        yield ("case",), message
    if case.seen and model.probe is not None:
        yield ("case", "seen"), "allowed: only without a probe, which decides"
    elif case.seen and case.seen.draws > case.seen.of:
        message = f"given {case.seen.draws} of {case.seen.of} draws; allowed: at most all of them"
        yield ("case", "seen", "draws"), message


def _check_ids(findings: list[Finding], document: Document) -> None:
    first: dict[str, int] = {}
    for index, finding in enumerate(findings):
        if finding.id in first:
            message = f"id {finding.id!r} is used again, first in findings[{first[finding.id]}]"
            document.problems.append(document.problem(("findings", index, "id"), message))
        first.setdefault(finding.id, index)
