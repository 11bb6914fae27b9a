"""Engines that differ from the failing one in one setting: which of them are wrong as well."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.backend import Topology
from harness.bisect.bench import Bench
from harness.errors import CaptureError, EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from harness.backend import BootConfig
    from harness.bisect.bench import Call
    from harness.check import Parity

__all__ = ["Tried", "able", "neighbours", "try_settings"]

#: Least programs of edits beside those the call itself needs.
_PROGRAMS = 24
_SMALL_STEP = 16


@dataclass(frozen=True)
class Tried:
    """One setting.

    Attributes:
        name: what was changed, ``eager`` or ``one rank``.
        engine: id of the engine.
        wrong: whether the call is wrong there; None: it could not be run.
        error: why not.
    """

    name: str
    engine: str
    wrong: bool | None
    error: str = ""


def able(config: BootConfig) -> BootConfig:
    """The same engine with every point, room for edits, and logits of its own."""
    if config.backend != "vllm":
        return config
    programs = max(int(config.options.get("max_edit_programs") or 0), _PROGRAMS)
    return config.with_options(
        hook_points="every", max_edit_programs=programs, logprobs_mode="raw_logits", max_logprobs=-1
    )


def neighbours(config: BootConfig, call: Call, how: str) -> Iterator[tuple[str, BootConfig]]:
    """Names and engines that differ from ``config`` in one setting that can matter for ``call``.

    Args:
        config: the failing one.
        call: what failed.
        how: one of :data:`~harness.bisect.choices.CHOICES`.
    """
    if how == "none" or config.backend != "vllm":
        return
    if config.mode == "compiled":
        yield "eager", replace(config, mode="eager")
    elif how == "all":
        yield "compiled", replace(config, mode="compiled")
    if config.topology != Topology():
        yield "one rank", replace(config, topology=Topology())
    total = sum(len(prompt) + call.new_tokens - 1 for prompt in call.prompts)
    if total > config.max_num_batched_tokens:
        whole = max(config.max_model_len, 1 << (total - 1).bit_length())
        yield f"the whole batch in one step of {whole}", replace(config, max_num_batched_tokens=whole)
    if how == "all" and config.max_num_batched_tokens > _SMALL_STEP:
        yield f"steps of {_SMALL_STEP} tokens", replace(config, max_num_batched_tokens=_SMALL_STEP)
    if config.dtype != "float32":
        yield "float32", replace(config, dtype="float32")
    elif how == "all":
        yield "bfloat16", replace(config, dtype="bfloat16")


def try_settings(
    parity: Parity,
    settings: Sequence[tuple[str, BootConfig]],
    call: Call,
    *,
    disturbed: bool,
    say: Callable[[str], None] = lambda _: None,
) -> list[Tried]:
    """Boot each of these engines, run the call and say whether it is wrong there."""
    tried = []
    for name, config in settings:
        try:
            with parity.like(config) as other:
                wrong = bool(Bench(other, call, disturbed=disturbed).rows)
            one = Tried(name, config.id, wrong)
        except CaptureError as error:
            one = Tried(name, config.id, True, str(error).splitlines()[0])
        except (EngineError, UsageError) as error:
            one = Tried(name, config.id, None, str(error).splitlines()[0])
        word = "could not be run" if one.wrong is None else "wrong, too" if one.wrong else "right"
        say(f"{name}: {word}")
        tried.append(one)
    return tried
