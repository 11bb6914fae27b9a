"""The sizes of a model that say how long a row is at each hook point. Knows no backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from harness.errors import UsageError
from harness.points import KV_HEAD_TEMPLATES, Q_HEAD_TEMPLATES, HookPoint

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Geometry"]


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder.

    Attributes:
        layers: blocks.
        width: of the residual stream.
        heads, kv_heads: query heads, and key-value heads, which may be fewer.
        head_dim: width of one head.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, hf_config: Any) -> Self:
        """Read them out of a Hugging Face config, whichever names its family has.

        Raises:
            UsageError: a size is missing, or not a whole number from 1.
        """
        heads = _size(hf_config, "num_attention_heads")
        kv_heads = getattr(hf_config, "num_key_value_heads", None)
        if getattr(hf_config, "multi_query", False) and not getattr(
            hf_config, "new_decoder_architecture", False
        ):
            kv_heads = 1  # Falcon's, whose num_kv_heads is not looked at then
        elif kv_heads is None:
            kv_heads = getattr(hf_config, "num_kv_heads", None)
        width = _size(hf_config, "hidden_size")
        return cls(
            layers=_size(hf_config, "num_hidden_layers"),
            width=width,
            heads=heads,
            kv_heads=_checked("num_key_value_heads", kv_heads or heads),
            head_dim=_checked("head_dim", getattr(hf_config, "head_dim", None) or width // heads),
        )

    def heads_at(self, hook: str) -> int | None:
        """How many heads a row at ``hook`` is made of; None where it is not."""
        template = HookPoint.parse(hook).template
        if template in Q_HEAD_TEMPLATES:
            return self.heads
        return self.kv_heads if template in KV_HEAD_TEMPLATES else None

    def shape(self, hook: str) -> tuple[int, ...]:
        """Shape of one row: (width,), or (heads, head_dim)."""
        heads = self.heads_at(hook)
        return (self.width,) if heads is None else (heads, self.head_dim)

    def row_width(self, hook: str) -> int:
        """Numbers in one row, its heads one after the other."""
        heads = self.heads_at(hook)
        return self.width if heads is None else heads * self.head_dim

    def widths(self, hooks: Iterable[str]) -> dict[str, int]:
        """Hook → :meth:`row_width`."""
        return {hook: self.row_width(hook) for hook in hooks}


def _size(hf_config: Any, name: str) -> int:
    return _checked(name, getattr(hf_config, name, None))


def _checked(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = (
            f"the model's config has {name} = {value!r}; it is a whole number from 1: copy config.json again"
        )
        raise UsageError(msg)
    return value
