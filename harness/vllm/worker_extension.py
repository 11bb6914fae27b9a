"""The RPC surface of a worker, called by name through ``collective_rpc``; state is this worker's own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from harness.errors import CaptureError
from harness.vllm import internals
from harness.vllm.accumulator import Accumulator
from harness.vllm.taps import TapSet, canonical
from harness.vllm.wire import encode_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from harness.vllm.accumulator import StepRows

__all__ = ["REQUEST_KEY", "TLWorkerExtension"]

#: Under this name a request's ``SamplingParams.extra_args`` may carry the driver's own key for it.
REQUEST_KEY = "harness_request"


class TLWorkerExtension:
    """Mixed into the platform's worker. ``_taps`` stays None until installation has run."""

    _taps: TapSet | None = None
    _accumulator: Accumulator
    _keys: dict[str, str]

    def harness_init(self, taps: TapSet) -> None:
        """Start with nothing captured and every tap idle."""
        self._taps = taps
        self._accumulator = Accumulator()
        self._keys = {}
        self._fires_at_arm: dict[str, int] = {}
        self._steps_since_arm = 0

    # -- around a forward ---------------------------------------------------------------------------------------

    def harness_armed(self) -> bool:
        """Whether the next forward is to be captured."""
        return self._accumulator.armed

    @contextlib.contextmanager
    def harness_step(self, shares: Sequence[StepRows]) -> Iterator[None]:
        """Surround one real forward: open the row table before it, take the rows away after it."""
        taps = self._installed()
        total = sum(share.count for share in shares)
        taps.open_step(total)
        try:
            yield
            self._steps_since_arm += 1
            rows = {
                name: self.take_rows(name, total) for name in self._accumulator.names if name in taps.taps
            }
            self._accumulator.add(rows, self.label_shares(shares))
        finally:
            taps.close_step()

    def take_rows(self, name: str, total: int) -> torch.Tensor:
        """Copy this step's rows of one hook, (total, width), off the device."""
        rows = self._installed().taps[name].rows[:total]
        return rows.clone() if rows.device.type == "cpu" else rows.to("cpu")

    def label_shares(self, shares: Sequence[StepRows]) -> Sequence[StepRows]:
        """Last word on who owns which rows of a step."""
        return shares

    def learn_request_keys(self, scheduler_output: Any) -> None:
        """Remember which driver key each engine request id stands for."""
        for request, extra in internals.request_extra_args(scheduler_output):
            if REQUEST_KEY in extra:
                self._keys[request] = str(extra[REQUEST_KEY])

    def _installed(self) -> TapSet:
        if self._taps is None:
            msg = "hooks were never installed on this worker"
            raise CaptureError(msg)
        return self._taps

    # -- collective_rpc -------------------------------------------------------------------------------------------

    def tl_absent_hooks(self) -> list[str] | None:
        """Points this rank does not hold; None when installation never ran."""
        return None if self._taps is None else list(self._taps.absent)

    def tl_reset_capture_flags(self, names: list[str] | None = None) -> None:
        """Forget all captures and keep ``names`` (every point by default) from the next forward on."""
        taps = self._installed()
        self._accumulator.arm(taps.taps if names is None else [name for name in names if name in taps.taps])
        self._keys.clear()
        self._fires_at_arm = taps.fires()
        self._steps_since_arm = 0

    def tl_reset_accumulators(self) -> None:
        """Forget all captures and go idle."""
        self._accumulator.reset()
        self._keys.clear()

    def tl_read_batched_captures(
        self, names: list[str] | None = None, rows: dict[str, int] | None = None
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """Captures per request, keyed by the driver's key where the request carried one, else by the engine's id.

        Args:
            names: hooks to read; all armed ones by default.
            rows: key → rows it must have; by default as many as were captured.

        Returns:
            key → hook → encoded (seq, width) at the engine's dtype, canonical. Points this rank holds but never ran
            (a tied alias, another stage's) are not in it.

        Raises:
            CaptureError: a row is missing, or a hook fired in some steps and not in others.
        """
        served = self._served(names)
        captures: dict[str, dict[str, dict[str, Any]]] = {}
        for request in self._accumulator.shares:
            key = self._keys.get(request, request)
            if rows is not None and key not in rows:
                continue
            if key in captures:
                msg = f"two engine requests claim the key {key!r}"
                raise CaptureError(msg)
            n_rows = None if rows is None else rows[key]
            captures[key] = {name: encode_tensor(self.read_rows(request, name, n_rows)) for name in served}
        return captures

    def tl_read_captures(
        self, prompt_lens: list[int], names: list[str] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Captures of the requests in the order they started, cut to their prompts and joined: hook → (sum, width)."""
        requests = list(self._accumulator.shares)
        if len(requests) != len(prompt_lens):
            msg = f"{len(prompt_lens)} prompt lengths for {len(requests)} captured requests"
            raise CaptureError(msg)
        import torch

        return {
            name: encode_tensor(
                torch.cat([self.read_rows(r, name, n) for r, n in zip(requests, prompt_lens, strict=True)])
            )
            for name in self._served(names)
        }

    def read_rows(self, request: str, name: str, n_rows: int | None) -> torch.Tensor:
        """One request's canonical rows at one hook, (n_rows, width)."""
        return canonical(self._accumulator.read(request, name, n_rows), self._installed().taps[name].divisor)

    def _served(self, names: list[str] | None) -> list[str]:
        """Armed hooks that took part in every step; a hook that fired in none is not served, in some is an error."""
        fires = self.tl_read_counter()
        served = []
        for name in self._accumulator.names:
            if names is not None and name not in names:
                continue
            fired = fires[name] - self._fires_at_arm[name]
            if fired == 0:
                continue
            if fired != self._steps_since_arm:
                msg = f"{name} fired {fired} times in {self._steps_since_arm} forwards: its rows cannot be trusted"
                raise CaptureError(msg)
            served.append(name)
        return served

    def tl_read_counter(self) -> dict[str, int]:
        """Fires per hook since boot or the last reset: one per hook per forward, counted inside the graph."""
        return self._installed().fires()

    def tl_reset_counter(self) -> None:
        """Set every fire counter to zero."""
        taps = self._installed()
        for tap in taps.taps.values():
            tap.fires.zero_()
        self._fires_at_arm = taps.fires()

    def tl_remove_hooks(self) -> int:
        """Take every hook off; safe to call twice. Returns how many were removed."""
        if self._taps is None:
            return 0
        removed = len(self._taps.taps)
        self._taps.remove()
        return removed

    def tl_get_param(self, name: str) -> dict[str, Any] | None:
        """A parameter or buffer of this rank's model by dot path, encoded; None where this rank lacks it."""
        import torch

        found = internals.resolve_dot_path(internals.model_of(self), name)
        return encode_tensor(found) if isinstance(found, torch.Tensor) else None
