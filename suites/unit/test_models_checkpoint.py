"""A checkpoint's folder is read far enough to refuse a damaged one in words, and its code is never run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from harness.errors import UsageError
from harness.models import has_tokenizer, load_config, resolve

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tiny_copy(tmp_path: Path, tiny_folder: Path) -> Path:
    """A copy of tiny-llama to damage."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tiny_folder / name).read_bytes())
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_whole_checkpoint_gives_its_config(tiny_copy: Path) -> None:
    config = load_config(tiny_copy)
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("llama", 64, 4)


def test_a_missing_folder_or_config(tiny_copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it is not a folder"):
        load_config(tmp_path / "nowhere")
    (tiny_copy / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_config(tiny_copy)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"hidden_size": 64}', "\udcff"])
def test_a_config_that_says_nothing(tiny_copy: Path, text: str) -> None:
    (tiny_copy / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError, match=r"config\.json (does not parse|names no model_type)"):
        load_config(tiny_copy)


def test_an_unknown_architecture(tiny_copy: Path) -> None:
    edit_config(tiny_copy, model_type="not-a-model")
    with pytest.raises(UsageError, match="not-a-model"):
        load_config(tiny_copy)


def test_a_checkpoints_own_code_is_never_run(tiny_copy: Path, tmp_path: Path) -> None:
    edit_config(tiny_copy, model_type="mine", auto_map={"AutoConfig": "mine.MyConfig"})
    (tiny_copy / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UsageError, match="code that ships with it, which is never run"):
        load_config(tiny_copy)
    assert not (tmp_path / "ran").exists()


def test_missing_weights(tiny_copy: Path) -> None:
    (tiny_copy / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no \*\.safetensors"):
        load_config(tiny_copy)
    (tiny_copy / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UsageError, match=r"pickled.*convert it to safetensors"):
        load_config(tiny_copy)


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_truncated_weights(tiny_copy: Path, keep: int) -> None:
    weights = tiny_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(UsageError, match=r"model\.safetensors is damaged"):
        load_config(tiny_copy)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model"])
def test_a_tokenizer_is_told_by_its_files(tiny_copy: Path, name: str) -> None:
    # The settings alone make no tokenizer.
    (tiny_copy / "tokenizer_config.json").write_text("{}")
    assert has_tokenizer(tiny_copy) is resolve(tiny_copy).has_tokenizer is False
    (tiny_copy / name).write_text("{}")
    assert has_tokenizer(tiny_copy) is resolve(tiny_copy).has_tokenizer is True


def test_an_index_that_names_a_missing_shard(tiny_copy: Path) -> None:
    index = tiny_copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(UsageError, match=r"names model-2\.safetensors, which is missing"):
        load_config(tiny_copy)
    index.write_text("{}")
    with pytest.raises(UsageError, match="does not parse"):
        load_config(tiny_copy)
