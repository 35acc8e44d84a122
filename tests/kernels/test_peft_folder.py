from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.peft_folder import read_peft_folder
from lorakernels.dense.weights import LoRAFactors
from lorakernels.moe.weights import Factors

Q, V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
RANK, WIDTH = 4, 8


def key(module: str, factor: str) -> str:
    return f"base_model.model.{module}.lora_{factor}.weight"


def factors(modules: tuple[str, ...] = (Q, V), rank: int = RANK) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for module in modules:
        tensors[key(module, "A")] = torch.randn(rank, WIDTH, generator=generator)
        tensors[key(module, "B")] = torch.randn(WIDTH, rank, generator=generator)
    return tensors


def write(folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6}
    fields["target_modules"] = ["q_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(factors() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def refused(folder: Path, message: str, file: str = "adapter_model.safetensors") -> None:
    with pytest.raises(AdapterError, match=f"^{re.escape(f'{folder / file}: {message}')}$"):
        read_peft_folder(folder)


def same(left: Adapter, right: Adapter) -> bool:
    return left.modules.keys() == right.modules.keys() and all(
        torch.equal(left.modules[m].a, right.modules[m].a)
        and torch.equal(left.modules[m].b, right.modules[m].b)
        and left.modules[m].scale == right.modules[m].scale
        for m in left.modules
    )


def test_factors_are_read_as_they_are_stored_and_the_scale_stays_separate(
    tmp_path: Path,
) -> None:
    stored = factors()
    adapter = read_peft_folder(write(tmp_path, stored), name="fr")
    assert adapter.name == "fr"
    assert adapter.modules.keys() == {Q, V}
    for module, part in adapter.modules.items():
        assert torch.equal(part.a, stored[key(module, "A")])
        assert torch.equal(part.b, stored[key(module, "B")])
        assert part.scale == 1.5


def test_an_adapter_is_named_after_its_folder(tmp_path: Path) -> None:
    assert read_peft_folder(write(tmp_path)).name == tmp_path.name


def test_the_name_of_a_folder_is_its_own_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "french"
    (folder / "inner").mkdir(parents=True)
    write(folder)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    for given in (".", "inner/..", "../link", folder / "inner" / ".."):
        assert read_peft_folder(given).name == "french", given


def test_an_adapter_keeps_its_modules_when_the_mapping_it_was_made_of_changes() -> None:
    part = LoRAFactors(torch.ones(1, 2), torch.ones(3, 1), 1.0)
    modules: dict[str, Factors] = {"q_proj": part}
    adapter = Adapter("one", modules)
    modules["experts.up_proj"] = part
    del modules["q_proj"]
    assert list(adapter.modules) == ["q_proj"]


def test_modules_of_an_adapter_cannot_be_replaced(tmp_path: Path) -> None:
    adapter = read_peft_folder(write(tmp_path))
    with pytest.raises(TypeError):
        adapter.modules[Q] = adapter.modules[V]  # type: ignore[index]


def test_a_loaded_adapter_does_not_change_when_its_file_is_overwritten(tmp_path: Path) -> None:
    before = read_peft_folder(write(tmp_path))
    kept = {m: part.a.clone() for m, part in before.modules.items()}
    path = tmp_path / "adapter_model.safetensors"
    # in place, as a training step on the same inode does
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * (path.stat().st_size // 2))
    assert all(torch.equal(kept[m], part.a) for m, part in before.modules.items())
    with pytest.raises(AdapterError, match="must be finite"):
        read_peft_folder(tmp_path)


def test_reading_a_folder_twice_gives_the_same_adapter_in_memory_of_its_own(
    tmp_path: Path,
) -> None:
    first, second = read_peft_folder(write(tmp_path)), read_peft_folder(tmp_path)
    assert same(first, second)
    storages = [
        tensor.untyped_storage().data_ptr()
        for adapter in (first, second)
        for part in adapter.modules.values()
        for tensor in (part.a, part.b)
    ]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_dtype_of_the_file_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in factors().items()}
    assert read_peft_folder(write(tmp_path, tensors)).modules[Q].a.dtype == dtype


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(AdapterError, match=f"^{re.escape(str(path))}: not a safetensors file: "):
        read_peft_folder(tmp_path)


def test_a_file_without_factors_is_refused(tmp_path: Path) -> None:
    refused(write(tmp_path, {}), "holds no factors, so the base model would be served")


@pytest.mark.parametrize(("kept", "gone"), [("A", "B"), ("B", "A")])
def test_a_module_with_half_of_its_factors_is_refused_by_name(
    tmp_path: Path, kept: str, gone: str
) -> None:
    tensors = factors()
    del tensors[key(V, gone)]
    message = f"{V} has lora_{kept} but no lora_{gone} (1 such modules: {V})"
    refused(write(tmp_path, tensors), message)


def test_a_module_that_the_config_does_not_target_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, target_modules=["q_proj", "v_prj"])
    refused(
        folder,
        f"{V} has factors, but target_modules of adapter_config.json does not name it; "
        "did you mean 'v_prj'?",
    )


