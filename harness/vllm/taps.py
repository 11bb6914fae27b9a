"""Taps: forward hooks whose whole state is tensors registered on the hooked module.

Why buffers on the module: ``torch.compile`` takes them as graph inputs bound by name, so a graph served from the
compile cache writes into this engine's buffers. A hook that closes over tensors binds them by position and goes dead.
The hook itself only edits and copies rows; which row belongs to whom, and which program of edits it gets, is decided on
the host, before and after each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.conventions import Emission
from harness.errors import EngineError, UsageError
from harness.vllm import internals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from harness.interventions import Edit, Plan
    from harness.vllm.overlays import TapSpec

__all__ = [
    "Switch",
    "Tap",
    "TapSet",
    "capture_hook",
    "edit",
    "emission_of",
    "emit",
    "emitted_rows",
    "install_taps",
    "keep",
    "tap_hook",
]

#: Buffers of a tap on its module: step rows, row → place among them, forwards, row → program, and per program whether
#: it edits here, its factor and what it adds.
_ROWS, _DESTINATION, _FIRES = "_tap_rows", "_tap_destination", "_tap_fires"
_PROGRAM, _ACTIVE, _SCALE, _BIAS = "_tap_program", "_tap_active", "_tap_scale", "_tap_bias"
_BUFFERS = (_ROWS, _DESTINATION, _FIRES, _PROGRAM, _ACTIVE, _SCALE, _BIAS)


@dataclass
class Switch:
    """Whether any row of the running step is edited; read in eager mode only, a graph would take it for a constant."""

    editing: bool = False


def emitted_rows(output: Any) -> torch.Tensor:
    """The value a module's output stands for, as rows (n_tokens, width).

    A decoder layer with a fused residual returns two tensors of one shape whose sum is the residual stream; a final
    norm returns (normalised, residual) where only the first is its own. The two look alike, so the norm's tap is told
    apart by its spec (``TapSpec.sums``).
    """
    value = output[0] if isinstance(output, tuple) else output
    rows: torch.Tensor = value.reshape(-1, value.shape[-1])
    return rows


def whole_rows(module: nn.Module, output: Any) -> tuple[bool, torch.Tensor]:
    """Whether the module returned the two halves of the residual stream, and the rows of what it stands for."""
    pair = bool(module._tap_sums) and isinstance(output, tuple) and len(output) > 1
    if pair and isinstance(output[1], torch.Tensor):
        return True, emitted_rows(output[0]) + emitted_rows(output[1])
    return False, emitted_rows(output)


def tap_hook(module: nn.Module, _args: Any, output: Any) -> Any:
    """Edit the rows that have a program, keep those that are wanted; unedited rows go on as they came, bit by bit."""
    pair, rows = whole_rows(module, output)
    switch: Any = module._tap_switch
    # `is_compiling` first: a traced graph must not depend on the switch.
    if not (torch.compiler.is_compiling() or switch.editing):
        keep(module, rows)
        return None
    rows, changed = edit(module, rows)
    keep(module, rows)
    return emit(output, rows, changed, pair=pair)


def capture_hook(module: nn.Module, _args: Any, output: Any) -> None:
    """Keep the rows that are wanted; the module's output goes on as it is. For engines that nobody edits."""
    keep(module, whole_rows(module, output)[1])


def keep(module: nn.Module, rows: torch.Tensor) -> None:
    """Copy rows (n, width) into the step buffer, each to its place, and count one forward."""
    destination = getattr(module, _DESTINATION)[: rows.shape[0]]
    getattr(module, _ROWS).index_copy_(0, destination, rows)
    getattr(module, _FIRES).add_(1)


