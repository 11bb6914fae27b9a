"""``vllm.general_plugins`` entry point: instrument a plain ``vllm.LLM(...)`` or ``vllm serve`` of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.vllm.overlays import TapSpec
from harness.vllm.spec import CONFIG_KEY, HarnessSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["clear_config", "configure", "register"]

_configured: dict[str, Any] | None = None


def configure(
    capture_specs: Mapping[str, tuple[str, int]],
    max_num_batched_tokens: int,
    dtype: str,
    enable_batching: bool = False,
    enable_position_interventions: bool = False,
) -> None:
    """Instrument every engine this process makes from now on, until :func:`clear_config`.

    Args:
        capture_specs: hook name → (dot path, width), as ``overlay.capture_specs(hf_config)`` gives it.
        max_num_batched_tokens: tokens per step the engine is to use.
        dtype: torch's name of the engine's dtype.
        enable_batching: accepted for the original's sake; batches always work.
        enable_position_interventions: accepted for the original's sake; positions always work.
    """
    global _configured  # noqa: PLW0603 - one configuration per process is the plugin's contract
    del enable_batching, enable_position_interventions
    taps = tuple(TapSpec(name, path, width) for name, (path, width) in capture_specs.items())
    _configured = {
        "spec": HarnessSpec(taps, bare=True),
        "max_num_batched_tokens": max_num_batched_tokens,
        "dtype": str(dtype).removeprefix("torch."),
    }
    register()


def clear_config() -> None:
    """Leave engines made from now on alone."""
    global _configured  # noqa: PLW0603
    _configured = None


def register() -> None:
    """What vLLM calls in every process it starts; idempotent, and without a configuration it changes nothing."""
    if _configured is None:
        return
    from harness.vllm import internals

    internals.patch_engine_config(_apply)


def _apply(engine_args: Any) -> None:
    if _configured is None or CONFIG_KEY in (engine_args.additional_config or {}):
        return  # nothing asked for, or an engine that boot_vllm has instrumented itself
    from harness.vllm.worker import WORKER_CLASS

    engine_args.worker_cls = WORKER_CLASS
    engine_args.enable_prefix_caching = False
    engine_args.max_num_batched_tokens = _configured["max_num_batched_tokens"]
    engine_args.dtype = _configured["dtype"]
    engine_args.additional_config = {
        **(engine_args.additional_config or {}),
        **_configured["spec"].to_config(),
    }