NAMES = (
    "the tensor's name must be base_model.model.<module>.lora_A.weight, .lora_B.weight or, "
    "of an embedding, .lora_embedding_A or .lora_embedding_B"
)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"base_model.model.{Q}.lora_magnitude_vector", "DoRA is not supported"),
        (f"base_model.model.{Q}.lora_B.bias", "a bias of lora_B is not supported"),
        (
            "base_model.model.model.embed_tokens.lora_embedding_A.weight",
            NAMES,
        ),
        (
            f"base_model.model.{Q}.base_layer.weight",
            "changed base weights are not supported",
        ),
        ("base_model.model.lm_head.base_layer.weight", "changed base weights are not supported"),
        ("base_model.model.lm_head.weight", "weights of the base model are not supported"),
        (
            f"base_model.model.{Q}.lora_A.default.weight",
            NAMES,
        ),
        (
            f"{Q}.lora_A.weight",
            NAMES,
        ),
    ],
)
def test_a_tensor_that_would_be_ignored_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    tensors = factors() | {name: torch.zeros(WIDTH)}
    refused(write(tmp_path, tensors), f"{name}: {reason}")


TABLE = "base_model.model.model.embed_tokens"


def of_embedding(rows: int = 11) -> dict[str, Tensor]:
    return {
        f"{TABLE}.lora_embedding_A": torch.randn(RANK, rows),
        f"{TABLE}.lora_embedding_B": torch.randn(WIDTH, RANK),
    }


def test_factors_of_an_embedding_are_read_beside_those_of_linear_modules(tmp_path: Path) -> None:
    own = of_embedding()
    copy = {f"{TABLE}.base_layer.weight": torch.zeros(11, WIDTH)}
    folder = write(
        tmp_path, factors() | own | copy, target_modules=["q_proj", "v_proj", "embed_tokens"]
    )
    found = read_peft_folder(folder).modules["model.embed_tokens"]
    assert torch.equal(found.a, own[f"{TABLE}.lora_embedding_A"])
    assert torch.equal(found.b, own[f"{TABLE}.lora_embedding_B"])


def test_a_copy_of_an_embedding_has_a_row_for_each_id(tmp_path: Path) -> None:
    copy = {f"{TABLE}.base_layer.weight": torch.zeros(WIDTH, 11)}
    folder = write(tmp_path, of_embedding() | copy, target_modules=["embed_tokens"])
    refused(
        folder,
        f"{TABLE}.base_layer.weight must be [11, {WIDTH}], as the factors say (got [{WIDTH}, 11])",
    )


def test_a_copy_of_a_bias_has_a_value_for_each_output(tmp_path: Path) -> None:
    head = "base_model.model.lm_head"
    own = {
        f"{head}.lora_A.weight": torch.randn(RANK, WIDTH),
        f"{head}.lora_B.weight": torch.randn(11, RANK),
    }
    for size in (11, WIDTH):
        copy = {f"{head}.base_layer.bias": torch.zeros(size)}
        folder = write(tmp_path, own | copy, target_modules=["lm_head"])
        if size == 11:
            assert torch.equal(
                read_peft_folder(folder).modules["lm_head"].b, own[f"{head}.lora_B.weight"]
            )
        else:
            name = f"{head}.base_layer.bias"
            refused(folder, f"{name} must be [11], as the factors say (got [{WIDTH}])")


@pytest.mark.parametrize("factor", "AB")
def test_a_copy_of_an_embedding_with_half_of_its_factors_is_no_copy(
    tmp_path: Path, factor: str
) -> None:
    half = {name: t for name, t in of_embedding().items() if name.endswith(f"_{factor}")}
    copy = {f"{TABLE}.base_layer.weight": torch.zeros(11, WIDTH)}
    folder = write(tmp_path, half | copy, target_modules=["embed_tokens"])
    refused(folder, f"{TABLE}.base_layer.weight: changed base weights are not supported")


