"""``RemoteBridge``: the TransformerLens-like face of a driver; it knows no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import torch

    from harness.results import ForwardResult

__all__ = ["RemoteBridge"]


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

    def forward(self, inputs: Any, **kwargs: Any) -> ForwardResult:
        """Run text or token ids; see the driver's ``forward`` for the rest."""
        result: ForwardResult = self.driver.forward(self._ids(inputs), **kwargs)
        return result

    def run_with_cache(
        self,
        inputs: Any,
        *,
        names_filter: str | Sequence[str] | Callable[[str], bool] | None = None,
        **kwargs: Any,
    ) -> tuple[ForwardResult, dict[str, torch.Tensor]]:
        """Run and capture: (result, {hook: (batch, seq, width)}); every point by default."""
        supported = list(self.driver.supported_hook_points)
        if names_filter is None:
            names = supported
        elif callable(names_filter):
            names = [name for name in supported if names_filter(name)]
        else:
            names = [names_filter] if isinstance(names_filter, str) else list(names_filter)
        result = self.forward(inputs, capture=names, **kwargs)
        return result, result.captured

    def close(self) -> None:
        """Release the engine; safe to call twice."""
        self.driver.close()
