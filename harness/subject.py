"""What a suite asks about the engine on trial before it runs anything: sizes, points, tokenizer, what to leave out."""

from __future__ import annotations

import importlib.util
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import pytest

from harness.asking import undeclared
from harness.conventions import Emission
from harness.errors import UndeclaredError
from harness.geometry import Geometry
from harness.points import TEMPLATES, all_points, every_point, select
from harness.reference.load import as_dtype

if TYPE_CHECKING:
    from harness.backend import BootConfig
    from harness.capabilities import Capabilities
    from harness.pool import Engine
    from harness.session import ParitySession

__all__ = ["Subject"]


class Subject:
    """One engine, booted when it is first asked for, and the model it runs.

    Attributes:
        config: which engine.
    """

    def __init__(self, session: ParitySession, config: BootConfig) -> None:
        self._session = session
        self.config = session.located(config)

    @property
    def engine(self) -> Engine:
        """The live engine; a mode or ranks that its backend does not declare make the case not applicable."""
        try:
            return self._session.engine(self.config)
        except UndeclaredError as error:
            return cast("Engine", self.not_applicable(str(error)))

    @cached_property
    def hf_config(self) -> Any:
        """The model's Hugging Face config."""
        from harness.models import load_config

        return load_config(self.config.path)

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to one below this."""
        return int(self.hf_config.vocab_size)

    @cached_property
    def geometry(self) -> Geometry:
        """The model's sizes."""
        return Geometry.of(self.hf_config)

    @property
    def n_layers(self) -> int:
        """Blocks of the model."""
        return self.geometry.layers

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.geometry.width

    @property
    def k(self) -> float:
        """How many times the reference's own error an engine may make."""
        return self._session.k

    @property
    def capabilities(self) -> Capabilities:
        """What the engine's backend declares."""
        return self.engine.capabilities

    def requires(self, *names: str) -> None:
        """Make the case not applicable to a backend that does not declare each of these capabilities."""
        if reason := undeclared(self.capabilities, *names):
            self.not_applicable(f"{self.config.backend_name} declares no {reason}")

    def emission(self, hook: str) -> Emission:
        """How what the engine works on at ``hook`` holds the point's value, at the engine's dtype."""
        if not self.capabilities.is_emitted(hook):
            return Emission()
        from harness.reference.weights import emission

        return emission(self.config.path, hook, as_dtype(self.config.dtype))

    @property
    def profile(self) -> str:
        """How much of the matrix this run covers: ``smoke``, ``full`` or ``nightly``."""
        return self._session.plan.profile

    @property
    def examples(self) -> int:
        """How many examples a property-based test tries in this profile."""
        return self._session.plan.examples

    @property
    def hook_points(self) -> list[str]:
        """What the engine must serve, whatever it says itself: the usual points, or those it was booted for.

        A backend that declares what it can capture is held to that much of them; with none the case is not applicable.
        """
        asked = self.config.options.get("hook_points")
        if asked is None:
            return self.capabilities.points(all_points(self.n_layers)) or self.not_applicable(
                f"{self.config.backend_name} declares none of the points captured here"
            )
        return self.every_point if asked == "every" else select(asked, every_point(self.n_layers))

    @cached_property
    def every_point(self) -> list[str]:
        """Every point that this family has on both sides, by the tables of both."""
        from harness.reference.families import tree_of_config
        from harness.vllm.overlays import get_overlay

        overlay = get_overlay(self.hf_config.architectures[0])
        missing = overlay.nonfiring_hooks(self.config.topology.tp)
        both = [template for template in TEMPLATES if template not in missing]
        return tree_of_config(self.hf_config).points(self.n_layers, both)

    @property
    def step(self) -> int:
        """Tokens per step; longer prompts are served in chunks."""
        return self.config.max_num_batched_tokens

    @cached_property
    def has_tokenizer(self) -> bool:
        """Whether the checkpoint ships a tokenizer."""
        from harness.models import has_tokenizer

        return has_tokenizer(self.config.path)

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer; a model without one makes the case not applicable."""
        if not self.has_tokenizer:
            self.not_applicable(f"{self.config.model} ships no tokenizer")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.config.path)

    def needs(self, module: str, what: str) -> None:
        """Skip the case, in the class of optional software that is missing, unless a module can be imported here."""
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"not-installed: {what}")

    def not_applicable(self, reason: str) -> Any:
        """Skip the case, in the class of things that make no sense for this model."""
        pytest.skip(f"not-applicable: {reason}")
