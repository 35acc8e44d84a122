"""Reads the list of findings from YAML. Imports no torch.

All problems of the file are reported at once, like those of a case file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from loragate.core.checkout import project_root
from loragate.core.files import read_regular
from loragate.core.verdict import Failure, OracleName
from loragate.findings.ledger import CasePattern, Finding, Kind
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


class CaseModel(_Model):
    run: Text = Field(description="a shell pattern on run ids, such as 'vllm.dense_delta.*'")
    oracle: OracleName
    failure: Annotated[tuple[Failure, ...], Field(min_length=1), BeforeValidator(_as_kinds)]


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


class LedgerModel(_Model):
    subject: Text = Field(description="the name of a subject")
    findings: list[Any] = Field(description="a list of findings")


def ledger_path() -> Path:
    """The path of the ledger of this repository."""
    return project_root() / "cases" / "findings" / "vllm.yaml"


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
    if (model.probe is None) == (model.case is None):
        message = "allowed: exactly one of probe and case, which reproduces the finding"
        document.problems.append(document.problem(loc, message))
        return None
    if model.case is not None and not model.case.run.startswith(f"{subject}."):
        message = f"given {model.case.run!r}; allowed: run ids of this subject, '{subject}.*'"
        document.problems.append(document.problem((*loc, "case", "run"), message))
        return None
    fields = model.model_dump(exclude={"case"})
    case = CasePattern(**model.case.model_dump()) if model.case else None
    return Finding(subject=subject, case=case, **fields)


def _check_ids(findings: list[Finding], document: Document) -> None:
    first: dict[str, int] = {}
    for index, finding in enumerate(findings):
        if finding.id in first:
            message = f"id {finding.id!r} is used again, first in findings[{first[finding.id]}]"
            document.problems.append(document.problem(("findings", index, "id"), message))
        first.setdefault(finding.id, index)
