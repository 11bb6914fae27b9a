"""Which engines a run needs: the cross product of models, dtypes, modes, topologies and step sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.backend import DTYPES, MODES, BootConfig, Topology
from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DEFAULT_MODELS", "EVERY_POINT", "ONE_RANK", "PROFILES", "Plan", "Profile", "plain"]

DEFAULT_MODELS = ("smollm2-135m", "tiny-llama")
#: Room for a prompt just over the largest step, and its new tokens.
_MAX_MODEL_LEN = 320
ONE_RANK = ("tp1",)
#: Options of an engine that serves every point its family has, with room for an edit at each kind of them.
EVERY_POINT = {"hook_points": "every", "max_edit_programs": 48}


@dataclass(frozen=True)
class Profile:
    """How much of the matrix a run covers."""

    description: str
    step_sizes: tuple[int, ...]  #: tokens per step; prompts above are served in chunks
    examples: int  #: hypothesis examples where a test has any


PROFILES = {
    "smoke": Profile("minutes on two cores", (64,), 25),
    "full": Profile("every family at every dtype and mode, within an hour on two cores", (64,), 50),
    "nightly": Profile("everything: every rank layout and step size, most examples", (64, 16, 256), 1000),
}


@dataclass(frozen=True)
class Plan:
    """What a run was asked to cover."""

    profile: str = "smoke"
    models: tuple[str, ...] = DEFAULT_MODELS
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    modes: tuple[str, ...] = MODES
    topologies: tuple[str, ...] = ONE_RANK
    backend: str = "vllm"

    def __post_init__(self) -> None:
        """Refuse what no engine can be booted for, by name."""
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                msg = f"--dtype {dtype!r} is not known; there are {', '.join(DTYPES)}"
                raise UsageError(msg)
        if self.profile not in PROFILES:
            msg = f"--profile {self.profile!r} is not known; there are {', '.join(PROFILES)}"
            raise UsageError(msg)
        for topology in self.topologies:
            Topology.parse(topology)

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Tokens per step, smallest set first."""
        return PROFILES[self.profile].step_sizes

    @property
    def examples(self) -> int:
        """Examples a property-based test tries."""
        return PROFILES[self.profile].examples

    def configs(
        self, extra_models: Iterable[str] = (), extra_topologies: Iterable[str] = ()
    ) -> list[BootConfig]:
        """One config per engine, in the order they should be booted: a model's engines stand together.

        ``path`` is empty; the session fills it once the models are at hand.

        Args:
            extra_models: tried too where the run is of the default models.
            extra_topologies: tried too where the run is of one rank.
        """
        ranks = (
            [t for t in extra_topologies if t not in self.topologies] if self.topologies == ONE_RANK else []
        )
        extra = [m for m in extra_models if m not in self.models] if self.models == DEFAULT_MODELS else []
        return [
            BootConfig(
                backend=self.backend,
                model=model,
                path="",
                dtype=DTYPES[dtype],
                mode=mode,
                topology=Topology.parse(topology),
                max_num_batched_tokens=step,
                max_model_len=_MAX_MODEL_LEN,
                options=_options(self.backend),
            )
            for model in (*self.models, *extra)
            for dtype in self.dtypes
            for topology in (*self.topologies, *ranks)
            for step in self.step_sizes
            for mode in self.modes
        ]


def plain(config: BootConfig) -> BootConfig:
    """``config`` with the options that every engine of a run has, and no others."""
    return replace(config, options=_options(config.backend))


def _options(backend: str) -> dict[str, object]:
    """Every vLLM engine can give raw logits too: it costs nothing until asked, and saves the observer test a boot."""
    return {"logprobs_mode": "raw_logits", "max_logprobs": -1} if backend == "vllm" else {}
