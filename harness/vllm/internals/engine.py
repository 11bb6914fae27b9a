"""What is read and called of an engine as a whole, from the driver's side."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from harness.errors import CaptureError, EngineError, UsageError
from harness.vllm.internals.moved import moved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "abort_all",
    "call_workers",
    "extract_hf_config",
    "generate",
    "patch_engine_config",
    "ray_backend",
    "shut_down",
    "verify_hook_coverage",
]


def extract_hf_config(llm: Any) -> Any:
    """The Hugging Face config of a booted engine (``llm.llm_engine.model_config.hf_config``)."""
    try:
        return llm.llm_engine.model_config.hf_config
    except AttributeError as error:
        raise moved("LLM.llm_engine.model_config.hf_config") from error


def call_workers(llm: Any, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
    """Call an RPC method of the capture worker on every rank (``LLM.collective_rpc``): one answer per rank.

    Raises:
        UsageError: a worker raised one.
        CaptureError: a worker raised anything else.
    """
    answers: list[tuple[str, Any]] = llm.collective_rpc("tl_call", args=(method, list(args)))
    for kind, told in answers:
        if kind:
            error = UsageError if kind == "UsageError" else CaptureError
            raise error(told if kind in {"UsageError", "CaptureError"} else f"{method}: {kind}: {told}")
    return [answer for _, answer in answers]


def abort_all(llm: Any) -> None:
    """Drop every request the engine still works on (``llm_engine.output_processor.request_states``)."""
    try:
        engine = llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
    except AttributeError as error:
        raise moved("LLMEngine.output_processor.request_states") from error


def generate(llm: Any, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
    """Run token-id prompts to their end (``LLM.generate``); an interrupted call leaves no request behind."""
    from vllm.inputs import TokensPrompt

    sent = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    try:
        outputs: list[Any] = llm.generate(sent, params, use_tqdm=False)
    except BaseException:
        # What is left of this call would run on inside the next one. Its own error is the one to be told.
        with contextlib.suppress(Exception):
            abort_all(llm)
        raise
    return outputs


def shut_down(llm: Any) -> None:
    """Release an engine's processes and memory (``llm_engine.engine_core.shutdown()``)."""
    engine = getattr(llm, "llm_engine", None)
    core = getattr(engine, "engine_core", None)
    if core is None:
        raise moved("LLM.llm_engine.engine_core")
    core.shutdown()


def patch_engine_config(transform: Callable[[Any], None]) -> None:
    """Let ``transform(engine_args)`` run before any engine config is made in this process; once per process.

    Wraps ``EngineArgs.create_engine_config``, the one place that a plain ``LLM(...)`` and ``vllm serve`` share.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, "harness_wrapped", False):
        return

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        transform(self)
        return original(self, *args, **kwargs)

    create_engine_config.harness_wrapped = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def verify_hook_coverage(absent_by_rank: Sequence[Sequence[str] | None], names: Sequence[str]) -> None:
    """Check after boot that every point is installed on at least one rank.

    Args:
        absent_by_rank: per rank the points it does not hold; None where installation never ran.
        names: every point that was asked for.

    Raises:
        EngineError: installation never ran on a rank, or points no rank holds.
    """
    silent = [rank for rank, absent in enumerate(absent_by_rank) if absent is None]
    if silent:
        msg = (
            f"hook installation never ran on rank {', '.join(map(str, silent))}: the worker class there is not the "
            "capture worker, so nothing it computes would be seen"
        )
        raise EngineError(msg)
    missing = [
        name for name in names if all(absent is not None and name in absent for absent in absent_by_rank)
    ]
    if missing:
        shown = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
        msg = f"no rank holds {shown}: the overlay's module paths do not fit this release of vLLM"
        raise EngineError(msg)


def ray_backend() -> Any:
    """What ``distributed_executor_backend`` has to be for Ray: vLLM's own, or one that also takes a CPU for a device.

    Relies on ``current_platform.device_type``; vLLM knows no device for Ray on CPU.
    """
    from vllm.platforms import current_platform

    if current_platform.device_type != "cpu":
        return "ray"
    from harness.vllm.ray_executor import CPURayExecutor

    return CPURayExecutor