def edit(module: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows after their programs, and which have one: (n, width) at the rows' dtype, (n, 1) bool. One rounding."""
    program = getattr(module, _PROGRAM)[: rows.shape[0]]
    changed = getattr(module, _ACTIVE).index_select(0, program).unsqueeze(-1)
    scale = getattr(module, _SCALE).index_select(0, program).unsqueeze(-1)
    bias = getattr(module, _BIAS).index_select(0, program)
    wide = rows.to(scale.dtype)
    # Where nothing is kept of a row, nothing of it may matter: an infinity times zero would be NaN.
    edited = torch.where(scale == 0, bias, wide * scale + bias).to(rows.dtype)
    return torch.where(changed, edited, rows), changed


def emit(output: Any, rows: torch.Tensor, changed: torch.Tensor, *, pair: bool) -> Any:
    """The module's output with the edited rows in it.

    Of a fused pair an edited row becomes (value, 0): ``value - residual`` would lose bits that the next sum needs.
    """
    if pair:
        hidden, residual = output[0], output[1]
        here = changed.reshape(*hidden.shape[:-1], 1)
        value = torch.where(here, rows.reshape(hidden.shape), hidden)
        return (value, torch.where(here, torch.zeros_like(residual), residual), *output[2:])
    if isinstance(output, tuple):
        return (rows.reshape(output[0].shape), *output[1:])
    return rows.reshape(output.shape)


@dataclass
class Tap:
    """One installed tap.

    Attributes:
        spec: what it captures.
        module: the hooked module.
        rows: (max_tokens + 1, width) at the module's dtype; the last row is where unwanted rows go.
        fires: int64 scalar, forwards this hook took part in, counted inside the graph.
        emission: how the canonical value lies in what the module emits.
        active: (programs + 1,) bool, whether a program edits here.
        scale: (programs + 1,) fp32.
        bias: (programs + 1, width) fp32, of the emitted value.
    """

    spec: TapSpec
    module: nn.Module
    rows: torch.Tensor
    fires: torch.Tensor
    emission: Emission
    active: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor
    handle: Any

    def load(self, program: int, edit: Edit) -> None:
        """Let ``program`` do ``edit`` here, as the affine map of emitted values that it is of canonical ones."""
        bias = self.emission.bias(edit.scale, edit.bias.to(self.bias.device))
        if edit.scale == 0.0:
            # Rounded here already: compiled, inductor may let the next norm take its mean before the rounding and the
            # rest after. In a row whose channels are all set alike a LayerNorm blows that difference up to ±1.
            bias = bias.to(self.rows.dtype)
        self.scale[program] = edit.scale
        self.bias[program] = bias
        self.active[program] = True

    def remove(self) -> None:
        """Take the hook and its buffers off the module."""
        self.handle.remove()
        for name in _BUFFERS:
            self.module._buffers.pop(name, None)
        for name in ("_tap_sums", "_tap_switch"):
            if hasattr(self.module, name):
                delattr(self.module, name)


class TapSet:
    """The taps of one rank and the two row tables they share.

    ``destination[r]`` says into which buffer row the r-th token of this step goes, ``program[r]`` which edits it gets.
    Outside a step every token goes to the spare last row and gets program 0, which edits nothing, so warm-up and dummy
    runs can neither overwrite nor be edited.

    Args:
        max_tokens: most tokens one step schedules.
        max_programs: programs there is room for, 0 not counted.
        device: where the model lives.
    """

    def __init__(self, max_tokens: int, max_programs: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self.max_programs = max_programs
        self.taps: dict[str, Tap] = {}
        self.absent: list[str] = []
        self.switch = Switch()
        # Runners may pad a step past its budget up to a graph size; the padding's rows are spare ones.
        size = 2 * max_tokens + 64
        self.destination = torch.full((size,), max_tokens, dtype=torch.int64, device=device)
        self.program = torch.zeros((size,), dtype=torch.int64, device=device)

    def open_step(self, n_tokens: int) -> None:
        """Let the next forward's first ``n_tokens`` rows be kept."""
        self.destination[:n_tokens] = torch.arange(n_tokens, device=self.destination.device)

    def edit_step(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Give rows [from, to) of the next forward their program; later entries win."""
        for begin, end, program in rows:
            self.program[begin:end] = program
            self.switch.editing = True

    def close_step(self) -> None:
        """Send every row to the spare one again, unedited."""
        self.destination.fill_(self.max_tokens)
        self.program.zero_()
        self.switch.editing = False

    def load(self, plan: Plan) -> None:
        """Fill the tables; a hook that another rank holds is skipped.

        Raises:
            UsageError: more programs than there is room for.
        """
        if len(plan.programs) > self.max_programs:
            msg = f"{len(plan.programs)} programs of edits for tables of {self.max_programs}"
            raise UsageError(msg)
        self.clear_edits()
        for number, edits in enumerate(plan.programs, start=1):
            for edit in edits:
                if edit.hook in self.taps:
                    self.taps[edit.hook].load(number, edit)

    def clear_edits(self) -> None:
        """Let every program do nothing."""
        self.program.zero_()
        self.switch.editing = False
        for tap in self.taps.values():
            tap.active.zero_()

    def fires(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """Fires per hook since it was installed."""
        return {name: int(self.taps[name].fires) for name in (self.taps if names is None else names)}

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the step buffers (``rows``) and of the edit tables (``tables``)."""
        taps = self.taps.values()
        return {
            "rows": sum(tap.rows.nbytes for tap in taps),
            "tables": sum(tap.active.nbytes + tap.scale.nbytes + tap.bias.nbytes for tap in taps),
        }

    def remove(self, *, traced: bool) -> None:
        """Remove every tap; safe to call twice.

        Args:
            traced: a compiled graph has the taps in it and goes on reading their buffers: they stay on the modules,
                idle, and only the way to them is cut.
        """
        self.close_step()
        self.clear_edits()
        if not traced:
            for tap in self.taps.values():
                tap.remove()
        self.taps.clear()


def emission_of(model: nn.Module, tap: TapSpec) -> Emission:
    """How the module of ``tap`` emits its value, with the parameters and numbers of this model.

    Raises:
        EngineError: the model lacks one of them.
    """

    def held(path: str) -> Any:
        found = internals.resolve_dot_path(model, path) if path else None
        if path and found is None:
            msg = f"{tap.name}: this model has no {path}, so what it emits cannot be made canonical"
            raise EngineError(msg)
        return found

    factor = held(tap.factor)
    return Emission(
        weight=held(tap.divisor),
        plus_one=tap.plus_one,
        offset=held(tap.offset),
        factor=1.0 if factor is None else float(factor),
    )


def install_taps(
    modules: Sequence[tuple[TapSpec, nn.Module | None, Emission]],
    *,
    max_tokens: int,
    max_programs: int,
    dtype: torch.dtype,
    device: torch.device,
    hook: Callable[[nn.Module, Any, Any], Any] = tap_hook,
) -> TapSet:
    """Install a tap on each module that this rank holds; the others are listed in ``absent``.

    Args:
        modules: spec, its module (None where another rank holds it) and how that emits the value.
        max_tokens: most tokens one step schedules.
        max_programs: distinct combinations of edits one call may use.
        dtype: the model's activation dtype.
        device: where the model lives.
        hook: what runs after each module.

    Raises:
        EngineError: two taps on one module.
    """
    taps = TapSet(max_tokens, max_programs, device)
    for spec, module, emission in modules:
        if module is None:
            taps.absent.append(spec.name)
            continue
        if _ROWS in module._buffers:
            msg = f"{spec.name}: its module {spec.path} has a tap already, and can have only one"
            raise EngineError(msg)
        own = {
            _ROWS: torch.zeros((max_tokens + 1, spec.width), dtype=dtype, device=device),
            _FIRES: torch.zeros((), dtype=torch.int64, device=device),
            _ACTIVE: torch.zeros((max_programs + 1,), dtype=torch.bool, device=device),
            _SCALE: torch.ones((max_programs + 1,), dtype=torch.float32, device=device),
            _BIAS: torch.zeros((max_programs + 1, spec.width), dtype=torch.float32, device=device),
        }
        for name, buffer in {**own, _DESTINATION: taps.destination, _PROGRAM: taps.program}.items():
            module.register_buffer(name, buffer, persistent=False)
        module._tap_sums = spec.sums  # type: ignore[assignment]
        module._tap_switch = taps.switch  # type: ignore[assignment]
        taps.taps[spec.name] = Tap(
            spec,
            module,
            own[_ROWS],
            own[_FIRES],
            emission,
            own[_ACTIVE],
            own[_SCALE],
            own[_BIAS],
            module.register_forward_hook(hook),
        )
    return taps
