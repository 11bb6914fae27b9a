"""Drive an instrumented engine: send prompts, join the captured rows per request, hand out tensors."""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid
from typing import TYPE_CHECKING, Any, Self

from harness import points
from harness.errors import CaptureError, UsageError
from harness.interventions import parse_interventions, plan_programs
from harness.results import ForwardResult, pad_rows
from harness.tokens import check_prompts
from harness.vllm import internals
from harness.vllm.wire import decode_tensor, encode_specs
from harness.vllm.worker_extension import REQUEST_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    import torch

    from harness.interventions import Edit
    from harness.vllm.spec import HarnessSpec

__all__ = ["VLLMDriver"]


class VLLMDriver:
    """One engine, its prompts and its captures.

    Attributes:
        supported_hook_points: in forward order.
        non_fireable_hook_points: name → reason.
        provides_sequence_logits: whether logits cover every position; False until the unembedding is served.
        boot_seconds: wall-clock seconds of the boot.
    """

    def __init__(self, llm: Any, spec: HarnessSpec | None, *, boot_seconds: float = 0.0) -> None:
        self.llm = llm
        self._widths = {tap.name: tap.width for tap in spec.taps} if spec else {}
        self._max_programs = spec.max_programs if spec else 0
        self.hf_config = internals.extract_hf_config(llm)
        self.max_model_len = int(llm.llm_engine.model_config.max_model_len)
        self.supported_hook_points = list(self._widths)
        self.non_fireable_hook_points = points.nonfireable_points(int(self.hf_config.num_hidden_layers))
        self.provides_sequence_logits = False
        self.boot_seconds = boot_seconds
        self._closed = False
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
        return_logits: bool = False,
        attention_mask: Any | None = None,
    ) -> ForwardResult:
        """Run one batch and read back what was asked for.

        Args:
            input_ids: one prompt, a (batch, seq) tensor without padding, or ragged lists.
            capture: hook names; ``()`` reads nothing back.
            intervene: edits as :mod:`harness.interventions` reads them: one spec set for the batch, or a list with one
                (or None) per request. Captures at an edited hook are the values after the edit.
            return_logits: refused until they are built.
            attention_mask: refused until it is built.
            max_new_tokens: greedy steps; captures then have n_prompt + k - 1 rows per request.

        Returns:
            Captures (batch, seq, width) at the engine's dtype, canonical, right-padded with zeros, on CPU.

        Raises:
            UsageError: a hook, prompt or edit that cannot be served; nothing has been sent then.
            CaptureError: a row is missing or doubled, or a hook was silent.
        """
        _refuse_unbuilt(return_logits=return_logits or None, attention_mask=attention_mask)
        names = points.check_capture(capture, self.supported_hook_points, self.non_fireable_hook_points)
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            msg = f"max_new_tokens must be an integer from 1, not {max_new_tokens!r}"
            raise UsageError(msg)
        prompts = check_prompts(
            input_ids,
            vocab_size=int(self.hf_config.vocab_size),
            max_len=self.max_model_len,
            new_tokens=max_new_tokens,
        )
        edits = self._edits(intervene, [len(prompt) + max_new_tokens - 1 for prompt in prompts])
        if self._closed:
            msg = "this engine was closed; boot another"
            raise UsageError(msg)
        keys = [f"{self._tag}-{next(self._calls)}" for _ in prompts]
        started = time.perf_counter()
        with self._edited(dict(zip(keys, edits, strict=True))), self._armed(names):
            outputs = self._generate(prompts, keys, max_new_tokens)
            new_tokens = [list(output.outputs[0].token_ids) for output in outputs]
            lengths = [len(p) + len(new) - 1 for p, new in zip(prompts, new_tokens, strict=True)]
            captured = self._collect(names, keys, lengths) if names else {}
        stats = {"seconds": time.perf_counter() - started}
        return ForwardResult(captured, lengths, new_tokens, raw_output=outputs, stats=stats)

    def _generate(
        self, prompts: Sequence[list[int]], keys: Sequence[str], k: int, **sampling: Any
    ) -> list[Any]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=k,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                extra_args={REQUEST_KEY: key},
                **sampling,
            )
            for key in keys
        ]
        outputs = internals.generate(self.llm, prompts, params)
        if len(outputs) != len(prompts) or any(len(o.outputs[0].token_ids) != k for o in outputs):
            got = [len(o.outputs[0].token_ids) for o in outputs]
            msg = f"{len(prompts)} prompts were to give {k} tokens each; the engine returned {got}"
            raise CaptureError(msg)
        return outputs

    def _collect(self, names: list[str], keys: list[str], lengths: list[int]) -> dict[str, torch.Tensor]:
        """Read every rank's captures and join them per request."""
        expected = dict(zip(keys, lengths, strict=True))
        by_rank = self.llm.collective_rpc("tl_read_batched_captures", args=(names, expected))
        captured = {}
        for name in names:
            rows = []
            for key in keys:
                served = [rank[key][name] for rank in by_rank if key in rank and name in rank[key]]
                if not served:
                    msg = f"{name} never fired for request {keys.index(key)}: it is installed, but no forward ran it"
                    raise CaptureError(msg)
                rows.append(decode_tensor(served[0]))
            captured[name] = pad_rows(rows)
        return captured

    def raw_logits(
        self, input_ids: Any, max_new_tokens: int = 1, capture: Sequence[str] = ()
    ) -> list[torch.Tensor]:
        """The engine's own logits of every position, (n_prompt + k - 1, d_vocab) fp32, by its log-prob path.

        ``capture`` names hooks that are captured meanwhile, and thrown away: what looking does to the logits.

        Raises:
            UsageError: the engine was not booted with ``logprobs_mode="raw_logits"`` and ``max_logprobs=-1``.
        """
        from harness.vllm.raw_logits import read_raw_logits

        prompts = check_prompts(
            input_ids,
            vocab_size=int(self.hf_config.vocab_size),
            max_len=self.max_model_len,
            new_tokens=max_new_tokens,
        )
        names = points.check_capture(capture, self.supported_hook_points, self.non_fireable_hook_points)
        with self._armed(names):
            logits = read_raw_logits(self.llm, prompts, int(self.hf_config.vocab_size), max_new_tokens)
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
        self.llm.collective_rpc("tl_reset_capture_flags", args=(names,))
        try:
            yield
        finally:
            self.llm.collective_rpc("tl_reset_accumulators")

    def _edits(self, intervene: Any, lengths: Sequence[int]) -> list[tuple[Edit, ...]]:
        """Read and check specs as the workers will, before anything is sent."""
        edits = parse_interventions(
            intervene,
            widths=self._widths,
            nonfireable=self.non_fireable_hook_points,
            lengths=lengths,
            dtype=self.llm.llm_engine.model_config.dtype,
        )
        plan_programs(edits, limit=self._max_programs)
        return edits

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
        self.llm.collective_rpc("tl_set_batched_interventions", args=(specs,))
        try:
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
        finally:
            self.llm.collective_rpc("tl_set_batched_interventions", args=({},))

    def get_param(self, name: str) -> torch.Tensor | None:
        """A parameter by the engine's dot path, from the first rank that has it; None where none has."""
        for payload in self.llm.collective_rpc("tl_get_param", args=(name,)):
            if payload is not None:
                return decode_tensor(payload)
        return None

    def fires(self) -> list[dict[str, int]]:
        """Fires per hook, one dict per rank."""
        counters: list[dict[str, int]] = self.llm.collective_rpc("tl_read_counter")
        return counters

    def close(self) -> None:
        """Release the engine's processes and memory; safe to call twice."""
        if not self._closed:
            self._closed = True
            internals.shut_down(self.llm)


def _refuse_unbuilt(**features: Any) -> None:
    for name, value in features.items():
        if value is not None:
            msg = f"{name} is not built yet in this release of the harness; leave it out"
            raise NotImplementedError(msg)
