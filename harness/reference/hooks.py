"""Read and edit the hook points of a Hugging Face model while it runs.

A point's value is what its module returns or is given, or what attention hands to the attention function, copied as it
passes: later code may add into the same memory. Exceptions are ``ln_final.hook_normalized``, which no module returns:
it is the final norm's output without its bias and divided by its weight; and ``embed.hook_out`` of a family that scales
embeddings outside the module. Both are made by the same rule as on the engine's side
(:class:`~harness.conventions.Emission`), so that the rounding is in both.

An edited row goes on through the model in the module's own convention, and what is captured is read from that, as an
engine's capture is: after the edit.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.errors import CaptureError, UsageError
from harness.geometry import Geometry
from harness.points import HookPoint
from harness.reference.families import tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from transformers import PreTrainedModel

    from harness.conventions import Emission
    from harness.interventions import Edit
    from harness.reference.families import Reading

__all__ = ["capturing", "emission_of", "hidden_of", "module_paths", "points_of"]


def emission_of(model: PreTrainedModel, hook: str) -> Emission:
    """How the module of ``hook`` emits its value in this model.

    Raises:
        UsageError: unknown architecture.
        CaptureError: a parameter or number that its family has is not there.
    """

    def held(path: str) -> torch.Tensor:
        try:
            return model.get_parameter(path)
        except AttributeError as error:
            msg = (
                f"{hook}: the model has no {path}, without which the module's output cannot be made canonical"
            )
            raise CaptureError(msg) from error

    return tree_of(model).emission(hook, model.config, held)


def points_of(model: PreTrainedModel) -> list[str]:
    """Every hook point that ``model`` has here, in forward order."""
    return tree_of(model).points(model.config.num_hidden_layers)


def module_paths(model: PreTrainedModel, capture: Sequence[str]) -> dict[str, str]:
    """Return hook name → dotted path of its module.

    Raises:
        UsageError: unknown architecture, or a name that is no hook point.
    """
    tree = tree_of(model)
    return {name: tree.reading(HookPoint.parse(name)).path for name in capture}


def hidden_of(output: Any, hook: str, *, flat: bool = False) -> torch.Tensor:
    """Return the hidden states, (batch, n, width), in what a module returned.

    Attention returns a tuple and, since transformers 5, a decoder layer a bare tensor, of which ``output[0]`` would
    be the first sequence of the batch; so the type decides. ``flat``: it returns the rows of all sequences, (n, width),
    which for one sequence are the same in another shape.

    Raises:
        CaptureError: what it returned holds no such tensor in first place.
    """
    value = output[0] if isinstance(output, tuple | list) else output
    if isinstance(value, torch.Tensor) and value.ndim == 3 - flat and value.is_floating_point():
        return value.unsqueeze(0) if flat else value
    got = (
        f"{value.dtype} of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )
    msg = f"{hook}: its module returned {got} where float hidden states (batch, n, width) were expected"
    raise CaptureError(msg)


@contextmanager
def capturing(
    model: PreTrainedModel, capture: Sequence[str], edits: Sequence[Edit] = ()
) -> Iterator[dict[str, torch.Tensor]]:
    """Within it, ONE forward of ``model`` fills the yielded dict: hook → (batch, n, width), a copy on the CPU.

    Args:
        model: where the hooks are installed, and taken off again however the block ends.
        capture: names of hooks.
        edits: of the one sequence that is run, at most one per hook, captured or not.

    Raises:
        UsageError: as :func:`module_paths`; two edits at one hook, or a batch of several sequences with edits.
        CaptureError: a hook fired twice, or, on leaving, never fired; a module that isn't in the model.
    """
    by_hook = {edit.hook: edit for edit in edits}
    if len(by_hook) != len(edits):
        twice = next(edit.hook for edit in edits if by_hook[edit.hook] is not edit)
        msg = f"hook {twice!r}: a sequence has two edits there, and which comes first is not defined; give it one"
        raise UsageError(msg)
    captured: dict[str, torch.Tensor] = {}
    geometry, tree = Geometry.of(model.config), tree_of(model)
    taps: list[_Tap] = []
    handles: list[Any] = []
    try:
        for hook in dict.fromkeys([*capture, *by_hook]):
            reading = tree.reading(HookPoint.parse(hook))
            try:
                module = model.get_submodule(reading.path)
            except AttributeError as error:
                msg = f"{hook}: the model has no module {reading.path!r}"
                raise CaptureError(msg) from error
            tap = _Tap(
                hook,
                reading,
                emission_of(model, hook),
                _columns(reading, geometry),
                by_hook.get(hook),
                captured if hook in capture else None,
            )
            taps.append(tap)
            handles.append(tap.install(module))
        yield captured
    finally:
        for handle in handles:
            handle.remove()
    dead = [tap.hook for tap in taps if not tap.fired]
    if dead:
        msg = f"{len(dead)} hooks of the reference never fired: {', '.join(dead[:4])}{', …' if len(dead) > 4 else ''}"
        raise CaptureError(msg)


def _columns(reading: Reading, geometry: Geometry) -> tuple[int, int] | None:
    """Which part [from, to) of what passes is the point's, where q, k and v stand side by side."""
    if reading.part is None:
        return None
    sizes = [heads * geometry.head_dim for heads in (geometry.heads, geometry.kv_heads, geometry.kv_heads)]
    begin = sum(sizes[: reading.part])
    return begin, begin + sizes[reading.part]


