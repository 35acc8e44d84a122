"""Cases that follow from a seed: valid, of every kind, and the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from loragate.core.verdict import ExitCode, OracleName
from loragate.matrix.case import (
    AXES,
    MOE_SITES,
    OPERATIONS,
    Case,
    Execution,
    Ids,
    Site,
    Streams,
    Tier,
)
from loragate.matrix.engine_case import ENGINE_ORACLES
from loragate.matrix.footprint import footprint_bytes
from loragate.matrix.generated.cases import generate
from loragate.matrix.generated.chance import Chance
from loragate.matrix.generated.shapes import SCALES
from loragate.matrix.generated.text import file_text
from loragate.matrix.ids import case_id
from loragate.matrix.load import load_cases

pytestmark = pytest.mark.usefixtures("preloaded")

ROOT = Path(__file__).parents[2]
SITES = sorted(OPERATIONS)
MANY = 400


@pytest.fixture(scope="module", params=SITES)
def drawn(request: pytest.FixtureRequest) -> tuple[Case, ...]:
    return generate(request.param, seed=5, size=MANY, tier=Tier.PREMERGE)


@pytest.mark.parametrize("tier", [Tier.SMOKE, Tier.PREMERGE])
@pytest.mark.parametrize("site", SITES)
def test_generated_files_are_valid_and_give_the_cases_back(
    site: Site, tier: Tier, tmp_path: Path
) -> None:
    cases = generate(site, seed=3, size=150, tier=tier)
    path = tmp_path / "drawn.yaml"
    path.write_text(file_text(site, cases, "a comment"))
    assert load_cases([path]) == tuple(sorted(cases, key=case_id))


def test_every_value_of_every_axis_is_drawn(drawn: tuple[Case, ...]) -> None:
    site = drawn[0].site
    for name, axis in AXES.items():
        if not axis.at(site):
            continue
        found = Counter(getattr(case, name) for case in drawn)
        if axis.members:
            assert found.keys() == set(axis.values.get(site, axis.members)), name
        else:
            assert len(found) > 1, name


def test_a_value_that_is_no_default_is_not_rare(drawn: tuple[Case, ...]) -> None:
    """Two of them have to meet, at sizes that show it."""
    for name, axis in AXES.items():
        if axis.at(drawn[0].site) and axis.members and not axis.is_required_at(drawn[0].site):
            others = sum(getattr(case, name) != axis.default for case in drawn)
            assert others > MANY // 25, name


def test_cases_of_a_tier_are_within_its_limits(drawn: tuple[Case, ...]) -> None:
    scale = SCALES[Tier.PREMERGE]
    for case in drawn:
        assert footprint_bytes(case) <= scale.bytes
        assert case.tokens <= scale.tokens
        assert case.rank <= scale.rank
        assert max(case.slices) <= scale.width * 4


def test_sizes_reach_from_the_smallest_to_the_largest_half(drawn: tuple[Case, ...]) -> None:
    scale = SCALES[Tier.PREMERGE]
    for name, most in (("tokens", scale.tokens), ("rank", scale.rank), ("slots", scale.slots)):
        sizes = {getattr(case, name) for case in drawn}
        assert min(sizes) <= 1, name
        assert max(sizes) > most // 2, name


def test_streams_and_graphs_are_judged_by_their_oracles(drawn: tuple[Case, ...]) -> None:
    for case in drawn:
        is_dual = case.streams is Streams.DUAL
        assert (OracleName.RACE in case.oracles) is is_dual
        assert (OracleName.SCHEDULE in case.oracles) is is_dual
        assert (OracleName.GRAPH in case.oracles) is (case.execution is Execution.GRAPH)


def test_every_oracle_that_any_case_can_have_judges_some_and_at_most_two_of_each(
    drawn: tuple[Case, ...],
) -> None:
    usual = {OracleName.REFERENCE, OracleName.EXACT, OracleName.BASE_ROWS, OracleName.CANARY}
    chosen = {OracleName.RACE, OracleName.SCHEDULE, OracleName.GRAPH}
    # of engines; and what a case is laid out for
    others = ENGINE_ORACLES | {OracleName.OVERLAP, OracleName.INVENTORY}
    found = Counter(oracle for case in drawn for oracle in {*case.oracles} - usual - chosen)
    assert found.keys() == {*OracleName} - usual - chosen - others
    assert min(found.values()) > MANY // 20
    assert {len({*case.oracles} - usual - chosen) for case in drawn} <= {0, 1, 2}
    assert all(len({*case.oracles}) == len(case.oracles) for case in drawn)


def test_a_larger_number_begins_with_the_smaller_and_another_seed_gives_others() -> None:
    few = generate(Site.LORA_LINEAR, seed=1, size=20, tier=Tier.PREMERGE)
    assert generate(Site.LORA_LINEAR, seed=1, size=40, tier=Tier.PREMERGE)[:20] == few
    other = generate(Site.LORA_LINEAR, seed=2, size=20, tier=Tier.PREMERGE)
    assert not {case_id(case) for case in few} & {case_id(case) for case in other}
    assert len({case_id(case) for case in few}) == 20


def test_what_is_drawn_from_a_seed_never_changes() -> None:
    """A seed is how people name what they have seen."""
    ids = [case_id(case) for case in generate(Site.MOE_DELTA, 7, 2, Tier.SMOKE)]
    assert ids == [
        "moe_delta.dtype-bf16.exec-eager.experts-4.in-16.layout-transposed.map-local.mix-shuffled.path-plan.rank-32.ranks-mixed.router-none.routing-skewed.sharing-per_expert.slices-16x16.slots-3.source-token.tokens-102.topk-2.write-store",
        "moe_delta.dtype-fp16.exec-eager.experts-3.in-296.layout-contiguous.map-parallel.mix-ragged.path-plan.plans-one.rank-1.ranks-mixed.router-output.routing-uniform.sharing-per_expert.slices-11x5x5.slots-2.source-token.spare-8.tokens-33.topk-2.write-add",
    ]


def test_those_that_fit_are_the_same_cases_without_the_others() -> None:
    def fits(case: Case) -> bool:
        return case.tokens % 3 == 0

    every = generate(Site.LORA_LINEAR, seed=1, size=40, tier=Tier.SMOKE)
    some = tuple(case for case in every if fits(case))
    found = generate(Site.LORA_LINEAR, 1, len(some) + 5, Tier.SMOKE, fits)
    assert found[: len(some)] == some
    assert len(found) == len(some) + 5
    assert generate(Site.EMBEDDING, 1, 5, Tier.SMOKE, lambda case: False) == ()


@pytest.mark.parametrize(
    ("limit", "unit", "least"), [(1, 1, 1), (8, 8, 1), (100, 7, 1), (100, 8, 50), (5, 8, 1)]
)
def test_a_size_is_a_multiple_within_its_limits(limit: int, unit: int, least: int) -> None:
    sizes = {Chance(str(n)).size(limit, unit=unit, least=least) for n in range(400)}
    wanted = range(-(-least // unit) * unit, max(limit, unit) + 1, unit)
    assert sizes == set(wanted)


def run(*arguments: str, path: Path = ROOT / "harness") -> subprocess.CompletedProcess[str]:
    own = [str(ROOT / "harness"), str(ROOT / "kernels")]
    folders = [str(path), *own, os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "loragate", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_writes_a_folder_that_a_plan_can_be_made_of(tmp_path: Path) -> None:
    folder = tmp_path / "drawn"
    asked = ["--seed", "4", "--count", "3", "--tier", "smoke", "--site", "embedding"]
    done = run("generate", "--folder", str(folder), *asked, "--site", "lora_linear")
    assert done.returncode == ExitCode.OK, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["embedding.yaml", "lora_linear.yaml"]
    first = (folder / "embedding.yaml").read_text().partition("\n")[0]
    assert first == (
        "# made by `loragate generate --seed 4 --count 3 --site embedding --tier smoke`"
    )
    planned = run("plan", "--matrix", str(folder), "--subject", "lorakernels", "--tier", "smoke")
    assert planned.returncode == ExitCode.OK, planned.stderr
    for case in load_cases(sorted(folder.iterdir())):
        assert case_id(case) in planned.stdout


def test_a_file_that_somebody_else_has_written_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "embedding.yaml"
    command = ("generate", "--folder", str(tmp_path), "--count", "1", "--site", "embedding")
    for text in ("# by hand\n", "", "site: embedding\n# made by `loragate generate`\n"):
        path.write_text(text)
        done = run(*command)
        assert done.returncode == ExitCode.USAGE
        assert f"{path}: was not made by this command" in done.stderr
        assert path.read_text() == text
    path.unlink()
    for seed in ("1", "2"):
        assert run(*command, "--seed", seed).returncode == ExitCode.OK
        assert f"--seed {seed}" in path.read_text()


def test_a_folder_that_cannot_be_written_ends_the_command_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("generate", "--folder", str(tmp_path / "file"), "--count", "1")
    assert done.returncode == ExitCode.INFRASTRUCTURE
    where = tmp_path / "file" / "dense_delta.yaml"
    assert done.stderr == f"loragate generate: {where}: cannot be written: File exists\n"


def test_a_size_that_does_not_fit_what_was_chosen_is_drawn_again() -> None:
    """Cuts by heads fit few widths, and are as frequent as other values all the same."""
    cases = generate(Site.GDN_IN_PROJ, seed=8, size=200, tier=Tier.PREMERGE)
    # a third of the choices
    assert 50 < sum(case.tp > 1 for case in cases) < 84


@pytest.mark.parametrize("site", sorted(MOE_SITES))
def test_no_drawn_case_repeats_the_ids_of_a_single_choice(site: Site) -> None:
    cases = generate(site, seed=5, size=200, tier=Tier.SMOKE)
    choices = {case.top_k for case in cases if case.ids is Ids.REPEATED}
    assert min(choices) == 2
    assert any(case.top_k == 1 for case in cases)


def test_the_command_draws_what_a_subject_runs_and_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "drawn"
    asked = ["--folder", str(folder), "--count", "2", "--tier", "smoke", "--site", "moe_layer"]
    done = run("generate", *asked, "--subject", "torch")
    assert done.returncode == ExitCode.OK, done.stderr
    path = folder / "moe_layer.yaml"
    assert path.read_text().partition("\n")[0].endswith("--tier smoke --subject torch`")
    planned = run("plan", "--matrix", str(path), "--subject", "torch", "--tier", "smoke")
    for case in load_cases([path]):
        # of two, what is skipped stands behind the others
        assert case_id(case) in planned.stdout.partition("skipped,")[0]
    done = run("generate", *asked, "--subject", "torhc")
    assert done.returncode == ExitCode.USAGE
    assert "torhc" in done.stderr


def test_no_file_is_written_for_an_operation_that_a_subject_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "only_dense.py").write_text(
        "from dataclasses import replace\n"
        "from loragate.matrix.case import Site\n"
        "from loragate.subjects.torch.subject import TorchSubject\n\n"
        "class OnlyDense(TorchSubject):\n"
        "    def capabilities(self, machine):\n"
        "        have = super().capabilities(machine)\n"
        "        return replace(have, sites=frozenset({Site.DENSE_DELTA}))\n"
    )
    folder = tmp_path / "drawn"
    asked = ["--folder", str(folder), "--count", "2", "--tier", "smoke"]
    sites = ["--site", "embedding", "--site", "dense_delta"]
    done = run("generate", *asked, *sites, "--subject", "only_dense:OnlyDense", path=tmp_path)
    assert done.returncode == ExitCode.OK, done.stderr
    assert "no file for embedding: only_dense:OnlyDense runs none of its cases" in done.stdout
    assert [path.name for path in folder.iterdir()] == ["dense_delta.yaml"]
