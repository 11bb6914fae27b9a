"""Taps: hooks whose whole state is tensors registered on the hooked module.

Why buffers on the module: ``torch.compile`` takes them as graph inputs bound by name, so a graph served from the
compile cache writes into this engine's buffers. A hook that closes over tensors binds them by position and goes dead.
The hook itself only edits and copies rows; which row belongs to whom, and which program of edits it gets, is decided on
the host, before and after each step.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.conventions import Emission
from harness.errors import EngineError, UsageError
from harness.vllm import internals
from harness.vllm.sites import (
    ACTIVE,
    BIAS,
    DESTINATION,
    OWN,
    PROGRAM,
    SCALE,
    SWITCH,
    Site,
    Switch,
    listen,
    tap_hook,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from torch import nn

    from harness.interventions import Edit, Plan
    from harness.vllm.overlays import TapSpec
    from harness.vllm.sites import Hook

__all__ = ["Tap", "TapSet", "emission_of", "install_taps"]


@dataclass
class Tap:
    """One installed tap.

    Attributes:
        spec: what it captures.
        site: where.
        module: the hooked module.
        share: which numbers [from, to) of a whole row this rank has: all, or those of its heads.
        rows: (max_tokens + 1, width) at the module's dtype; the last row is where unwanted rows go. The width is the
            share's, here and below.
        fires: int64 scalar, forwards this hook took part in, counted inside the graph.
        switch: on while a step is edited and a program edits here.
        emission: how the canonical value lies in what the module emits.
        programs: (programs + 1, 16 + width) fp32, what each program does here: a factor, whether it edits at all, and
            what it adds to the emitted value.
    """

    spec: TapSpec
    site: Site
    module: nn.Module
    share: tuple[int, int]
    rows: torch.Tensor
    fires: torch.Tensor
    programs: torch.Tensor
    switch: Switch
    emission: Emission
    handle: Any

    @property
    def active(self) -> torch.Tensor:
        """(programs + 1,) fp32: 1.0 where a program edits here, else 0.0."""
        return self.programs[:, ACTIVE]

    @property
    def scale(self) -> torch.Tensor:
        """(programs + 1,) fp32: each program's factor."""
        return self.programs[:, SCALE]

    @property
    def bias(self) -> torch.Tensor:
        """(programs + 1, width) fp32: what each program adds to the emitted value."""
        return self.programs[:, BIAS:]

    def load(self, program: int, edit: Edit) -> None:
        """Let ``program`` do ``edit`` here, as the affine map of emitted values that it is of canonical ones."""
        wanted = edit.bias if edit.bias.ndim == 0 else edit.bias[self.share[0] : self.share[1]]
        bias = self.emission.bias(edit.scale, wanted.to(self.bias.device))
        if edit.scale == 0.0:
            # Rounded here already: compiled, inductor may let the next norm take its mean before the rounding and the
            # rest after. In a row whose channels are all set alike a LayerNorm blows that difference up to ±1.
            bias = bias.to(self.rows.dtype)
        self.scale[program] = edit.scale
        self.bias[program] = bias
        self.active[program] = 1.0

    def remove(self) -> None:
        """Take the hook and its buffers off the module."""
        self.handle.remove()
        for name in (*map(self.site.name, OWN), DESTINATION, PROGRAM):
            self.module._buffers.pop(name, None)
        delattr(self.module, self.site.name(SWITCH))


