"""Loading of case files. Runs nothing, imports no torch.

All files are read and checked to the end before an error is raised, which lists all problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from loragate.core.files import read_regular
from loragate.matrix.case import Case, Site
from loragate.matrix.document import Document, Loc, parse
from loragate.matrix.expand import Group, expand, with_defaults
from loragate.matrix.ids import case_id
from loragate.matrix.problems import CaseFileError, Problem, nearest
from loragate.matrix.rules import (
    check_exclusion,
    check_oracles,
    check_row,
    check_single,
    check_site_axes,
    missing_axes,
)
from loragate.matrix.schema import Axes, FileModel, GroupModel, check_axes
from loragate.matrix.validation import check

Placed = tuple[Case, Document, Loc]


def default_files(root: Path) -> tuple[Path, ...]:
    """The case files of a checkout, which are meant where none are named."""
    return _yaml_files(root / "cases")


def named_files(paths: Iterable[Path]) -> tuple[Path, ...]:
    """The files that a user means, each once: a folder stands for its YAML files. One without any
    stays as it is, and is refused where it is read."""
    files = (file for path in paths for file in _yaml_files(path) or (path,))
    return tuple(dict.fromkeys(files))


def folded(files: Sequence[Path]) -> tuple[Path, ...]:
    """The shortest way to name all of `files`: their folder, if it stands for these alone."""
    # one file is as short as its folder, and tells more
    if len(files) > 1 and set(files) == set(_yaml_files(files[0].parent)):
        return (files[0].parent,)
    return tuple(files)


def _yaml_files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob("*.yaml"))) if folder.is_dir() else ()


def load_cases(paths: Iterable[Path]) -> tuple[Case, ...]:
    """The cases of all files, sorted by id.

    Raises CaseFileError, whose text is the whole list of problems.
    """
    documents = [_read(path) for path in paths]
    placed = [(case, document, loc) for document in documents for case, loc in _cases_of(document)]
    problems = [problem for document in documents for problem in document.problems]
    problems += _repeated(placed)
    if problems:
        raise CaseFileError(problems)
    return tuple(sorted((case for case, _, _ in placed), key=case_id))


def _read(path: Path) -> Document:
    try:
        return parse(read_regular(path).decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        return Document(str(path), problems=[Problem(str(path), 0, "", _unreadable(path, error))])


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is no YAML file: not UTF-8 at byte {error.start}"
    if isinstance(error, IsADirectoryError):
        return "is a folder without YAML files; allowed: YAML files, or a folder of them"
    if isinstance(error, FileNotFoundError):
        names = [file.name for file in path.parent.glob("*.yaml")]
        near = nearest(path.name, names)
        return "there is no such file" + (f"; did you mean {path.with_name(near)}?" if near else "")
    return f"cannot be read: {error.strerror}"


def _cases_of(document: Document) -> list[tuple[Case, Loc]]:
    if document.data is None and document.problems:
        return []
    # an invalid site or key must not hide problems in the groups
    check(FileModel, document.data, (), document)
    raw = document.data if isinstance(document.data, dict) else {}
    known = next((site for site in Site if site == raw.get("site")), None)
    defaults = check_axes(_mapping(raw.get("defaults")), ("defaults",), document)
    check_single(defaults, "a list belongs in a row", document)
    check_site_axes(defaults, known, document)
    cases: list[tuple[Case, Loc]] = []
    for name, raw_group in _mapping(raw.get("groups")).items():
        group = _group(raw_group, ("groups", name), known, defaults, document)
        cases += expand(group, document) if group else []
    return cases if known else []


def _group(
    raw: object, loc: Loc, known: Site | None, defaults: Axes, document: Document
) -> Group | None:
    model = check(GroupModel, raw, loc, document)
    rows = _entries(raw, "rows", loc, known, document)
    exclude = _entries(raw, "exclude", loc, known, document)
    include = _entries(raw, "include", loc, known, document)
    # where the site is invalid, the problem with it is enough
    site = known or Site.LORA_LINEAR
    for entry in exclude:
        check_exclusion(entry, rows, defaults, document)
    for entry in include:
        check_single(entry, "an include is a single point", document)
    if not all(entry.is_valid for entry in exclude):
        # which points they leave out is unknown, and thus what the rows are
        rows, exclude = (), ()
    for row in rows:
        check_row(row, defaults, exclude, site, document)
    for entry in include:
        check_row(entry, defaults, (), site, document)
    if model is None:
        return None
    check_oracles(model.oracles, loc, known, document)
    single = tuple(entry for entry in include if entry.is_single)
    rows, single = _complete(rows, defaults, site), _complete(single, defaults, site)
    return Group(loc, site, model, rows, exclude, single)


def _complete(entries: Sequence[Axes], defaults: Axes, site: Site) -> tuple[Axes, ...]:
    """Those of the entries that define cases, with the file's defaults."""
    return tuple(
        with_defaults(entry, defaults, site)
        for entry in entries
        if entry.is_valid and defaults.is_valid and not missing_axes(entry, defaults, site)
    )


def _entries(
    raw: object, name: str, loc: Loc, site: Site | None, document: Document
) -> tuple[Axes, ...]:
    listed = _mapping(raw).get(name)
    entries = tuple(
        check_axes(entry, (*loc, name, i), document)
        for i, entry in enumerate(listed if isinstance(listed, list) else ())
    )
    for entry in entries:
        check_site_axes(entry, site, document)
    return entries


def _repeated(placed: Sequence[Placed]) -> list[Problem]:
    first: dict[str, Placed] = {}
    problems = []
    for case, document, loc in placed:
        name = case_id(case)
        if name not in first:
            first[name] = (case, document, loc)
            continue
        _, other, place = first[name]
        where = f"{other.file}:{other.line(place)}"
        problems.append(document.problem(loc, f"gives the case {name}, as {where} already does"))
    return problems


def _mapping(raw: object) -> dict[str, Any]:
    return raw if isinstance(raw, dict) else {}
