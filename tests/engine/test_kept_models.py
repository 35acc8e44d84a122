"""Models stay under the same path from one trial to the next, and what was kept is not trusted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loragate.engine import evidence
from loragate.engine.folders import digests, write_model
from loragate.engine.kept_models import kept
from loragate.engine.language import KINDS
from loragate.engine.world import build_world
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.engine_case import Model, Speculation, Weights


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept models, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "loragate" / "models"


def written(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    write_model(folder, KINDS[Model.DENSE], dtype=dtype)
    return folder


def test_the_same_model_has_the_same_path_in_each_trial(tmp_path: Path, root: Path) -> None:
    first, again = kept(written(tmp_path / "a")), kept(written(tmp_path / "b"))
    assert first == again
    assert first.parent == root
    assert digests(first) == digests(tmp_path / "a")
    assert [path.name for path in root.iterdir()] == [first.name], "nothing else is left there"


def test_another_model_has_another_path(tmp_path: Path) -> None:
    assert kept(written(tmp_path / "a")) != kept(written(tmp_path / "b", torch.float16))


def test_a_kept_model_that_was_changed_is_written_again(tmp_path: Path) -> None:
    model = written(tmp_path / "a")
    place = kept(model)
    (place / "config.json").write_text("{}")
    (place / "tokenizer.json").write_text("{}")
    assert kept(model) == place
    assert digests(place) == digests(model)


def test_a_model_stays_where_it_is_if_nothing_can_be_kept(tmp_path: Path, root: Path) -> None:
    root.parent.parent.mkdir(parents=True)
    root.parent.write_text("a file where the folder should be")
    model = written(tmp_path / "a")
    assert kept(model) == model


def paths_of(seed: int, root: Path, **axes: object) -> tuple[Path, Path | None]:
    fixed = {"site": Site.ENGINE, "dtype": Dtype.BF16, "rank": 8, "slots": 2}
    drafting = {"speculation": Speculation.DRAFT_MODEL}
    case = Case(**{**fixed, **drafting, **axes})  # type: ignore[arg-type]
    world = evidence._kept(build_world(case, seed, root / str(seed)))
    return world.model, world.drafts


def test_all_draws_of_a_case_have_the_same_models_but_for_random_weights(tmp_path: Path) -> None:
    model, drafts = paths_of(1, tmp_path)
    assert paths_of(2, tmp_path) == (model, drafts)
    assert drafts is not None
    own = tmp_path / "random"
    model, drafts = paths_of(1, own, weights=Weights.RANDOM, dtype=Dtype.FP32)
    assert drafts is not None
    assert {own / "1"} == {model.parent, drafts.parent}
