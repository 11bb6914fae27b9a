"""Interventions: what may be asked for, checked before anything runs, and turned into one affine map per row.

A spec set is ``{hook: {"op": ..., ...}}``. Whatever the op, the canonical value x of an edited row becomes
``x · scale + bias``, computed in fp32 (or wider) and rounded once to the point's dtype:

=============  ==========  ======  =====
op             key         scale   bias
=============  ==========  ======  =====
``suppress``               0       0
``scale``      ``factor``  factor  0
``add``        ``value``   1       value
``set``        ``value``   0       value
=============  ==========  ======  =====

Each op may carry ``pos``: an int or a list of ints, absolute positions in the sequence; without it every row is edited,
decode steps included. A scale of 0 makes the row the bias exactly, whatever was in it, infinities and NaNs too.
Both backends read specs with the functions here, so they accept and refuse the same ones. Numbers may come as tensors
and arrays; a spec means the same before and after :func:`plain_specs` and a way through JSON.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from harness.conventions import dtype_name
from harness.errors import UnsupportedError, UsageError
from harness.points import check_capture

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "FOREVER",
    "OPS",
    "Edit",
    "Plan",
    "Requests",
    "parse_interventions",
    "plain_specs",
    "plan_programs",
]

#: Op → the key it needs besides ``op``.
OPS = {"suppress": None, "scale": "factor", "add": "value", "set": "value"}
#: End of a range of rows that has none.
FOREVER = 1 << 62
#: What JSON carries as it is.
_PLAIN = (type(None), bool, int, float, str)
#: Specs are three deep, and a list of lists of numbers two more; what goes on may have no end.
_DEEPEST = 16
#: No sequence is longer; a range beyond it, such as range(5, 10**12), would fill the memory before it is refused.
_FAR = 1 << 24


@dataclass(frozen=True, eq=False)
class Edit:
    """One op at one hook.

    Attributes:
        hook: canonical name.
        op: one of :data:`OPS`.
        scale: factor on the canonical value, exact in fp32.
        bias: fp32 on the CPU, () or (width,); added after the factor.
        pos: sorted positions, None for every row.
    """

    hook: str
    op: str
    scale: float
    bias: torch.Tensor
    pos: tuple[int, ...] | None = None

    @cached_property
    def key(self) -> tuple[str, float, bytes]:
        """What it does, wherever: equal keys are the same edit."""
        return (self.hook, self.scale, self.bias.numpy().tobytes())

    @property
    def digest(self) -> tuple[Any, ...]:
        """Hashable stand-in for all of it."""
        return (*self.key, self.pos)

    def touches(self, n_rows: int) -> list[int]:
        """The positions below ``n_rows`` it edits."""
        return list(range(n_rows)) if self.pos is None else [p for p in self.pos if p < n_rows]

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Edit every row of canonical values (n, width); positions are the caller's business."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        bias = self.bias.to(device=rows.device, dtype=wide)
        if self.scale == 0.0:
            # inf · 0 would be NaN. A copy: an expanded view would hand out this edit's own memory.
            return bias.expand(rows.shape).to(rows.dtype, copy=True)
        return (rows.to(wide) * self.scale + bias).to(rows.dtype)


#: Edits of one request.
Requests = Sequence[tuple[Edit, ...]]


def plain_specs(intervene: Any) -> Any:
    """Specs with their tensors as (exact) lists, so that JSON can carry them; whether they can be done is not asked.

    Raises:
        UnsupportedError: a callable.
        UsageError: anything else that JSON cannot carry.
    """
    return _plain(intervene, "intervene")


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if depth > _DEEPEST:
        at = where.partition("[")[0]
        msg = f"{at} is nested more than {_DEEPEST} deep, or holds itself; specs are dicts of dicts"
        raise UsageError(msg)
    if callable(value):
        raise UnsupportedError(_callable(where))
    if isinstance(value, Mapping):
        return {key: _plain(one, f"{where}[{_short(key)}]", depth + 1) for key, one in value.items()}
    if isinstance(value, range) and value and max(value[0], value[-1]) > _FAR:
        msg = f"{where} is {value!r}, past the end of any sequence; without 'pos' every row is edited"
        raise UsageError(msg)
    if isinstance(value, (list, tuple, range)):
        return [
            one if isinstance(one, _PLAIN) else _plain(one, f"{where}[{at}]", depth + 1)
            for at, one in enumerate(value)
        ]
    try:
        plain = value.tolist() if hasattr(value, "tolist") else None
    except Exception as error:  # another package's class may raise anything
        msg = (
            f"{where} is {_shown(value)}, which does not say what it holds ({type(error).__name__}: {error})"
        )
        raise UsageError(msg) from error
    if isinstance(plain, list | int | float | str):
        return _plain(plain, where, depth + 1)
    msg = f"{where} is {_shown(value)}; specs are made of dicts, lists, tensors, real numbers and strings"
    raise UsageError(msg)


def parse_interventions(
    intervene: Any,
    *,
    widths: Mapping[str, int],
    nonfireable: Mapping[str, str],
    lengths: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> list[tuple[Edit, ...]]:
    """Check specs and read them, one tuple of edits per request, in forward order of their hooks.

    Args:
        intervene: one spec set for the whole batch, a list with one spec set (or None) per request, or None.
        widths: hook → width, of every hook that can be edited, in forward order.
        nonfireable: known hooks that cannot be, with the reason.
        lengths: rows each request will have; ``pos`` must lie below.
        dtype: the engine's; a value must be finite at it.

    Raises:
        UnsupportedError: a callable (also a NotImplementedError).
        UsageError: anything else that cannot be done, with hook, key and reason.
    """
    if intervene is None:
        return [()] * len(lengths)
    if callable(intervene):
        raise UnsupportedError(_callable("intervene"))
    if isinstance(intervene, Mapping):
        sets: list[Any] = [intervene] * len(lengths)
    elif isinstance(intervene, (list, tuple)):
        sets = list(intervene)
        if len(sets) != len(lengths):
            msg = f"intervene has {len(sets)} spec sets for {len(lengths)} requests; pass one each, or one dict for all"
            raise UsageError(msg)
    else:
        msg = f"intervene is {_shown(intervene)}; it is a dict {{hook: spec}} or a list of them, one per request"
        raise UsageError(msg)
    reader = _Reader(widths, nonfireable, dtype)
    whole: dict[int, list[Edit]] = {}  # the same object for every request is read once
    requests = []
    for index, (one, length) in enumerate(zip(sets, lengths, strict=True)):
        if id(one) not in whole:
            whole[id(one)] = reader.spec_set(one, index)
        edits = whole[id(one)]
        for edit in edits:
            _check_end(edit, index, length)
        requests.append(tuple(edits))
    return requests


def _callable(where: str) -> str:
    return f"{where} is a callable, which cannot cross into an engine's process; say it as one of {', '.join(OPS)}"


def _shown(value: object) -> str:
    return f"{_short(value)} ({type(value).__name__})"


def _short(value: object) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - the value is refused anyway, and its own mistakes are not the caller's
        text = "something"
    return text if len(text) <= 40 else f"{text[:37]}…"


def _check_end(edit: Edit, request: int, length: int) -> None:
    if edit.pos is not None and edit.pos[-1] >= length:
        msg = (
            f"hook {edit.hook!r}, key 'pos': position {edit.pos[-1]} is past the end of request {request}, which "
            f"has {length} rows (0 to {length - 1})"
        )
        raise UsageError(msg)


@dataclass(frozen=True)
class _Reader:
    """Reads spec sets of one model."""

    widths: Mapping[str, int]
    nonfireable: Mapping[str, str]
    dtype: torch.dtype

    def spec_set(self, specs: Any, request: int) -> list[Edit]:
        if specs is None:
            return []
        if callable(specs):
            raise UnsupportedError(_callable(f"the spec set of request {request}"))
        if not isinstance(specs, Mapping):
            msg = f"the spec set of request {request} is {_shown(specs)}; it is a dict {{hook: spec}}"
            raise UsageError(msg)
        for name in specs:
            if not isinstance(name, str):
                msg = f"the spec set of request {request} has the key {_shown(name)}; its keys are names of hooks"
                raise UsageError(msg)
        names = check_capture(specs, list(self.widths), dict(self.nonfireable))
        return [self.edit(name, specs[name]) for name in names]

    def edit(self, hook: str, spec: Any) -> Edit:
        if callable(spec):
            raise UnsupportedError(_callable(f"the spec at hook {hook!r}"))
        if not isinstance(spec, Mapping):
            msg = (
                f"hook {hook!r}: its spec is {_shown(spec)}; it is a dict like {{'op': 'add', 'value': 0.5}}"
            )
            raise UsageError(msg)
        for key, value in spec.items():
            if callable(value):
                raise UnsupportedError(_callable(f"hook {hook!r}, key {_short(key)}"))
        op = spec.get("op")
        if not isinstance(op, str) or op not in OPS:
            got = "is missing" if "op" not in spec else f"is {_shown(op)}"
            msg = f"hook {hook!r}, key 'op': {got}; the ops are {', '.join(OPS)}"
            raise UsageError(msg)
        needed = OPS[op]
        known = [key for key in ("op", needed, "pos") if key]
        for key in spec:
            if key not in known:
                # 0.5, because `position` and `pos` share just over half of their letters.
                name = _short(key)
                near = difflib.get_close_matches(name.strip("'\"").lower(), known, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                msg = (
                    f"hook {hook!r}, key {name}: {op!r} knows no such key, it takes {', '.join(known)}{hint}"
                )
                raise UsageError(msg)
        if needed is not None and needed not in spec:
            msg = f"hook {hook!r}, key {needed!r}: {op!r} needs it"
            raise UsageError(msg)
        bias = torch.zeros((), dtype=torch.float32, device="cpu")
        scale = 0.0 if op in {"suppress", "set"} else 1.0
        if needed == "factor":
            scale = float(self._numbers(hook, "factor", spec["factor"], 1))
        elif needed == "value":
            bias = self._numbers(hook, "value", spec["value"], self.widths[hook])
        pos = _positions(hook, spec["pos"]) if spec.get("pos") is not None else None
        return Edit(hook, op, scale, bias, pos)

    def _numbers(self, hook: str, key: str, value: Any, width: int) -> torch.Tensor:
        """A scalar (shape ()) or ``width`` numbers, as fp32 on the CPU."""
        where = f"hook {hook!r}, key {key!r}"
        numbers = _doubles(where, value)
        if numbers.numel() not in {1, width}:
            wanted = "it takes one" if width == 1 else f"it takes one, or {width}, the width of the point"
            msg = f"{where}: it holds {numbers.numel()} numbers; {wanted}"
            raise UsageError(msg)
        sent = numbers.float()
        for what, given in (
            ("not finite", numbers),
            ("too large for float32", sent),
            (f"too large for {dtype_name(self.dtype)}, the engine's dtype", sent.to(self.dtype)),
        ):
            bad = ~torch.isfinite(given)
            if bool(bad.any()):
                at = int(bad.nonzero()[0])
                which = f"element {at} is " if numbers.numel() > 1 else ""
                msg = f"{where}: {which}{float(numbers[at])}, which is {what}"
                raise UsageError(msg)
        return sent.reshape(()) if sent.numel() == 1 else sent


def _doubles(where: str, value: Any) -> torch.Tensor:
    """The numbers in ``value``, one after another, (n,) fp64 on the CPU in memory of its own."""
    if isinstance(value, torch.Tensor):
        # Not through a list as the rest: an engine's worker reads one tensor per request and hook.
        if value.dtype == torch.bool or value.is_complex():
            msg = f"{where}: a tensor of {'bools' if value.dtype == torch.bool else 'complex numbers'}, not of numbers"
            raise UsageError(msg)
        return value.detach().reshape(-1).to("cpu", torch.float64, copy=True)
    plain = _plain(value, where)
    if _holds_bool(plain):
        msg = f"{where}: {_shown(value)} holds bools, not numbers"
        raise UsageError(msg)
    try:
        # The dtype is said: by default a list of floats becomes fp32, or whatever an engine has made the default.
        return torch.tensor(plain, dtype=torch.float64, device="cpu").reshape(-1)
    except OverflowError as error:
        msg = f"{where}: {_shown(value)} is too large for float32"
        raise UsageError(msg) from error
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"{where}: {_shown(value)} is neither a number nor a list of numbers"
        raise UsageError(msg) from error


def _holds_bool(plain: Any) -> bool:
    """A list such as [True, 0.5] becomes a float tensor, so its members are looked at."""
    return isinstance(plain, bool) or (isinstance(plain, list) and any(map(_holds_bool, plain)))


def _positions(hook: str, pos: Any) -> tuple[int, ...]:
    where = f"hook {hook!r}, key 'pos'"
    plain = _plain(pos, where)
    listed = [plain] if isinstance(plain, int) else plain
    if not isinstance(listed, list):
        msg = f"{where}: {_shown(pos)} is neither an int nor a list of ints"
        raise UsageError(msg)
    if not listed:
        msg = f"{where}: the list is empty, so the edit would do nothing; leave the hook out"
        raise UsageError(msg)
    for position in listed:
        if type(position) is not int:
            msg = f"{where}: {_shown(position)} is no position; positions are ints"
            raise UsageError(msg)
        if position < 0:
            msg = f"{where}: {position} is negative; positions count from 0 at the first token"
            raise UsageError(msg)
    if len(set(listed)) != len(listed):
        twice = next(p for p in listed if listed.count(p) > 1)
        msg = f"{where}: position {twice} is named twice; an edit is applied once"
        raise UsageError(msg)
    return tuple(sorted(listed))


@dataclass(frozen=True)
class Plan:
    """Programs: each a set of edits that act together on a row, numbered from 1; program 0 changes nothing.

    Attributes:
        programs: number - 1 → its edits, at most one per hook, without positions.
        ranges: per request, (from, to, program) over its rows; where ranges overlap the later one holds.
    """

    programs: tuple[tuple[Edit, ...], ...]
    ranges: tuple[tuple[tuple[int, int, int], ...], ...]

    @property
    def empty(self) -> bool:
        """Whether nothing is edited anywhere."""
        return not self.programs


def plan_programs(requests: Iterable[tuple[Edit, ...]], *, limit: int) -> Plan:
    """Number the distinct combinations of edits that rows of these requests need.

    Raises:
        UsageError: more than ``limit`` of them.
    """
    numbers: dict[tuple[Any, ...], int] = {}
    programs: list[tuple[Edit, ...]] = []

    def number(edits: list[Edit]) -> int:
        if not edits:
            return 0
        key = tuple(edit.key for edit in edits)
        if key not in numbers:
            programs.append(tuple(replace(edit, pos=None) for edit in edits))
            numbers[key] = len(programs)
        return numbers[key]

    ranges = []
    for edits in requests:
        everywhere = number([edit for edit in edits if edit.pos is None])
        parts = [(0, FOREVER, everywhere)] if everywhere else []
        places = [(edit, None if edit.pos is None else frozenset(edit.pos)) for edit in edits]
        named = sorted({position for _, places_of in places for position in places_of or ()})
        for position in named:
            here = number([edit for edit, pos in places if pos is None or position in pos])
            if parts and parts[-1][1] == position and parts[-1][2] == here:
                parts[-1] = (parts[-1][0], position + 1, here)
            else:
                parts.append((position, position + 1, here))
        ranges.append(tuple(parts))
    if len(programs) > limit:
        msg = (
            f"the call needs {len(programs)} distinct combinations of edits, this engine has room for {limit}: send "
            "fewer requests at once, or boot with a larger max_edit_programs"
        )
        raise UsageError(msg)
    return Plan(tuple(programs), tuple(ranges))
