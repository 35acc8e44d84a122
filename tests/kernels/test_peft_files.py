"""Files of a PEFT folder that are missing, of another kind, or may not be read."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lorakernels.adapters import peft_folder
from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.peft_folder import read_peft_folder

Q = "model.layers.0.self_attn.q_proj"
NO_PICKLE = (
    "a pickle can run code and is never opened; save the adapter as adapter_model.safetensors"
)


def write(folder: Path) -> Path:
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    pair = {"A": torch.ones(4, 8), "B": torch.ones(8, 4)}
    tensors = {f"base_model.model.{Q}.lora_{factor}.weight": pair[factor] for factor in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def refused(folder: Path, message: str, file: str = "adapter_model.safetensors") -> None:
    with pytest.raises(AdapterError, match=f"^{re.escape(f'{folder / file}: {message}')}$"):
        read_peft_folder(folder)


def test_a_pickle_is_refused_and_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("the pickle was opened"))
    refused(
        tmp_path,
        NO_PICKLE,
        file="adapter_model.bin",
    )


def test_a_pickle_beside_the_weights_is_left_alone(tmp_path: Path) -> None:
    (write(tmp_path) / "adapter_model.bin").write_bytes(b"")
    assert read_peft_folder(tmp_path).modules.keys() == {Q}


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    refused(tmp_path, "file not found; a PEFT adapter has one")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    refused(tmp_path, "file not found; a PEFT adapter has one", file="adapter_config.json")


def refusal(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_a_config_that_may_not_be_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setattr(os, "open", refusal)
    refused(tmp_path, "cannot be read: Permission denied", file="adapter_config.json")


def may_not_be_looked_at(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As root, which tests may run as, may look at everything."""
    stat = Path.stat

    def refuse(self: Path, **options: Any) -> os.stat_result:
        if self.name in names:
            refusal()
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", refuse)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_may_not_be_looked_at_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    write(tmp_path)
    may_not_be_looked_at(monkeypatch, file, "adapter_model.bin")
    refused(tmp_path, "cannot be read: Permission denied", file=file)


def test_weights_that_may_not_be_looked_at_are_no_reason_to_speak_of_the_pickle_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (write(tmp_path) / "adapter_model.bin").write_bytes(b"")
    may_not_be_looked_at(monkeypatch, "adapter_model.safetensors", "adapter_model.bin")
    refused(tmp_path, "cannot be read: Permission denied")


def test_a_pickle_that_may_not_be_looked_at_is_refused_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path).joinpath("adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    may_not_be_looked_at(monkeypatch, "adapter_model.bin")
    refused(tmp_path, NO_PICKLE, file="adapter_model.bin")


def test_a_folder_that_may_not_be_looked_at_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    may_not_be_looked_at(monkeypatch, tmp_path.name)
    message = f"{tmp_path}: cannot be read: Permission denied"
    with pytest.raises(AdapterError, match=f"^{re.escape(message)}$"):
        read_peft_folder(tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    config = write(tmp_path) / "adapter_config.json"
    for path in (config, config / "inner"):
        with pytest.raises(AdapterError, match=f"^{re.escape(f'{path}: must be a folder with ')}"):
            read_peft_folder(path)


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"), OSError(3)])
def test_weights_that_cannot_be_opened_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    write(tmp_path)
    monkeypatch.setattr(peft_folder, "safe_open", fail)
    refused(tmp_path, f"cannot be read: {error.strerror or 3}")


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    message = (
        f"{tmp_path / 'gone'}: must be a folder with adapter_config.json and "
        "adapter_model.safetensors"
    )
    with pytest.raises(AdapterError, match=f"^{re.escape(message)}$"):
        read_peft_folder(tmp_path / "gone")


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / "adapter_model.safetensors"
    path.unlink()
    path.mkdir()
    refused(path.parent, "must be a regular file (got a folder)")
