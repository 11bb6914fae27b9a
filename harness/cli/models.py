"""``vllm-parity models``: what can be compared without a hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.cli.codes import OK

if TYPE_CHECKING:
    import argparse

__all__ = ["ABOUT", "HELP", "add_arguments", "run"]

HELP = "list the models that need no hub"
ABOUT = ""


def add_arguments(_: argparse.ArgumentParser) -> None:
    """None."""


def run(_: argparse.Namespace) -> int:
    """One line per model, then the folder of the cache."""
    from harness.models import bundled
    from harness.models.cache import MANIFEST, cache_dir
    from harness.models.smollm2 import NAME, RECIPE_VERSION
    from harness.models.tiny import TINY_MODELS

    versions = {NAME: RECIPE_VERSION, **{model.name: model.recipe_version for model in TINY_MODELS}}
    for source in bundled():
        entry = cache_dir() / "models" / f"{source.name}-v{versions.get(source.name, 1)}"
        cached = "in the cache" if (entry / MANIFEST).is_file() else "built on first use"
        tokenizer = "tokenizer" if source.has_tokenizer else "no tokenizer"
        print(f"{source.name:<15}  {tokenizer:<12}  {cached:<18}  {source.description}")
    print(f"cache: {cache_dir()}")
    return OK
