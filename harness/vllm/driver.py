"""Drive an instrumented engine: send prompts, join the captured rows per request, hand out tensors."""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from harness import points
from harness.errors import CaptureError, UsageError
from harness.points import FINAL_NORM
from harness.results import ForwardResult, Ragged
from harness.tokens import check_prompts
from harness.vllm import internals
from harness.vllm.call import Limits, check_stops
from harness.vllm.logits import SequenceLogits, assemble_vocabulary
from harness.vllm.overlays import get_overlay
from harness.vllm.patterns import Patterns
from harness.vllm.readback import Readback
from harness.vllm.spec import HarnessSpec
from harness.vllm.wire import decode_tensor, encode_specs, encode_tensor
from harness.vllm.worker_extension import REQUEST_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    import torch

    from harness.interventions import Edit
    from harness.vllm.layout import Layout

__all__ = ["VLLMDriver"]


class VLLMDriver:
    """One engine, its prompts and its captures.

    Args:
        llm: a booted ``vllm.LLM``.
        spec: what was installed in it; read from its own config where it is not given.
        non_fireable: points that are known and not served, with the reason; by default those that never are.
        boot_seconds: wall-clock seconds of its boot, for the record.

    Attributes:
        supported_hook_points: in forward order.
        non_fireable_hook_points: name → reason.
        boot_seconds: wall-clock seconds of the boot.
    """

    #: What makes logits of final-norm rows.
    logits_class = SequenceLogits

    def __init__(
        self,
        llm: Any,
        spec: HarnessSpec | None = None,
        *,
        non_fireable: Mapping[str, str] | None = None,
        boot_seconds: float = 0.0,
    ) -> None:
        if spec is None:
            spec = HarnessSpec.from_config(llm.llm_engine.vllm_config.additional_config)
        self.llm = llm
        self.hf_config = internals.extract_hf_config(llm)
        if spec is not None and spec.bare:  # the workers have completed theirs, too
            spec = spec.completed(get_overlay(self.hf_config.architectures[0]), self.hf_config)
        taps = spec.taps if spec else ()
        self._widths = {tap.name: tap.width for tap in taps}
        self._paths = {tap.name: tap.path for tap in taps}
        self._heads = {tap.name: tap.heads for tap in taps if tap.heads}
        self._max_programs = spec.max_programs if spec else 0
        self._vocab_size = int(self.hf_config.vocab_size)
        self.max_model_len = int(llm.llm_engine.model_config.max_model_len)
        self.supported_hook_points = list(self._widths)
        self._patterns = Patterns(llm, self._heads, self.hf_config)
        #: Points that are rebuilt from others: they can be captured, not edited.
        self.rebuilt_hook_points = list(self._patterns.sources)
        layers = int(self.hf_config.num_hidden_layers)
        self.non_fireable_hook_points = (
            points.nonfireable_points(layers) if non_fireable is None else dict(non_fireable)
        )
        self.boot_seconds = boot_seconds
        self._closed = False
        self._owed: dict[str, tuple[Any, ...]] = {}  #: what an interrupted call has left undone
        self._calls = itertools.count()
        self._tag = uuid.uuid4().hex[:12]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def supports(self, feature: str) -> bool:
        """Whether an optional feature is there: ``weight_access``."""
        return feature == "weight_access"

    def forward(
        self,
        input_ids: Any,
        *,
        capture: Sequence[str] = (),
        intervene: Any | None = None,
        max_new_tokens: int = 1,
        return_logits: bool = True,
        attention_mask: Any | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> ForwardResult:
        """Run one batch and read back what was asked for.

        Args:
            input_ids: one prompt, a (batch, seq) tensor, or ragged lists.
            capture: hook names; ``()`` reads nothing back.
            intervene: edits as :mod:`harness.interventions` reads them: one spec set for the batch, or a list with one
                (or None) per request. Captures at an edited hook are the values after the edit.
            max_new_tokens: greedy steps; captures and logits then have n_prompt + k - 1 rows per request.
            return_logits: whether to rebuild every logit, see :mod:`harness.vllm.logits`. Where that cannot be done
                (``provides_sequence_logits`` is False) only each request's last prompt row has log-probs, the others
                -inf, and a warning says why, once per driver.
            attention_mask: (batch, seq) of 0 and 1: the real span of each row is run, and everything is put back at
                its columns; ``pos`` of edits counts from the padded beginning.
            stop_token_ids: tokens that end a request early, themselves included in ``new_tokens``.

        Returns:
            Captures (batch, seq, width), or (batch, seq, heads, head_dim) where rows are made of heads, at the engine's
            dtype, canonical, zeros on padding; logits (batch, seq,
            d_vocab) fp32, -inf on padding; all on CPU. With decode rows ``seq`` grows by as many as were computed.

        Raises:
            UsageError: a hook, prompt, mask or edit that cannot be served; nothing has been sent then.
            CaptureError: a row is missing or doubled, or a hook was silent.
        """
        self._alive()
        stop_token_ids = check_stops(stop_token_ids, self._vocab_size)
        names = points.check_capture(
            capture,
            [*self.supported_hook_points, *self.rebuilt_hook_points],
            self.non_fireable_hook_points,
        )
        needed = self._patterns.needed(names)
        call = self._limits.check(input_ids, attention_mask, intervene, max_new_tokens)
        rebuild = return_logits and self._logits.available
        keys = [f"{self._tag}-{next(self._calls)}" for _ in call.prompts]
        armed = [*(n for n in needed if n != FINAL_NORM), FINAL_NORM] if rebuild else needed
        sampling = {"logprobs": self._logits.fallback()} if return_logits and not rebuild else {}
        started = time.perf_counter()
        with self._edited(dict(zip(keys, call.edits, strict=True))), self._armed(armed):
            sent = time.perf_counter()
            outputs = self._generate(call.prompts, keys, max_new_tokens, stop_token_ids, **sampling)
            generating = time.perf_counter() - sent
            new_tokens = [list(output.outputs[0].token_ids) for output in outputs]
            lengths = [len(p) + len(new) - 1 for p, new in zip(call.prompts, new_tokens, strict=True)]
            sent = time.perf_counter()
            captured = self._readback.collect(needed, keys, lengths, edited=any(call.edits)) if needed else {}
            reading = time.perf_counter() - sent
            steps = _largest(internals.call_workers(self.llm, "tl_step_stats")) if needed else {}
            emitted = self._emitted(keys, lengths) if rebuild else []
        place: dict[str, Any] = {"starts": call.starts, "columns": call.columns}
        logits = None
        if return_logits:
            logits = (
                self._logits.rebuilt(emitted, **place)
                if rebuild
                else self._logits.last_rows(outputs, call.prompts, lengths, **place)
            )
        found = self._patterns.rebuilt(names, captured, **place)
        kept = {name: captured[name] for name in names if name not in found}
        return ForwardResult(
            Ragged(names, kept, found, call.starts, call.columns, self._heads),
            lengths,
            new_tokens,
            logits=logits,
            raw_output=outputs,
            stats={
                "seconds": time.perf_counter() - started,
                "generate_seconds": generating,
                "read_seconds": reading,
                **steps,
            },
            starts=call.starts,
            prompts=call.prompts,
        )

    def _alive(self) -> None:
        if self._closed:
            msg = "this engine was closed; boot another"
            raise UsageError(msg)
        for method, arguments in list(self._owed.items()):
            internals.call_workers(self.llm, method, args=arguments)
            del self._owed[method]

    def _generate(
        self,
        prompts: Sequence[list[int]],
        keys: Sequence[str],
        k: int,
        stop_token_ids: Sequence[int] = (),
        **sampling: Any,
    ) -> list[Any]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=k,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                stop_token_ids=list(stop_token_ids),
                extra_args={REQUEST_KEY: key},
                **sampling,
            )
            for key in keys
        ]
        outputs = internals.generate(self.llm, prompts, params)

        def whole(tokens: Sequence[int]) -> bool:
            return len(tokens) == k or (0 < len(tokens) < k and tokens[-1] in stop_token_ids)

        if len(outputs) != len(prompts) or not all(whole(o.outputs[0].token_ids) for o in outputs):
            got = [len(o.outputs[0].token_ids) for o in outputs]
            msg = f"{len(prompts)} prompts were to give {k} tokens each; the engine returned {got}"
            raise CaptureError(msg)
        return outputs

    @cached_property
    def _readback(self) -> Readback:
        return Readback(self.llm, self._heads)

    @property
    def layout(self) -> Layout:
        """Which rank serves what, as far as it has been seen; hooks are verified on their first capture."""
        return self._readback.layout

    def _emitted(self, keys: list[str], lengths: list[int]) -> list[torch.Tensor]:
        """Rows of the final norm with its weight in, one (n, width) per request."""
        expected = dict(zip(keys, lengths, strict=True))
        by_rank = internals.call_workers(self.llm, "tl_read_emitted", args=(FINAL_NORM, expected))
        holder = next((rank for rank in by_rank if rank), None)
        if holder is None or any(key not in holder for key in keys):
            msg = f"{FINAL_NORM} never fired, so there is nothing to make logits of"
            raise CaptureError(msg)
        return [decode_tensor(holder[key]) for key in keys]

    @cached_property
    def _logits(self) -> SequenceLogits:
        return self.logits_class(self.llm, self._paths, self.get_param)

    @property
    def provides_sequence_logits(self) -> bool:
        """Whether logits cover every position; False where the final norm or the unembedding cannot be reached."""
        self._alive()
        return self._logits.available

    def worker_logits(self, input_ids: Any) -> list[torch.Tensor]:
        """Logits of every prompt row by the model's own ``compute_logits``, (n_prompt, d_vocab) each, at its dtype."""
        self._alive()
        call = self._limits.check(input_ids, None, None, 1)
        keys = [f"{self._tag}-{next(self._calls)}" for _ in call.prompts]
        with self._armed([FINAL_NORM]):
            self._generate(call.prompts, keys, 1)
            rows = self._emitted(keys, [len(prompt) for prompt in call.prompts])
        return [self.compute_logits(one) for one in rows]

    def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """The engine's own logits of post-weight final-norm rows (n, width): (n, d_vocab) at its dtype.

        Raises:
            CaptureError: no rank gave any.
        """
        by_rank = internals.call_workers(self.llm, "tl_compute_logits", args=(encode_tensor(rows),))
        logits = next((decode_tensor(one) for one in by_rank if one is not None), None)
        if logits is None:
            msg = "no rank computes logits"
            raise CaptureError(msg)
        return logits[:, : self._vocab_size]

    def raw_logits(
        self, input_ids: Any, max_new_tokens: int = 1, capture: Sequence[str] = ()
    ) -> list[torch.Tensor]:
        """The engine's own logits of every position, (n_prompt + k - 1, d_vocab) fp32, by its log-prob path.

        ``capture`` names hooks that are captured meanwhile, and thrown away: what looking does to the logits.

        Raises:
            UsageError: the engine was not booted with ``logprobs_mode="raw_logits"`` and ``max_logprobs=-1``.
        """
        from harness.vllm.raw_logits import read_raw_logits

        self._alive()
        prompts = check_prompts(
            input_ids,
            vocab_size=self._vocab_size,
            max_len=self.max_model_len,
            new_tokens=max_new_tokens,
        )
        names = points.check_capture(capture, self.supported_hook_points, self.non_fireable_hook_points)
        with self._armed(names):
            logits = read_raw_logits(self.llm, prompts, self._vocab_size, max_new_tokens)
        wanted = [len(prompt) + max_new_tokens - 1 for prompt in prompts]
        if [len(rows) for rows in logits] != wanted:
            msg = f"logits of {wanted} positions were asked for, the engine gave {[len(rows) for rows in logits]}"
            raise CaptureError(msg)
        return logits

    @contextlib.contextmanager
    def _armed(self, names: list[str]) -> Iterator[None]:
        """Within it the named hooks are captured; afterwards the workers are idle again."""
        if not names:
            yield
            return
        with self._and_then("tl_reset_accumulators"):
            internals.call_workers(self.llm, "tl_reset_capture_flags", args=(names,))
            yield

    @contextlib.contextmanager
    def _and_then(self, method: str, *arguments: Any) -> Iterator[None]:
        """At the end call a method of the workers, whatever happened; its own error does not replace another.

        Not after Ctrl-C, which an engine in a process of its own has seen too: it may be ending and never answer. Then
        the next call begins with it.
        """
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self._owed[method] = arguments
            raise
        except BaseException:
            with contextlib.suppress(Exception):
                internals.call_workers(self.llm, method, args=arguments)
            raise
        internals.call_workers(self.llm, method, args=arguments)

    @cached_property
    def _limits(self) -> Limits:
        return Limits(
            vocab_size=self._vocab_size,
            max_model_len=self.max_model_len,
            widths=self._widths,
            nonfireable=self.non_fireable_hook_points,
            max_programs=self._max_programs,
            dtype=self.llm.llm_engine.model_config.dtype,
        )

    @contextlib.contextmanager
    def _edited(self, edits: dict[str, tuple[Edit, ...]]) -> Iterator[None]:
        """Within it the requests of these keys are edited; afterwards no request is.

        Raises:
            CaptureError: the forward never ran an edited hook, so nothing was edited there.
        """
        specs = {key: encode_specs(one) for key, one in edits.items() if one}
        if not specs:
            yield
            return
        with self._and_then("tl_set_batched_interventions", {}):
            internals.call_workers(self.llm, "tl_set_batched_interventions", args=(specs,))
            before = self.fires()
            yield
            hooks = {edit.hook for one in edits.values() for edit in one}
            ran = {
                hook
                for was, now in zip(before, self.fires(), strict=True)
                for hook in hooks & now.keys()
                if now[hook] > was[hook]
            }
            if silent := [name for name in self.supported_hook_points if name in hooks - ran]:
                msg = f"{', '.join(silent)} never fired: the edits there were not applied"
                raise CaptureError(msg)

    def get_param(self, name: str) -> torch.Tensor | None:
        """A parameter by the engine's dot path, or None where no rank has it.

        Vocabulary shards are joined and their padding rows cut.

        Raises:
            UsageError: a linear layer's weight that tensor parallelism has split or that vLLM has packed away (on CPU
                it packs them all), or a closed engine.
            CaptureError: the ranks' shards do not make up the vocabulary.
        """
        self._alive()
        found = [
            one for one in internals.call_workers(self.llm, "tl_get_param", args=(name,)) if one is not None
        ]
        shards = [(int(one["start"]), decode_tensor(one)) for one in found if "start" in one]
        if shards:
            return assemble_vocabulary(shards, self._vocab_size)
        if any(0 in one["shape"] for one in found):
            msg = f"{name} is empty: vLLM has packed it for this device's kernels and dropped it; read the checkpoint's"
            raise UsageError(msg)
        if any(one.get("split") for one in found):
            msg = f"{name} is split over {len(found)} ranks and fused with others in each part; it is not put together"
            raise UsageError(msg)
        return decode_tensor(found[0]) if found else None

    def tap_bytes(self) -> list[dict[str, int]]:
        """Bytes that each rank's taps hold: ``rows``, ``tables``, ``index``; empty for an engine without taps."""
        found: list[dict[str, int]] = internals.call_workers(self.llm, "tl_tap_bytes") if self._widths else []
        return found

    def fires(self) -> list[dict[str, int]]:
        """Fires per hook, one dict per rank."""
        counters: list[dict[str, int]] = internals.call_workers(self.llm, "tl_read_counter")
        return counters

    def close(self) -> None:
        """Release the engine's processes and memory; safe to call twice."""
        if not self._closed:
            self._closed = True
            internals.shut_down(self.llm)


def _largest(by_rank: Sequence[dict[str, int]]) -> dict[str, int]:
    """The largest of each figure over ranks: one that holds none of the asked hooks has seen nothing."""
    return {name: max(rank[name] for rank in by_rank) for name in by_rank[0]}
