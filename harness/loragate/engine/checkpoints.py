"""A folder of checkpoints for engines: model, draft model and adapters of each kind.

Invariant: a folder that has a manifest is complete. It is written beside its place and renamed;
what it must hold is hashed in its manifest, and so is the code that wrote it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from loragate.core.files import lock_of, replace_folder
from loragate.core.json_text import parse_json
from loragate.engine.drafts import WRONG_PLACES, write_draft
from loragate.engine.eagle import write_eagle
from loragate.engine.folders import digests, write_adapter, write_model
from loragate.engine.language import (
    KINDS,
    Language,
    Prompt,
    Speaker,
    draw_prompt,
    draw_speakers,
)
from loragate.matrix.engine_case import MOST_ADAPTERS

# ranks that engines have kernels for, and alphas that make no scale of 1
_RANKS, _ALPHAS = (8, 16, 32), (12, 8, 48)
_SEED = 15
_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The folders of a kind. `speakers`: of its adapters, by the names of their folders."""

    folder: Path
    language: Language
    speakers: tuple[Speaker, ...]

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def draft(self) -> Path:
        return self.folder / "draft"

    @property
    def eagle(self) -> Path:
        return self.folder / "eagle3"

    @property
    def adapters(self) -> dict[str, Path]:
        return {s.name: self.folder / "adapters" / s.name for s in self.speakers}

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """After each of them the base model and all adapters say different words."""
        random = Random(seed)
        everyone = [self.language.base(), *self.speakers]
        return [draw_prompt(self.language, everyone, random) for _ in range(count)]


def checkpoint(root: Path, kind: str, adapters: int) -> tuple[Checkpoint, bool]:
    """The checkpoint of `kind`, one of KINDS, in `root`/`kind`, and whether it had to be written:
    one that is whole and has as many adapters is left as it is. ValueError, OSError."""
    if not 1 <= adapters <= MOST_ADAPTERS:
        raise ValueError(f"adapters must be 1 to {MOST_ADAPTERS} (got {adapters})")
    language, folder = KINDS[kind], root / kind
    made = Checkpoint(folder, language, tuple(draw_speakers(language, adapters, Random(_SEED))))
    recipe = _recipe(language, adapters)
    root.mkdir(parents=True, exist_ok=True)
    with lock_of(folder):
        if _is_whole(folder, recipe):
            return made, False
        _refuse_foreign(folder)
        replace_folder(folder, lambda new: _write_with_manifest(replace(made, folder=new), recipe))
    return made, True


def _recipe(language: Language, adapters: int) -> dict[str, Any]:
    """All that the content follows from."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    fields = asdict(language) | {"linear_layers": list(language.linear_layers)}
    return {"language": fields, "adapters": adapters, "code": code.hexdigest()}


def _is_whole(folder: Path, recipe: dict[str, Any]) -> bool:
    try:
        manifest = parse_json((folder / _MANIFEST).read_bytes())
        return bool(manifest == {"recipe": recipe, "files": digests(folder, without=_MANIFEST)})
    except (OSError, ValueError):
        return False


def _refuse_foreign(folder: Path) -> None:
    """ValueError for a folder with anything that is not of a checkpoint: it would be lost."""
    # a link may lead to nothing
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise ValueError(f"{folder} must be a folder")
    own = {*_listed_files(folder), _MANIFEST}
    paths = (str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())
    foreign = sorted(set(paths) - own)
    if foreign:
        raise ValueError(
            f"{folder} holds {foreign[0]!r}, which is not of a checkpoint; it is left as it is"
        )


def _listed_files(folder: Path) -> Collection[str]:
    """The files that an earlier call has written, none where no manifest can be read."""
    try:
        files = parse_json((folder / _MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, TypeError, KeyError):
        return ()
    return files if isinstance(files, dict) else ()


def _write_with_manifest(wanted: Checkpoint, recipe: dict[str, Any]) -> None:
    _write(wanted)
    files = digests(wanted.folder, without=_MANIFEST)
    manifest = json.dumps({"recipe": recipe, "files": files}, indent=2, sort_keys=True)
    (wanted.folder / _MANIFEST).write_text(manifest + "\n", encoding="utf-8")


def _write(wanted: Checkpoint) -> None:
    write_model(wanted.model, wanted.language, dtype=torch.bfloat16)
    write_draft(wanted.draft, wanted.language, wrong=WRONG_PLACES, dtype=torch.bfloat16)
    write_eagle(wanted.eagle, wanted.language, wrong=WRONG_PLACES, dtype=torch.bfloat16)
    for number, speaker in enumerate(wanted.speakers):
        write_adapter(
            wanted.adapters[speaker.name],
            wanted.language,
            speaker,
            rank=_RANKS[number % len(_RANKS)],
            alpha=_ALPHAS[number % len(_ALPHAS)],
            seed=number,
        )
