"""Drive an instrumented engine: send prompts, join the captured rows per request, hand out tensors."""

from __future__ import annotations

import itertools
import time
import uuid
from typing import TYPE_CHECKING, Any, Self

from harness import points
from harness.errors import CaptureError, UsageError
from harness.results import ForwardResult, pad_rows
from harness.vllm import internals
from harness.vllm.wire import decode_tensor
from harness.vllm.worker_extension import REQUEST_KEY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    import torch

__all__ = ["VLLMDriver", "normalise_prompts"]


def normalise_prompts(input_ids: Any, *, vocab_size: int, max_len: int, new_tokens: int) -> list[list[int]]:
    """Turn a prompt, a (batch, seq) tensor or ragged lists into lists of ids, and check them.

    Raises:
        UsageError: nothing to run, an empty prompt, an id outside the vocabulary, or a prompt that leaves no room.
    """
    rows = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    if rows and not hasattr(rows[0], "__len__"):
        rows = [rows]
    if not rows:
        msg = "no prompts: input_ids is empty"
        raise UsageError(msg)
    prompts = []
    for index, row in enumerate(rows):
        ids = row.tolist() if hasattr(row, "tolist") else list(row)
        if not ids:
            msg = f"prompt {index} is empty: there is no position to compute; give it at least one token (BOS will do)"
            raise UsageError(msg)
        for position, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int):
                msg = f"prompt {index} holds {token!r} at position {position}; token ids are integers"
                raise UsageError(msg)
            if not 0 <= token < vocab_size:
                where = f"prompt {index} has token id {token} at position {position}"
                msg = f"{where}, outside the vocabulary of {vocab_size}"
                raise UsageError(msg)
        if len(ids) + new_tokens > max_len:
            msg = (
                f"prompt {index} has {len(ids)} tokens and {new_tokens} new ones were asked for, but max_model_len is "
                f"{max_len} and one place must stay free for the next token: shorten it, or boot with more"
            )
            raise UsageError(msg)
        prompts.append(ids)
    return prompts


class VLLMDriver:
    """One engine, its prompts and its captures.

    Attributes:
        supported_hook_points: in forward order.
        non_fireable_hook_points: name → reason.
        provides_sequence_logits: whether logits cover every position; False until the unembedding is served.
        boot_seconds: wall-clock seconds of the boot.
    """

    def __init__(self, llm: Any, names: Sequence[str], *, boot_seconds: float = 0.0) -> None:
        self.llm = llm
        self.hf_config = internals.extract_hf_config(llm)
        self.max_model_len = int(llm.llm_engine.model_config.max_model_len)
        self.supported_hook_points = list(names)
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
            intervene: refused until it is built.
            return_logits: refused until they are built.
            attention_mask: refused until it is built.
            max_new_tokens: greedy steps; captures then have n_prompt + k - 1 rows per request.

        Returns:
            Captures (batch, seq, width) at the engine's dtype, canonical, right-padded with zeros, on CPU.

        Raises:
            UsageError: a hook or prompt that cannot be served; nothing has been sent then.
            CaptureError: a row is missing or doubled, or a hook was silent.
        """
        _refuse_unbuilt(
            intervene=intervene, return_logits=return_logits or None, attention_mask=attention_mask
        )
        names = points.check_capture(capture, self.supported_hook_points, self.non_fireable_hook_points)
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            msg = f"max_new_tokens must be an integer from 1, not {max_new_tokens!r}"
            raise UsageError(msg)
        prompts = normalise_prompts(
            input_ids,
            vocab_size=int(self.hf_config.vocab_size),
            max_len=self.max_model_len,
            new_tokens=max_new_tokens,
        )
        if self._closed:
            msg = "this engine was closed; boot another"
            raise UsageError(msg)
        keys = [f"{self._tag}-{next(self._calls)}" for _ in prompts]
        started = time.perf_counter()
        try:
            if names:
                self.llm.collective_rpc("tl_reset_capture_flags", args=(names,))
            outputs = self._generate(prompts, keys, max_new_tokens)
            new_tokens = [list(output.outputs[0].token_ids) for output in outputs]
            lengths = [len(p) + len(new) - 1 for p, new in zip(prompts, new_tokens, strict=True)]
            captured = self._collect(names, keys, lengths) if names else {}
        finally:
            if names:
                self.llm.collective_rpc("tl_reset_accumulators")
        stats = {"seconds": time.perf_counter() - started}
        return ForwardResult(captured, lengths, new_tokens, raw_output=outputs, stats=stats)

    def _generate(
        self, prompts: Sequence[list[int]], keys: Sequence[str], k: int, **sampling: Any
    ) -> list[Any]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

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
        sent = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        outputs: list[Any] = self.llm.generate(sent, params, use_tqdm=False)
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

    def raw_logits(self, input_ids: Any, max_new_tokens: int = 1) -> list[torch.Tensor]:
        """The engine's own logits of every position, (n_prompt + k - 1, d_vocab) fp32, by its log-prob path.

        Raises:
            UsageError: the engine was not booted with ``logprobs_mode="raw_logits"`` and ``max_logprobs=-1``.
        """
        from harness.vllm.raw_logits import read_raw_logits

        prompts = normalise_prompts(
            input_ids,
            vocab_size=int(self.hf_config.vocab_size),
            max_len=self.max_model_len,
            new_tokens=max_new_tokens,
        )
        return read_raw_logits(self.llm, prompts, int(self.hf_config.vocab_size), max_new_tokens)

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
