"""What else a person should know: recorded beside a verdict, and never a reason to fail by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness.parity.metrics import significand_bits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.parity.measure import RowTable
    from harness.parity.rows import Captures

__all__ = ["case_notes"]

#: Narrower formats by their significand, for each declared one: bits → what to call it.
_NARROWER = {
    "float64": {24: "float32", 11: "float16 or TF32", 8: "bfloat16"},
    "float32": {11: "float16 or TF32", 8: "bfloat16"},
    "float16": {8: "bfloat16", 4: "an 8-bit float"},
    "bfloat16": {4: "an 8-bit float"},
}
_SHOWN = 3


def _some(hooks: Sequence[str]) -> str:
    more = f" and {len(hooks) - _SHOWN} more" if len(hooks) > _SHOWN else ""
    return ", ".join(hooks[:_SHOWN]) + more


def _wrong_dtype(engine: Captures, hooks: Sequence[str], dtype: str) -> list[str]:
    by_dtype: dict[str, list[str]] = {}
    for hook in hooks:
        found = next(str(t.dtype) for t in engine[hook] if str(t.dtype) != f"torch.{dtype}")
        by_dtype.setdefault(found.removeprefix("torch."), []).append(hook)
    return [
        f"captured as {found} where the engine runs {dtype}: {_some(names)}"
        for found, names in by_dtype.items()
    ]


def _narrow_values(
    engine: Captures, sames: Sequence[Captures], hooks: Sequence[str], dtype: str
) -> list[str]:
    """Hooks whose every value fits a narrower format although the reference's own values do not."""
    found: dict[str, list[str]] = {}
    for hook in hooks:
        bits = significand_bits(engine[hook])
        fits = [limit for limit in _NARROWER[dtype] if bits is not None and bits <= limit]
        if not fits or any((significand_bits(one[hook]) or 0) <= min(fits) for one in sames):
            continue  # an embedding of a bf16 checkpoint is bf16 at fp32 too, and rightly
        found.setdefault(_NARROWER[dtype][min(fits)], []).append(hook)
    return [
        f"effective dtype: every value of {_some(names)} fits {narrow}, though captured as {dtype}"
        for narrow, names in found.items()
    ]


def _flat_rows(tables: Mapping[str, RowTable]) -> list[str]:
    notes = []
    for what, column in (("all zero", "zero"), ("constant", "constant")):
        hooks = {
            hook: flags for hook, table in tables.items() if bool((flags := getattr(table, column)).any())
        }
        if hooks:
            hook, flags = next(iter(hooks.items()))
            where = tables[hook].ref(int(flags.nonzero()[0]))
            notes.append(
                f"{what} where the truth varies: {int(flags.sum())} of {flags.numel()} rows of {hook}, "
                f"first request {where.request} position {where.position}"
                + (f"; and {len(hooks) - 1} more hooks" if len(hooks) > 1 else "")
            )
    return notes


def _broken_reference(tables: Mapping[str, RowTable]) -> list[str]:
    hooks = [hook for hook, table in tables.items() if not bool(torch.isfinite(table.same).all())]
    if not hooks:
        return []
    what = "the reference at the engine's dtype is not finite"
    return [f"{what} in {_some(hooks)}; there the floor and its other rows decide"]


def _vague_rows(vague: Mapping[str, int]) -> list[str]:
    hooks = [hook for hook, count in vague.items() if count]
    if not hooks:
        return []
    rows = sum(vague.values())
    return [
        f"hardly judged: {rows} row(s) are so noisy at this dtype that half of one may be wrong: {_some(hooks)}"
    ]


def case_notes(
    engine: Captures,
    sames: Sequence[Captures],
    tables: Mapping[str, RowTable],
    dtype: str,
    *,
    wrong_dtype: Sequence[str],
    vague: Mapping[str, int],
) -> tuple[str, ...]:
    """Everything worth a line beside the verdict.

    Args:
        engine: E.
        sames: realisations of R.
        tables: the figures of each hook.
        dtype: torch's name of the engine's dtype.
        wrong_dtype: hooks that failed for their captures' dtype.
        vague: hook → rows whose bound is too wide to mean much.
    """
    rightly_typed = [hook for hook in tables if hook not in wrong_dtype]
    return (
        *_wrong_dtype(engine, wrong_dtype, dtype),
        *_narrow_values(engine, sames, rightly_typed, dtype),
        *_flat_rows(tables),
        *_broken_reference(tables),
        *_vague_rows(vague),
    )
