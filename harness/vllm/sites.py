"""What happens where a tap sits: rows are edited and copied as they pass, by buffers on the module alone.

Everything here runs inside the traced graph, so it may hold plain values and read buffers, and nothing else.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    #: What a tap does with what passes: (site, module, value) → what goes on in its place, or None.
    Hook = Callable[["Site", nn.Module, Any], Any]

__all__ = [
    "ACTIVE",
    "BIAS",
    "DESTINATION",
    "OWN",
    "PROGRAM",
    "SCALE",
    "SWITCH",
    "Site",
    "Switch",
    "capture_hook",
    "edit",
    "emit",
    "emitted_rows",
    "keep",
    "listen",
    "tap_hook",
    "whole_rows",
]


#: Buffers that the taps of one module share: row → place among the kept ones, row → program of edits.
DESTINATION, PROGRAM = "_tap_destination", "_tap_program"
#: Buffers of one tap: kept rows, forwards, and what each program does here. Every buffer is one more input of the
#: compiled graph, which each decode step pays for anew: hence one table of programs and not one per column.
OWN = ("rows", "fires", "programs")
#: Columns of the table of programs: its factor, whether it edits here (1.0 or 0.0), and from BIAS on what it adds. BIAS
#: is a cache line of numbers, so that rows are aligned.
SCALE, ACTIVE, BIAS = 0, 1, 16
#: Beside the buffers of one tap: its :class:`Switch`.
SWITCH = "switch"


@dataclass(frozen=True)
class Site:
    """Where in its module's call a tap reads and edits. Plain values only: a traced hook may close over it.

    Attributes:
        number: which of the module's taps it is; its buffers are named after it.
        sums: a pair of tensors stands for its sum.
        columns: which part [from, to) of what passes is this point's; None: all of it.
        argument: name and place of the argument that is read; None: the module's output is.
        residual: name and place of the argument that is the other half of it, if any.
    """

    number: int = 0
    sums: bool = False
    columns: tuple[int, int] | None = None
    argument: tuple[str, int] | None = None
    residual: tuple[str, int] | None = None

    def name(self, buffer: str) -> str:
        """What one of :data:`OWN` is called on the module."""
        return f"_tap{self.number}_{buffer}"

    def held(self, module: nn.Module, buffer: str) -> torch.Tensor:
        """One of the tap's buffers."""
        found: torch.Tensor = getattr(module, self.name(buffer))
        return found

    def switch(self, module: nn.Module) -> Switch:
        """The tap's switch."""
        found: Switch = getattr(module, self.name(SWITCH))
        return found


@dataclass
class Switch:
    """Whether a row of the running step may be edited here; read in eager mode only: to a graph it is a constant."""

    editing: bool = False


def emitted_rows(value: Any) -> torch.Tensor:
    """What a module returns, or is given, as rows (n_tokens, width).

    A decoder layer with a fused residual returns two tensors of one shape whose sum is the residual stream; a final
    norm returns (normalised, residual) where only the first is its own. The two look alike, so the norm's tap is told
    apart by its spec (``TapSpec.sums``).
    """
    first = value[0] if isinstance(value, tuple) else value
    rows: torch.Tensor = first.reshape(-1, first.shape[-1])
    return rows


def whole_rows(site: Site, value: Any) -> tuple[bool, torch.Tensor]:
    """Whether the two halves of the residual stream pass, and the rows (n, width) of what passes."""
    pair = site.sums and isinstance(value, tuple) and len(value) > 1
    if pair and isinstance(value[1], torch.Tensor):
        return True, emitted_rows(value[0]) + emitted_rows(value[1])
    rows = emitted_rows(value)
    return False, rows if site.columns is None else rows[:, site.columns[0] : site.columns[1]]


def tap_hook(site: Site, module: nn.Module, value: Any) -> Any:
    """Edit the rows that have a program, keep those that are wanted; unedited rows go on as they came, bit by bit.

    Args:
        site: where in the module's call.
        module: whose call.
        value: what the module returned, or is given.

    Returns:
        What is to go on in its place; None: the value itself.
    """
    pair, rows = whole_rows(site, value)
    # `is_compiling` first: a traced graph must not depend on the switch.
    if not (torch.compiler.is_compiling() or site.switch(module).editing):
        keep(site, module, rows)
        return None
    rows, changed = edit(site, module, rows)
    keep(site, module, rows)
    return emit(site, value, rows, changed, pair=pair)