class TapSet:
    """The taps of one rank and the two row tables they share.

    ``destination[r]`` says into which buffer row the r-th token of this step goes, ``program[r]`` which edits it gets.
    Outside a step every token goes to the spare last row and gets program 0, which edits nothing, so warm-up and dummy
    runs can neither overwrite nor be edited.

    Args:
        max_tokens: most tokens one step schedules.
        max_programs: programs there is room for, 0 not counted.
        device: where the model lives.
        switched: as :func:`install_taps` takes it.
    """

    def __init__(
        self, max_tokens: int, max_programs: int, device: torch.device, *, switched: bool = True
    ) -> None:
        self._switched = switched
        self.max_tokens = max_tokens
        self.max_programs = max_programs
        self.taps: dict[str, Tap] = {}
        self.absent: list[str] = []
        self._edited: list[Tap] = []  #: taps at which a program edits
        self._editing = False  #: whether any row of the running step has a program
        # Runners may pad a step past its budget up to a graph size; the padding's rows are spare ones.
        size = 2 * max_tokens + 64
        self._on_host = device.type == "cpu"
        self.destination = torch.full((size,), max_tokens, dtype=torch.int64, device=device)
        self.program = torch.zeros((size,), dtype=torch.int64, device=device)

    def open_step(self, n_tokens: int, first: int = 0) -> None:
        """Let the next forward's first ``n_tokens`` rows be kept, in rows of the step buffers from ``first`` on."""
        torch.arange(first, first + n_tokens, out=self.destination[:n_tokens])

    def edit_step(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Give rows [from, to) of the next forward their program; later entries win."""
        for begin, end, program in rows:
            self.program[begin:end] = program
        if rows:
            self._editing = True
            for tap in self._edited:
                tap.switch.editing = True

    def take(self, names: Iterable[str], total: int, views: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """The first ``total`` rows of the named taps on the host: hook → (total, width), each its own memory.

        Those in ``views`` lie where they are until the next forward, if that is the host's memory. One call copies the
        others, which costs less than many small ones.
        """
        found = {name: self.taps[name].rows[:total] for name in names}
        copied = [name for name in found if name not in views or not self._on_host]
        if copied:
            rows = [found[name] for name in copied]
            # Between steps vLLM is in inference mode, and a caller could neither change nor train on such tensors.
            with torch.inference_mode(mode=False):
                copies = torch._foreach_clone(rows) if self._on_host else [one.to("cpu") for one in rows]
            found.update(zip(copied, copies, strict=True))
        return found

    def close_step(self) -> None:
        """Send every row to the spare one again, unedited."""
        self.destination.fill_(self.max_tokens)
        if self._editing:
            self._unedit()

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
                    tap = self.taps[edit.hook]
                    tap.load(number, edit)
                    self._edited.append(tap)

    def clear_edits(self) -> None:
        """Let every program do nothing."""
        self._unedit()
        self._edited = []
        for tap in self.taps.values():
            tap.active.zero_()

    def _unedit(self) -> None:
        """Let no row have a program."""
        self.program.zero_()
        for tap in self._edited:
            tap.switch.editing = not self._switched
        self._editing = False

    def fires(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """Fires per hook since it was installed."""
        return {name: int(self.taps[name].fires) for name in (self.taps if names is None else names)}

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the step buffers (``rows``), edit tables and counters (``tables``), and row tables (``index``)."""
        taps = self.taps.values()
        return {
            "rows": sum(tap.rows.nbytes for tap in taps),
            "tables": sum(tap.fires.nbytes + tap.programs.nbytes for tap in taps),
            "index": self.destination.nbytes + self.program.nbytes,
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
    place: tuple[int, int] = (0, 1),
    direct: Sequence[nn.Module] = (),
    switched: bool = True,
    hook: Hook = tap_hook,
) -> TapSet:
    """Install a tap on each module that this rank holds; the others are listed in ``absent``.

    Args:
        modules: spec, its module (None where another rank holds it) and how that emits the value.
        max_tokens: most tokens one step schedules.
        max_programs: distinct combinations of edits one call may use.
        dtype: the model's activation dtype.
        device: where the model lives.
        place: this rank in its tensor-parallel group, and how many there are.
        direct: modules whose ``forward`` the model calls itself, so that hooks on them stay silent.
        switched: taps do the arithmetic of edits in steps that are edited alone. Not where a CUDA graph may have caught
            them: its replay asks no switch.
        hook: what is done with the value.

    Raises:
        EngineError: two taps at one place, or a module that takes no such argument.
    """
    taps = TapSet(max_tokens, max_programs, device, switched=switched)
    for spec, module, emission in modules:
        if module is None:
            taps.absent.append(spec.name)
            continue
        site = _site(spec, module, [tap for tap in taps.taps.values() if tap.module is module], place[1])
        share = spec.share(*place)
        width = share[1] - share[0]
        own = {
            "rows": torch.zeros((max_tokens + 1, width), dtype=dtype, device=device),
            "fires": torch.zeros((), dtype=torch.int64, device=device),
            "programs": torch.zeros((max_programs + 1, BIAS + width), dtype=torch.float32, device=device),
        }
        for name, buffer in own.items():
            module.register_buffer(site.name(name), buffer, persistent=False)
        for name, buffer in ((DESTINATION, taps.destination), (PROGRAM, taps.program)):
            module.register_buffer(name, buffer, persistent=False)
        switch = Switch(editing=not switched)
        setattr(module, site.name(SWITCH), switch)
        handle = listen(module, site, hook, direct=any(module is one for one in direct))
        taps.taps[spec.name] = Tap(
            spec, site, module, share, switch=switch, emission=emission, handle=handle, **own
        )
    return taps


def _site(spec: TapSpec, module: nn.Module, others: Sequence[Tap], ranks: int) -> Site:
    """Where in the call of ``module`` the tap belongs; ``others`` are the taps it has already."""
    for other in others:
        if (other.spec.argument, other.spec.before, other.spec.path) == (
            spec.argument,
            spec.before,
            spec.path,
        ):
            msg = f"{spec.name}: its module {spec.path} has a tap already ({other.spec.name}), at the same place"
            raise EngineError(msg)
    argument = residual = None
    if spec.argument is not None:
        names = list(inspect.signature(module.forward).parameters)
        wanted = spec.argument or (names[0] if names else "")
        if wanted not in names:
            msg = f"{spec.name}: {type(module).__name__} takes no argument {wanted!r} but {', '.join(names)}"
            raise EngineError(msg)
        argument = (wanted, names.index(wanted))
        if spec.sums and "residual" in names:
            residual = ("residual", names.index("residual"))
    columns = spec.columns(ranks) if spec.heads else None
    return Site(len(others), spec.sums, columns, argument, residual)