def test_half_of_the_factors_of_an_embedding_and_factors_of_two_kinds_are_refused(
    tmp_path: Path,
) -> None:
    for name in ("half", "both"):
        (tmp_path / name).mkdir()
    half = {name: tensor for name, tensor in of_embedding().items() if name.endswith("_A")}
    folder = write(tmp_path / "half", half, target_modules=["embed_tokens"])
    refused(
        folder,
        "model.embed_tokens has lora_embedding_A but no lora_embedding_B "
        "(1 such modules: model.embed_tokens)",
    )
    other = {f"{TABLE}.lora_B.weight": torch.randn(WIDTH, RANK)}
    folder = write(tmp_path / "both", half | other, target_modules=["embed_tokens"])
    message = "must have factors of an embedding or of another module (got both)"
    refused(folder, f"model.embed_tokens {message}")


HEAD = "base_model.model.lm_head.base_layer"


def test_copies_of_base_weights_that_peft_saves_beside_factors_are_not_read(
    tmp_path: Path,
) -> None:
    tensors = factors((Q, "lm_head"))
    config = {"target_modules": ["q_proj", "lm_head"]}
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    without = read_peft_folder(write(tmp_path / "without", tensors, **config))
    # not even a value that no factor may have is looked at
    copies = {
        f"{HEAD}.weight": torch.full((WIDTH, WIDTH), torch.nan),
        f"{HEAD}.bias": torch.zeros(WIDTH),
    }
    assert same(read_peft_folder(write(tmp_path / "with", tensors | copies, **config)), without)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [("weight", [WIDTH + 1, WIDTH], [WIDTH, WIDTH]), ("bias", [WIDTH + 1], [WIDTH])],
)
def test_a_copy_of_other_sizes_than_the_factors_is_refused(
    tmp_path: Path, name: str, shape: list[int], wanted: list[int]
) -> None:
    # the vocabulary was resized
    tensors = factors((Q, "lm_head")) | {f"{HEAD}.{name}": torch.zeros(shape)}
    refused(
        write(tmp_path, tensors, target_modules=["q_proj", "lm_head"]),
        f"{HEAD}.{name} must be {wanted}, as the factors say (got {shape})",
    )


@pytest.mark.parametrize("half", ["A", "B"])
def test_a_copy_beside_half_of_the_factors_is_refused(tmp_path: Path, half: str) -> None:
    tensors = factors((Q, "lm_head")) | {f"{HEAD}.weight": torch.zeros(WIDTH, WIDTH)}
    del tensors[key("lm_head", half)]
    refused(
        write(tmp_path, tensors, target_modules=["q_proj", "lm_head"]),
        f"{HEAD}.weight: changed base weights are not supported",
    )


def test_a_rank_that_differs_from_r_is_refused(tmp_path: Path) -> None:
    tensors = factors((Q,), rank=3) | factors((V,))
    refused(
        write(tmp_path, tensors),
        f"lora_A of {Q} must have rank 4, as r of adapter_config.json says "
        "(got 3 with shape [3, 8])",
    )


def test_a_rank_that_differs_from_its_pattern_is_refused(tmp_path: Path) -> None:
    refused(
        write(tmp_path, rank_pattern={"v_proj": 2}),
        f"lora_A of {V} must have rank 2, as rank_pattern['v_proj'] of adapter_config.json says "
        "(got 4 with shape [4, 8])",
    )


def test_b_of_another_rank_than_a_is_refused(tmp_path: Path) -> None:
    tensors = factors() | {key(V, "B"): torch.zeros(WIDTH, 5)}
    refused(
        write(tmp_path, tensors),
        f"lora_B of {V} must have rank 4, as r of adapter_config.json says "
        "(got 5 with shape [8, 5])",
    )


def test_a_rank_above_the_limit_is_refused(tmp_path: Path) -> None:
    refused(
        write(tmp_path, factors((Q,), rank=513), r=513),
        f"lora_A of {Q} must have a rank of 1 to 512 (got 513)",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_factors_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    tensors = factors()
    tensors[key(Q, "B")][3, 1] = value
    refused(
        write(tmp_path, tensors),
        f"lora_B of {Q} must be finite (got 1 values of NaN or Inf among 32)",
    )


def test_quantised_factors_are_refused(tmp_path: Path) -> None:
    tensors = factors() | {key(Q, "A"): torch.zeros(RANK, WIDTH, dtype=torch.int8)}
    refused(
        write(tmp_path, tensors),
        f"lora_A of {Q} must be float16, bfloat16 or float32 (got int8)",
    )


def test_factors_of_a_convolution_are_refused(tmp_path: Path) -> None:
    tensors = factors() | {key(Q, "A"): torch.zeros(RANK, WIDTH, 1, 1)}
    refused(
        write(tmp_path, tensors),
        f"lora_A of {Q} must have two dimensions (got shape [4, 8, 1, 1])",
    )
