"""``RemoteBridge``: the TransformerLens-like face of a driver; it knows no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from harness.errors import UsageError
from harness.loss import next_token_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import torch

    from harness.results import ForwardResult

__all__ = ["RemoteBridge", "ReturnType"]

#: What a forward hands back, as in TransformerLens.
ReturnType = Literal["logits", "loss", "both"] | None


class RemoteBridge:
    """Prompts in, captures out.

    Attributes:
        driver: what runs the model.
        path: where its checkpoint lies.
        cfg: the model's Hugging Face config.
    """

    def __init__(self, driver: Any, *, path: str, tokenizer: Any | None = None) -> None:
        self.driver = driver
        self.path = path
        self.cfg = driver.hf_config
        self._tokenizer = tokenizer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tokenizer(self) -> Any:
        """The given tokenizer, else the checkpoint's own, loaded on first use.

        Raises:
            UsageError: the checkpoint has none; token ids can still be sent.
        """
        if self._tokenizer is None or isinstance(self._tokenizer, str):
            from transformers import AutoTokenizer

            source = self._tokenizer or self.path
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(source)
            except (OSError, ValueError) as error:
                msg = f"{source} has no tokenizer that loads ({error}); pass token ids, or tokenizer= when booting"
                raise UsageError(msg) from error
        return self._tokenizer

    def to_tokens(self, text: str | Sequence[str]) -> list[list[int]]:
        """Token ids of each text, as the tokenizer makes them: nothing prepended, nothing padded."""
        texts = [text] if isinstance(text, str) else list(text)
        return [list(map(int, self.tokenizer(t)["input_ids"])) for t in texts]

    def _ids(self, inputs: Any) -> Any:
        is_text = isinstance(inputs, str) or (
            isinstance(inputs, (list, tuple)) and bool(inputs) and isinstance(inputs[0], str)
        )
        return self.to_tokens(inputs) if is_text else inputs

    def forward(
        self, inputs: Any, *, return_type: ReturnType = "logits", **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        """Run text or token ids and return what ``return_type`` names.

        Args:
            inputs: text, texts, token ids, or a (batch, seq) tensor.
            return_type: ``logits`` (batch, seq, d_vocab) fp32; ``loss``, a scalar, the mean over all next tokens that
                are known; ``both``, a pair; None for neither.
            **kwargs: as the driver's ``forward`` takes them: ``intervene``, ``attention_mask``, ``max_new_tokens``.

        Raises:
            UsageError: what cannot be served, a loss among it where logits do not cover every position.
        """
        answer: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
        answer, _ = self._run(inputs, return_type, **kwargs)
        return answer

    __call__ = forward

    def run_with_cache(
        self,
        inputs: Any,
        *,
        names_filter: str | Sequence[str] | Callable[[str], bool] | None = None,
        return_type: ReturnType = "logits",
        **kwargs: Any,
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Run and capture: (what ``return_type`` names, {hook: rows as :class:`ForwardResult` has them}).

        By default every installed point; a callable is asked about those and about the ones rebuilt from them.
        """
        supported = list(self.driver.supported_hook_points)
        if names_filter is None:
            names = supported
        elif callable(names_filter):
            rebuilt = getattr(self.driver, "rebuilt_hook_points", ())
            names = [name for name in (*supported, *rebuilt) if names_filter(name)]
        else:
            names = [names_filter] if isinstance(names_filter, str) else list(names_filter)
        answer, result = self._run(inputs, return_type, capture=names, **kwargs)
        return answer, result.captured

    def run_with_interventions(
        self, inputs: Any, interventions: Any, *, return_type: ReturnType = "logits", **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        """Run with edits, see :mod:`harness.interventions`; nothing of them is left for the next call."""
        return self.forward(inputs, return_type=return_type, intervene=interventions, **kwargs)

    def generate(
        self,
        inputs: Any,
        max_new_tokens: int = 16,
        *,
        intervene: Any | None = None,
        stop_at_eos: bool = True,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Greedy new token ids of each prompt, edited at every step where ``intervene`` says so.

        ``stop_at_eos`` ends a request at the config's end token, which is included.
        """
        ends = self.cfg.eos_token_id
        stops = [] if not stop_at_eos or ends is None else [ends] if isinstance(ends, int) else list(ends)
        result: ForwardResult = self.driver.forward(
            self._ids(inputs),
            max_new_tokens=max_new_tokens,
            intervene=intervene,
            return_logits=False,
            stop_token_ids=stops,
            **kwargs,
        )
        return result.new_tokens

    def _run(self, inputs: Any, return_type: ReturnType, **kwargs: Any) -> tuple[Any, ForwardResult]:
        if return_type not in ("logits", "loss", "both", None):
            msg = f"return_type is {return_type!r}; it is 'logits', 'loss', 'both' or None"
            raise UsageError(msg)
        ids = self._ids(inputs)
        if return_type in ("loss", "both") and not self.driver.provides_sequence_logits:
            msg = f"return_type={return_type!r} needs logits at every position, which this engine does not provide"
            raise UsageError(msg)
        result = self.driver.forward(ids, return_logits=return_type is not None, **kwargs)
        if return_type in (None, "logits"):
            return result.logits, result
        loss = next_token_loss(result)
        return (loss if return_type == "loss" else (result.logits, loss)), result

    def close(self) -> None:
        """Release the engine; safe to call twice."""
        self.driver.close()
