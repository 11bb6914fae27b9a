"""What a backend says it can do. What it does not declare is not asked of it, and is never counted as a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from harness.errors import EngineError
from harness.interventions import OPS
from harness.points import matching

__all__ = ["FLAGS", "FULL", "Capabilities"]

#: Yes-or-no capabilities and what having each means, as the audit report says it.
FLAGS = {
    "batch": "several prompts of different lengths in one call",
    "decode": "greedy tokens after the prompt, and the rows computed for them",
    "chunking": "steps of at most max_num_batched_tokens tokens; longer prompts take several",
    "logits": "logits of every row",
    "edit_per_prompt": "another set of edits for each prompt of a call",
    "edit_positions": "edits of some rows and not of others",
    "compiled": "a compiled mode beside the eager one",
    "ranks": "tensor or pipeline parallelism",
}


@dataclass(frozen=True)
class Capabilities:
    """Declared by a booted backend as ``capabilities``; everything left out is not there.

    Attributes:
        capture: patterns of the points that can be captured (``*`` does not cross a dot); None: every point of the
            model, which the suites then insist on.
        edit: op → patterns of the points where it works; None: every op wherever can be captured.
        emitted: patterns of the points where the backend works on what the module returns, and not on the value the
            name promises: a final norm whose weight is multiplied in already. ``docs/backends.md`` says who translates.
    """

    capture: tuple[str, ...] | None = ()
    edit: Mapping[str, tuple[str, ...]] | None = field(default_factory=dict)
    emitted: tuple[str, ...] = ()
    batch: bool = False
    decode: bool = False
    chunking: bool = False
    logits: bool = False
    edit_per_prompt: bool = False
    edit_positions: bool = False
    compiled: bool = False
    ranks: bool = False

    @classmethod
    def read(cls, declared: Any, who: str) -> Self:
        """Check a declaration and read it.

        Args:
            declared: a mapping with the names of this class' attributes, or one of this class.
            who: the backend, for errors.

        Raises:
            EngineError: a key, an op or a kind of value that there is not; it is the backend that is wrong.
        """
        if isinstance(declared, cls):
            return declared
        if not isinstance(declared, Mapping):
            raise _wrong(who, f"its capabilities are {declared!r}, not a mapping")
        known = [one.name for one in fields(cls)]
        for key in declared:
            if key not in known:
                raise _wrong(who, f"it declares {key!r}; there are {', '.join(known)}")
        given: dict[str, Any] = dict(declared)
        for key in FLAGS.keys() & given.keys():
            if not isinstance(given[key], bool):
                raise _wrong(who, f"it declares {key} as {given[key]!r}; say True or False")
        for key in ("capture", "emitted"):
            # Only of capture does None say something: that nothing is left out.
            if key in given and (given[key] is not None or key == "emitted"):
                given[key] = _patterns(who, key, given[key])
        if given.get("edit") is not None:
            given["edit"] = _edits(who, given["edit"])
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON that :meth:`read` takes."""
        return asdict(self)

    def points(self, available: Sequence[str]) -> list[str]:
        """Those of some points that can be captured, in their order."""
        return list(available) if self.capture is None else _among(self.capture, available)

    def edits(self, op: str, hook: str) -> bool:
        """Whether an op can be done at a point."""
        if self.edit is None:
            return bool(self.points([hook]))
        return bool(_among(self.edit.get(op, ()), [hook]))

    def is_emitted(self, hook: str) -> bool:
        """Whether the backend works on what the module returns at a point."""
        return bool(_among(self.emitted, [hook]))


#: What a backend that declares nothing is held to.
FULL = Capabilities(None, None, ("embed.*", "blocks.*.*", "blocks.*.*.*", "ln_final.*"), *[True] * len(FLAGS))


def _among(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    found = {name for pattern in patterns for name in matching(pattern, names)}
    return [name for name in names if name in found]


def _patterns(who: str, key: str, value: Any) -> tuple[str, ...]:
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not all(isinstance(p, str) for p in value)
    ):
        raise _wrong(
            who, f"it declares {key} as {value!r}; it is a list of patterns such as 'blocks.*.hook_out'"
        )
    return tuple(value)


def _edits(who: str, value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise _wrong(who, f"it declares edit as {value!r}; it is a mapping of ops to patterns")
    for op in value:
        if op not in OPS:
            raise _wrong(who, f"it declares the op {op!r}; there are {', '.join(OPS)}")
    return {op: _patterns(who, f"edit[{op!r}]", patterns) for op, patterns in value.items()}


def _wrong(who: str, what: str) -> EngineError:
    return EngineError(f"backend {who}: {what}")
