"""Whether a record has the shape that readers rely on: one place that asks, so that nobody after it has to."""

from __future__ import annotations

from typing import Any

from harness.store.hooks import hook_rows

__all__ = ["require_shape"]

#: A dict with these keys, each of this shape where it is there and not None; a list of such; or anything.
_ANY = object()
_PAIR = (int, int)
_GATE = {"where": {"request": int, "position": int}, "slice": _PAIR}
_HOOK = {
    "gates": [_GATE],
    "worst": {"request": int, "position": int},
    "row_errors": [[_ANY]],
    "rows_per_error": int,
}
_VERDICT = {"hooks": [_HOOK], "divergence": {}, "notes": [_ANY]}
_CASE = {"verdicts": [{"verdict": _VERDICT, "detail": {}}], "artifacts": [{}]}
_PROVENANCE: dict[str, Any] = {"versions": {}, "machine": {}, "project": {}, "env": {}, "gpus": [{}]}
_SHAPES: dict[str, Any] = {
    "run": {"provenance": _PROVENANCE, "argv": [_ANY]},
    "declared": {"cases": [{"id": str}]},
    "expectations": {"entries": [{}]},
    "engine": {"id": str, "describe": {}},
    "started": {"id": str},
    "case": {"id": str, "outcome": str, **_CASE},
}


def require_shape(record: Any) -> None:
    """Check a record as it was read.

    Raises:
        ValueError: it is no record, or something in it is of another kind than its readers expect.
    """
    if not isinstance(record, dict):
        msg = "a record is an object"
        raise ValueError(msg)  # noqa: TRY004 - what a file holds is a value, whatever its type
    kind = record.get("type")
    if not isinstance(kind, str):
        msg = "a record names its type"
        raise ValueError(msg)  # noqa: TRY004
    _require(record, _SHAPES.get(kind, {}), kind)
    if kind != "case":
        return
    for entry in record.get("verdicts") or ():
        try:
            for row in hook_rows(entry.get("verdict") or {}):
                _demand(
                    not any(_is_huge(value) for value in vars(row).values()), f"{kind}: a verdict's number"
                )
        except (TypeError, ValueError, OverflowError) as error:
            msg = f"{kind}: a verdict cannot be read ({error})"
            raise ValueError(msg) from error


def _require(value: Any, shape: Any, where: str) -> None:
    if value is None or shape is _ANY:
        return
    if isinstance(shape, dict):
        _demand(isinstance(value, dict), where)
        for key, inner in shape.items():
            _require(value.get(key), inner, f"{where}.{key}")
    elif isinstance(shape, list):
        _demand(isinstance(value, list), where)
        for one in value:
            _demand(one is not None or shape[0] is _ANY, where)
            _require(one, shape[0], where)
    elif isinstance(shape, tuple):
        _demand(isinstance(value, list) and len(value) == len(shape), where)
        for one, inner in zip(value, shape, strict=True):
            _demand(isinstance(one, inner), where)
    else:
        _demand(isinstance(value, shape), where)


def _is_huge(value: Any) -> bool:
    """An integer that no column of a table holds."""
    return isinstance(value, int) and value.bit_length() > 63


def _demand(holds: bool, where: str) -> None:
    if not holds:
        msg = f"{where} is not what it should be"
        raise ValueError(msg)
