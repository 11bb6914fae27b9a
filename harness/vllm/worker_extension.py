"""The RPC surface of a worker, called by name through ``collective_rpc``; state is this worker's own."""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING, Any

from harness.errors import CaptureError, HarnessError
from harness.interventions import FOREVER, parse_interventions, plan_programs
from harness.vllm import internals
from harness.vllm.accumulator import Accumulator
from harness.vllm.lending import ALIGNMENT, HERE, LENT, SENT, Lent, lend
from harness.vllm.wire import decode_specs, encode_block, encode_tensor
from harness.vllm.worker_params import ParameterExtension

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import torch

    from harness.interventions import Plan
    from harness.vllm.accumulator import StepRows
    from harness.vllm.spec import HarnessSpec
    from harness.vllm.taps import TapSet

__all__ = ["REQUEST_KEY", "TLWorkerExtension"]

#: Under this name a request's ``SamplingParams.extra_args`` may carry the driver's own key for it.
REQUEST_KEY = "harness_request"

#: (from, to, program) over a request's positions, see :class:`harness.interventions.Plan`.
Ranges = tuple[tuple[int, int, int], ...]


class TLWorkerExtension(ParameterExtension):
    """Mixed into the platform's worker. ``_taps`` stays None until installation has run."""

    _taps: TapSet | None = None
    _accumulator: Accumulator
    _keys: dict[str, str]
    #: Memory that the driver has not said it has mapped.
    _lent: Lent | None = None

    def harness_init(self, taps: TapSet, spec: HarnessSpec) -> None:
        """Start with nothing captured, nothing edited and every tap idle."""
        self._taps = taps
        self._widths = {tap.name: tap.width for tap in spec.taps}
        self._ranges: dict[str | None, Ranges] = {}
        self._accumulator = Accumulator()
        self._keys = {}
        self._fires_at_arm: dict[str, int] = {}
        self._steps_since_arm = 0

    # -- around a forward ---------------------------------------------------------------------------------------

    def harness_watching(self) -> bool:
        """Whether the next forward is to be captured or edited."""
        return self._accumulator.armed or bool(self._ranges)

    @contextlib.contextmanager
    def harness_step(self, shares: Sequence[StepRows]) -> Iterator[None]:
        """Surround one real forward: fill the row tables before it, take the rows away after it."""
        taps = self._installed()
        total = sum(share.count for share in shares)
        if self._accumulator.filled + total > taps.max_tokens:
            self._fetch()
        taps.open_step(total, self._accumulator.filled)
        taps.edit_step(self.program_rows(shares))
        try:
            yield
            if not self._accumulator.armed:
                return
            self._steps_since_arm += 1
            self._accumulator.wait(self.label_shares(shares), total)
        finally:
            taps.close_step()

    def _fetch(self, views: Collection[str] = ()) -> Accumulator:
        """Take what waits in the step buffers: small steps share one copy, which costs as much as one of theirs."""
        if self._accumulator.filled:
            self._accumulator.add(self.take_rows(self._accumulator.filled, views))
        return self._accumulator

    def take_rows(self, total: int, views: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """The waiting rows of the captured hooks on the host, (total, width) each: copies, but for ``views``."""
        return self._installed().take(self._accumulator.names, total, views)

    def program_rows(self, shares: Sequence[StepRows]) -> list[tuple[int, int, int]]:
        """Which rows [from, to) of a step get which program, by request key and absolute position."""
        found = []
        for share in shares:
            key = self._keys.get(share.request, share.request)
            for begin, end, program in self._ranges.get(key, self._ranges.get(None, ())):
                first, last = max(begin, share.start), min(end, share.start + share.count)
                if first < last:
                    found.append((share.row + first - share.start, share.row + last - share.start, program))
        return found

    def label_shares(self, shares: Sequence[StepRows]) -> Sequence[StepRows]:
        """Last word on who owns which rows of a step."""
        return shares

    def learn_request_keys(self, scheduler_output: Any) -> None:
        """Remember which driver key each engine request id stands for."""
        for request, extra in internals.request_extra_args(scheduler_output):
            if REQUEST_KEY in extra:
                self._keys[request] = str(extra[REQUEST_KEY])
        if not self._accumulator.armed:  # a captured request's key is needed until its rows have been read
            for request in internals.finished_requests(scheduler_output):
                self._keys.pop(request, None)

    def clear_blocks(self, scheduler_output: Any) -> None:
        """Let no request find what an overflow of another left: blocks of the KV cache are used again as they are."""
        internals.clear_blocks(self, internals.filling_blocks(scheduler_output))

    def harness_release(self) -> None:
        """Forget everything that was installed and captured."""
        self.tl_take_back()
        self._taps = None
        self._accumulator = Accumulator()

    def _installed(self) -> TapSet:
        if self._taps is None:
            msg = "hooks were never installed on this worker"
            raise CaptureError(msg)
        return self._taps

    # -- collective_rpc -------------------------------------------------------------------------------------------

    def tl_call(self, method: str, arguments: Sequence[Any]) -> tuple[str, Any]:
        """Call one of the methods below; what it raises is its answer.

        Where a rank raises, vLLM's executor leaves the answers of later ranks unread, and they would be taken for those
        of the next call.

        Returns:
            An empty string and what the method gives, or the error's type and message.
        """
        try:
            return "", getattr(self, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - told to the driver, which raises it
            if not isinstance(error, HarnessError):
                traceback.print_exc()
            return type(error).__name__, str(error)

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
        self.tl_take_back()
        self._accumulator.reset()
        self._keys.clear()

    def tl_set_interventions(self, specs: dict[str, Any] | None) -> None:
        """Forget all edits, then apply one spec set to every request until the next call of this kind.

        Args:
            specs: ``{hook: spec}`` as :mod:`harness.interventions` reads it, tensors encoded or as lists; a hook that
                another rank holds is skipped. None or ``{}``: nothing is edited.

        Raises:
            UsageError: a spec that cannot be done.
        """
        self._set_edits({None: specs} if specs else {})

    def tl_set_batched_interventions(self, specs: dict[str, dict[str, Any]]) -> None:
        """Like :meth:`tl_set_interventions`, with a spec set per request key; requests not named are not edited."""
        keyed: dict[str | None, dict[str, Any]] = {key: one for key, one in specs.items()}  # noqa: C416 - widens the key
        self._set_edits(keyed)

    def _set_edits(self, specs: Mapping[str | None, dict[str, Any]]) -> None:
        self.clear_edits()
        if not specs:
            return
        requests = parse_interventions(
            [decode_specs(one) for one in specs.values()],
            widths=self._widths,
            nonfireable={},
            lengths=[FOREVER] * len(specs),
            dtype=internals.activation_dtype(self),
        )
        plan = plan_programs(requests, limit=self._installed().max_programs)
        self.load_edits(plan)
        self._ranges = {key: ranges for key, ranges in zip(specs, plan.ranges, strict=True) if ranges}

    def load_edits(self, plan: Plan) -> None:
        """Fill the tables of this rank's taps."""
        self._installed().load(plan)

    def clear_edits(self) -> None:
        """Edit nothing from the next forward on."""
        self._ranges = {}
        self._installed().clear_edits()

    def tl_step_stats(self) -> dict[str, int]:
        """Forwards since the captures were armed, and how many rows were computed again (after preemption)."""
        again = 0
        for shares in self._fetch().shares.values():
            covered = 0
            for _, share in shares:
                again += max(0, min(covered, share.start + share.count) - share.start)
                covered = max(covered, share.start + share.count)
        return {"steps": self._steps_since_arm, "recomputed_rows": again}

    def tl_tap_bytes(self) -> dict[str, int]:
        """Bytes this rank's taps hold, see :attr:`TapSet.nbytes`."""
        return self._installed().nbytes

    def tl_read_batched_captures(
        self,
        names: list[str] | None = None,
        rows: dict[str, int] | None = None,
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """Captures per request, keyed by the driver's key where the request carried one, else by the engine's id.

        Args:
            names: hooks to read; all armed ones by default.
            rows: key → rows it must have; by default as many as were captured.

        Returns:
            key → hook → encoded (seq, width) at the engine's dtype, canonical, of this rank's heads. Points it holds
            but never ran (a tied alias, another stage's) are not in it.

        Raises:
            CaptureError: a row is missing, or a hook fired in some steps and not in others.
        """
        served = self._served(names)
        return {
            key: {
                name: encode_tensor(self.read_rows(request, name, None if rows is None else rows[key]))
                for name in served
            }
            for key, request in self._requests(rows).items()
        }

    def tl_lend(self, content: bytes) -> tuple[int, int, int] | None:
        """Lend memory with this content, for the driver to try; None where this system has none to lend."""
        self.tl_take_back()
        try:
            self._lent = lend(len(content))
        except (OSError, AttributeError):
            return None
        self._lent.put([content])
        return self._lent.address

    def tl_take_back(self) -> None:
        """Let go of what was lent last; the driver keeps what it has mapped."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.forget()

    def tl_read_blocks(
        self,
        names: list[str],
        rows: dict[str, int],
        replicas: bool,
        release: Collection[str],
        way: str = SENT,
    ) -> tuple[list[str], dict[str, Any], tuple[int, int, int] | None]:
        """Captures of all requests, one block per hook: what the driver reads.

        Args:
            names: hooks to read.
            rows: key → rows it must have.
            replicas: whether ranks send what the first of their tensor-parallel group sends too; their own heads they
                always send.
            release: hooks whose rows are let go of as soon as they are packed, so that they lie there once and not
                twice; they cannot be read again.
            way: how the driver reaches them, see :func:`harness.vllm.lending.where_lent`.

        Returns:
            The keys of the requests this rank has seen; hook → encoded (rows of all of them, width), in that order, or
            where the driver is this process a list of one (n, width) each; and the address of the memory that was
            lent, None where none was.

        Raises:
            CaptureError: as :meth:`tl_read_batched_captures`.
        """
        # Rows that are copied out now and let go of need no copy before that.
        self._fetch(() if way == HERE else release)
        served, requests = self._served(names), self._requests(rows)
        if not replicas and internals.place_of(self)[1] > 0:
            served = [name for name in served if self._installed().taps[name].spec.heads]
        blocks: dict[str, Any] = {}
        size = sum(sum(rows[key] for key in requests) * self._row_bytes(name) + ALIGNMENT for name in served)
        self.tl_take_back()
        self._lent = lend(size) if way == LENT and size else None
        for name in served if requests else ():
            parts = [self.read_rows(request, name, rows[key]) for key, request in requests.items()]
            blocks[name] = parts if way == HERE else encode_block(parts, self._lent)
            if name in release:
                self._accumulator.release(name)
        for name in release:  # those that were not read: where they lie the next forward writes
            self._accumulator.release(name)
        return list(requests), blocks, None if self._lent is None else self._lent.address

    def _row_bytes(self, name: str) -> int:
        """Of one row as it is handed over, which is as it is captured."""
        return int(self._installed().taps[name].rows[0].nbytes)

    def _requests(self, wanted: Collection[str] | None) -> dict[str, str]:
        """Key → the engine's id, of the requests that have one of the wanted keys; of all for None."""
        found: dict[str, str] = {}
        for request in self._fetch().shares:
            key = self._keys.get(request, request)
            if wanted is not None and key not in wanted:
                continue
            if key in found:
                msg = f"two engine requests claim the key {key!r}"
                raise CaptureError(msg)
            found[key] = request
        return found

    def tl_read_captures(
        self, prompt_lens: list[int], names: list[str] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Captures of the requests in the order they started, cut to their prompts and joined: hook → (sum, width)."""
        requests = list(self._fetch().shares)
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

    def tl_read_emitted(self, name: str, rows: dict[str, int]) -> dict[str, dict[str, Any]]:
        """Rows of one hook as its module emitted them, not made canonical: key → encoded (n, width).

        Empty where this rank does not hold the hook, never ran it, or is not the first of its tensor-parallel group.
        """
        if name not in self._served([name]) or internals.place_of(self)[1] > 0:
            return {}
        requests = {self._keys.get(request, request): request for request in self._fetch().shares}
        return {
            key: encode_tensor(self._accumulator.read(requests[key], name, n_rows))
            for key, n_rows in rows.items()
            if key in requests
        }

    def read_rows(self, request: str, name: str, n_rows: int | None) -> torch.Tensor:
        """One request's canonical rows at one hook, (n_rows, width)."""
        rows = self._accumulator.read(request, name, n_rows)
        return self._installed().taps[name].emission.canonical(rows)

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

    def tl_place(self) -> tuple[int, int]:
        """This rank's pipeline stage and its rank inside the stage's tensor-parallel group."""
        return internals.place_of(self)

    def tl_fires_since_armed(self) -> dict[str, int]:
        """Forwards per hook since the captures were armed."""
        return {
            name: count - self._fires_at_arm.get(name, 0) for name, count in self.tl_read_counter().items()
        }

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
        self._accumulator.reset()
        self._ranges = {}
        self._taps.remove(traced=internals.is_traced(self))
        return removed
