"""A verdict in words: one line where it passed, at most :data:`MAX_LINES` where it failed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.parity.floor import ROUNDOFFS, SIGNIFICAND_BITS

if TYPE_CHECKING:
    from harness.parity.types import CaseVerdict, Gate, HookVerdict

__all__ = ["MAX_LINES", "failure_message", "figure", "summary_line"]

MAX_LINES = 30
#: Hooks in the table: the origin and the worst others.
_TABLE = 8
#: Hooks before and after the origin whose errors are shown.
_AROUND = 2
_NOTES = 5


def figure(value: float) -> str:
    """An error in three digits."""
    if value == 0:
        return "0"
    return f"{value:.2e}" if math.isfinite(value) else "∞"


def _times(value: float) -> str:
    """A required k: what it would take, in as many digits as matter."""
    if not math.isfinite(value):
        return "∞"
    return f"{value:.2f}" if value < 100 else f"{value:.3g}"


def _where(gate: Gate) -> str:
    if gate.where is not None:
        return f"request {gate.where.request} position {gate.where.position}"
    if gate.slice is not None:
        return f"channels {gate.slice[0]} to {gate.slice[1] - 1}"
    return ""


def summary_line(verdict: CaseVerdict) -> str:
    """One line, for a passing case; for a failing one the sentence that says where it began."""
    if not verdict.passed:
        return "parity broken: " + (
            verdict.divergence.sentence if verdict.divergence else "see the failing hooks"
        )
    worst = verdict.worst
    gate = worst.worst_gate
    rows = max(hook.n_rows for hook in verdict.hooks)
    return (
        f"parity holds at {verdict.dtype}: {len(verdict.hooks)} hooks, {rows} rows; nearest to its bound is "
        f"{worst.hook} ({gate.name}): needs k = {_times(gate.required_k)}, allowed is {verdict.k:g}"
    )


def _origin(verdict: CaseVerdict) -> int:
    """Index of the first hook that failed, 0 where none did."""
    return next((i for i, hook in enumerate(verdict.hooks) if not hook.passed), 0)


def _chosen(verdict: CaseVerdict, origin: int) -> list[HookVerdict]:
    """The origin and the worst of the other failing hooks, in forward order."""
    failing = [hook for hook in verdict.hooks if not hook.passed]
    others = [hook for hook in failing if hook is not verdict.hooks[origin]]
    worst = sorted(others, key=lambda hook: -hook.worst_gate.required_k)[: _TABLE - 1]
    return [hook for hook in failing if hook is verdict.hooks[origin] or hook in worst]


def _table(verdict: CaseVerdict, origin: int) -> list[str]:
    """Columns aligned, the origin marked."""
    rows: list[tuple[str, ...]] = [
        ("", "hook", "worst gate", "err(E)", "err(R)", "floor", "bound", "needs k", "at")
    ]
    for hook in _chosen(verdict, origin):
        gate = hook.worst_gate
        figures = [figure(x) for x in (gate.err_engine, gate.err_reference, gate.floor, gate.bound)]
        mark = ">" if hook is verdict.hooks[origin] else ""
        rows.append((mark, hook.hook, gate.name, *figures, _times(gate.required_k), _where(gate)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            c.rjust(w) if 3 <= i <= 7 else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    failing = sum(not hook.passed for hook in verdict.hooks)
    if failing > len(rows) - 1:
        lines.append(f"   and {failing - len(rows) + 1} more; {failing} of {len(verdict.hooks)} hooks fail")
    return lines


def _around(verdict: CaseVerdict, origin: int) -> list[str]:
    """Errors of the hooks around the origin and what each step made of them: born, or only carried."""
    lines = ["aggregate error from hook to hook around the origin (reference in brackets):"]
    for index in range(max(0, origin - _AROUND), min(len(verdict.hooks), origin + _AROUND + 1)):
        hook = verdict.hooks[index]
        grown = "" if hook.amplification is None else f", {_times(hook.amplification)} times the hook before"
        mark = ">" if index == origin else " "
        lines.append(f"{mark} {hook.hook}: {figure(hook.err_engine)} ({figure(hook.err_reference)}){grown}")
    return lines


def _rule(verdict: CaseVerdict) -> list[str]:
    """Where the bound comes from."""
    bits = SIGNIFICAND_BITS.get(verdict.dtype)
    roundoff = f"2^-{bits}" if bits else "the unit roundoff"
    floor = f"{ROUNDOFFS:g} · {roundoff} · √(blocks + 1)"
    return [
        f"bound = {verdict.k:g} · max(err(R), floor). err(R): what the reference gets wrong at {verdict.dtype} itself,",
        f"for a row or slice at least its aggregate. floor = {floor}: what the dtype alone may cost.",
    ]


def failure_message(verdict: CaseVerdict) -> str:
    """What pytest shows: the sentence, the worst hooks, where bounds come from, and the errors around the origin."""
    origin = _origin(verdict)
    lines = [
        summary_line(verdict),
        "",
        *_table(verdict, origin),
        "",
        *_rule(verdict),
        "",
        *_around(verdict, origin),
    ]
    notes = [f"note: {note}" for note in verdict.notes]
    lines += notes[:_NOTES] + ([f"and {len(notes) - _NOTES} more notes"] if len(notes) > _NOTES else [])
    return "\n".join(lines[:MAX_LINES])