@dataclass
class _Tap:
    """What happens at one point, in one forward."""

    hook: str
    reading: Reading
    emission: Emission
    columns: tuple[int, int] | None
    edit: Edit | None
    captured: dict[str, torch.Tensor] | None  #: where its value goes; None: it is edited only
    fired: bool = False

    def install(self, module: nn.Module) -> Any:
        """Put it where the value passes; returns a handle whose ``remove()`` takes it off."""
        if self.reading.side == "out":
            return module.register_forward_hook(self._after)
        if self.reading.side == "in":
            return module.register_forward_pre_hook(self._before, with_kwargs=True)
        return _AttentionHandle(self, module)

    def _after(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Edit and capture what a module returned. None where nothing was edited: its own output goes on."""
        changed = self.pass_through(output)
        if changed is None or not isinstance(output, tuple | list):
            return changed
        return [changed, *output[1:]] if isinstance(output, list) else (changed, *output[1:])

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same of what a module is given first."""
        name = next(iter(inspect.signature(module.forward).parameters))
        changed = self.pass_through(args[0] if args else kwargs[name])
        if changed is None:
            return None
        return ((changed, *args[1:]), kwargs) if args else (args, {**kwargs, name: changed})

    def pass_through(self, value: Any) -> torch.Tensor | None:
        """Edit, then capture. The tensor to go on in place of the value's; None where nothing was edited."""
        if self.fired:
            msg = f"{self.hook}: its module ran twice in one forward; the hook's value would be ambiguous"
            raise CaptureError(msg)
        self.fired = True
        whole = hidden_of(value, self.hook, flat=self.reading.flat).detach()
        emitted = whole if self.columns is None else whole[..., self.columns[0] : self.columns[1]]
        after = emitted if self.edit is None else _edited(emitted, self.edit, self.emission)
        if self.captured is not None:
            self.captured[self.hook] = self.emission.canonical(after).to("cpu", copy=True)
        if after is emitted:
            return None
        if self.columns is not None:
            after = torch.cat([whole[..., : self.columns[0]], after, whole[..., self.columns[1] :]], dim=-1)
        return after.reshape((value[0] if isinstance(value, tuple | list) else value).shape)


class _AttentionHandle:
    """A tap on what one attention module gives the attention function, (batch, heads, n, head_dim) each, or gets of it.

    Which function a module calls it looks up in transformers' table, under the name its model was loaded with; for as
    long as such a tap is installed the table hands out functions that are watched.
    """

    def __init__(self, tap: _Tap, module: nn.Module) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self._table: Any = ALL_ATTENTION_FUNCTIONS
        self._before = self._table.get_interface

        def get_interface(*args: Any) -> Any:
            function = self._before(*args)

            def watched(
                calling: nn.Module, query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any
            ) -> Any:
                side = tap.reading.side
                if calling is module and side == "pattern":
                    result = function(calling, query, key, *rest, **more)
                    if result[1] is None:
                        msg = f"{tap.hook}: attention gives no weights; load the model with eager attention"
                        raise CaptureError(msg)
                    tap.pass_through(result[1].transpose(1, 2).flatten(2))
                    return result
                if calling is module:
                    given = query if side == "query" else key
                    changed = tap.pass_through(given.transpose(1, 2).flatten(2))
                    if changed is not None:
                        made = changed.unflatten(-1, (given.shape[1], -1)).transpose(1, 2)
                        query, key = (made, key) if given is query else (query, made)
                return function(calling, query, key, *rest, **more)

            return watched

        vars(self._table)["get_interface"] = get_interface

    def remove(self) -> None:
        """Hand out what was handed out before; handles are removed in any order, all of them at once."""
        vars(self._table).pop("get_interface", None)


def _edited(emitted: torch.Tensor, edit: Edit, emission: Emission) -> torch.Tensor:
    """``emitted`` with the rows that ``edit`` touches replaced, in memory of its own; ``emitted`` itself if none is."""
    batch, n_rows, _ = emitted.shape
    if batch != 1:
        msg = f"hook {edit.hook!r}: edits are of one sequence, but a batch of {batch} was run; run them one at a time"
        raise UsageError(msg)
    touched = edit.touches(n_rows)
    if not touched:
        return emitted
    at = torch.tensor(touched, device=emitted.device)
    rows = emitted[:, at]
    if emission.plain:
        rows = edit.apply(rows)
    else:
        # In fp64, so that there, the edit and back cost one rounding and not three; by way of fp32, as in an engine's
        # tables, so that a value that is set is emitted in the same bits.
        canonical = emission.canonical(rows.double())
        wide = torch.promote_types(emitted.dtype, torch.float32)
        rows = emission.emitted(edit.apply(canonical)).to(wide).to(emitted.dtype)
    return emitted.index_copy(1, at, rows)
