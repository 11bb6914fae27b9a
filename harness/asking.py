"""Whether a call asks for more than a backend declares, and in which words the case then says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.capabilities import FLAGS
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.capabilities import Capabilities

__all__ = ["undeclared", "undeclared_in_call"]


def undeclared(capabilities: Capabilities, *names: str) -> str | None:
    """The first of some capabilities that is not declared, in words.

    Raises:
        UsageError: a name that is none.
    """
    for name in names:
        if name not in FLAGS:
            msg = f"{name!r} is no capability; there are {', '.join(FLAGS)}"
            raise UsageError(msg)
        if not getattr(capabilities, name):
            return f"{name} ({FLAGS[name]})"
    return None


def undeclared_in_call(
    capabilities: Capabilities, prompts: Sequence[Any], names: Sequence[str], asked: Mapping[str, Any]
) -> str | None:
    """What a call of ``forward`` needs and the backend does not declare, in words; None where it declares it all.

    Args:
        capabilities: of the backend.
        prompts: of the call.
        names: points to capture.
        asked: its other arguments.
    """
    needed = []
    if len(prompts) > 1 and isinstance(prompts[0], Sequence):
        needed.append("batch")
    if asked.get("max_new_tokens", 1) != 1:
        needed.append("decode")
    if asked.get("return_logits"):
        needed.append("logits")
    specs = asked.get("intervene")
    sets = [
        one for one in (specs if isinstance(specs, list | tuple) else [specs]) if isinstance(one, Mapping)
    ]
    if isinstance(specs, list | tuple) and len(prompts) > 1 and any(sets):
        needed.append("edit_per_prompt")
    specs_of_all = [spec for one in sets for spec in one.values()]
    if any(isinstance(spec, Mapping) and spec.get("pos") is not None for spec in specs_of_all):
        needed.append("edit_positions")
    if reason := undeclared(capabilities, *needed):
        return reason
    served = set(capabilities.points(names))
    for name in names:
        if name not in served:
            return f"capture at {name}"
    for one in sets:
        for hook, spec in one.items():
            op = spec.get("op") if isinstance(spec, Mapping) else None
            # A spec that makes no sense is for the backend to refuse, which some cases are about.
            if (
                isinstance(op, str)
                and isinstance(hook, str)
                and _known(op, hook)
                and not capabilities.edits(op, hook)
            ):
                return f"{op} at {hook}"
    return None


def _known(op: str, hook: str) -> bool:
    from harness.interventions import OPS
    from harness.points import HookPoint

    try:
        HookPoint.parse(hook)
    except UsageError:
        return False
    return op in OPS