def capture_hook(site: Site, module: nn.Module, value: Any) -> None:
    """Keep the rows that are wanted; the value goes on as it is. For engines that nobody edits."""
    keep(site, module, whole_rows(site, value)[1])


def keep(site: Site, module: nn.Module, rows: torch.Tensor) -> None:
    """Copy rows (n, width) into the step buffer, each to its place, and count one forward."""
    destination = getattr(module, DESTINATION)[: rows.shape[0]]
    site.held(module, "rows").index_copy_(0, destination, rows)
    site.held(module, "fires").add_(1)


def edit(site: Site, module: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows after their programs, and which have one: (n, width) at the rows' dtype, (n, 1) bool. One rounding."""
    program = getattr(module, PROGRAM)[: rows.shape[0]]
    chosen = site.held(module, "programs").index_select(0, program)
    changed = chosen[:, ACTIVE : ACTIVE + 1] != 0
    scale, bias = chosen[:, SCALE : SCALE + 1], chosen[:, BIAS:]
    wide = rows.to(scale.dtype)
    # Where nothing is kept of a row, nothing of it may matter: an infinity times zero would be NaN.
    edited = torch.where(scale == 0, bias, wide * scale + bias).to(rows.dtype)
    return torch.where(changed, edited, rows), changed


def emit(site: Site, value: Any, rows: torch.Tensor, changed: torch.Tensor, *, pair: bool) -> Any:
    """``value`` with the edited rows in it.

    Of a fused pair an edited row becomes (value, 0): ``value - residual`` would lose bits that the next sum needs.
    """
    if pair:
        hidden, residual = value[0], value[1]
        here = changed.reshape(*hidden.shape[:-1], 1)
        first = torch.where(here, rows.reshape(hidden.shape), hidden)
        return (first, torch.where(here, torch.zeros_like(residual), residual), *value[2:])
    if site.columns is not None:
        whole, (begin, end) = emitted_rows(value), site.columns
        rows = torch.cat([whole[:, :begin], rows, whole[:, end:]], dim=1)
    if isinstance(value, tuple):
        return (rows.reshape(value[0].shape), *value[1:])
    return rows.reshape(value.shape)


def _after(site: Site, hook: Hook) -> Callable[..., Any]:
    """A forward hook that hands ``hook`` what the module returned."""

    def run(module: nn.Module, _args: Any, output: Any) -> Any:
        return hook(site, module, output)

    return run


def _before(site: Site, hook: Hook) -> Callable[..., Any]:
    """A forward pre-hook that hands ``hook`` an argument, with its other half where it has one."""

    def run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _argument(site.argument, args, kwargs)
        other = None if site.residual is None else _argument(site.residual, args, kwargs)
        made = hook(site, module, given if other is None else (given, other))
        if made is None:
            return None
        if other is not None:
            args, kwargs = _replaced(site.residual, args, kwargs, made[1])
        return _replaced(site.argument, args, kwargs, made if other is None else made[0])

    return run


class _Around:
    """The same around a module whose ``forward`` is called directly, past any hook; a handle like those of hooks."""

    def __init__(self, module: nn.Module, site: Site, hook: Hook) -> None:
        self._module = module
        inner: Any = module.forward
        before = None if site.argument is None else _before(site, hook)

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                args, kwargs = before(module, args, kwargs) or (args, kwargs)
                return inner(*args, **kwargs)
            output = inner(*args, **kwargs)
            changed = hook(site, module, output)
            return output if changed is None else changed

        vars(module)["forward"] = forward

    def remove(self) -> None:
        """Let the class's own ``forward`` be called; all of a module's taps go at once."""
        vars(self._module).pop("forward", None)


def _argument(which: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name, place = which
    return kwargs[name] if name in kwargs else args[place] if place < len(args) else None


def _replaced(which: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Any:
    name, place = which
    if name in kwargs:
        return args, {**kwargs, name: value}
    return (*args[:place], value, *args[place + 1 :]), kwargs


def listen(module: nn.Module, site: Site, hook: Hook, *, direct: bool) -> Any:
    """Let ``hook`` have the value at ``site``; returns a handle whose ``remove()`` ends it.

    ``direct``: the model calls the module's ``forward`` itself, past its hooks.
    """
    if direct:
        return _Around(module, site, hook)
    if site.argument is None:
        return module.register_forward_hook(_after(site, hook))
    return module.register_forward_pre_hook(_before(site, hook), with_kwargs=True)
