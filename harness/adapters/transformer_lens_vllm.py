"""TransformerLens' vLLM source in its mode for batches: eager, one set of edits for the batch, every row edited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .engines import EngineBackend, engine_options
from .names import everywhere, patterns
from .padded import tokenizer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["NAMES", "Backend"]

#: Canonical names; the source has the same, and takes the final norm's weight out by itself.
NAMES = (
    "embed.hook_out",
    "blocks.{i}.attn.hook_out",
    "blocks.{i}.mlp.hook_out",
    "blocks.{i}.hook_out",
    "ln_final.hook_normalized",
)


class Backend(EngineBackend):
    """The driver of the bridge that ``boot_vllm`` returns."""

    packages = ("transformer-lens",)
    capabilities: ClassVar[dict[str, Any]] = {
        "capture": patterns(NAMES),
        "edit": everywhere(NAMES),
        "batch": True,
        "logits": True,
    }

    @classmethod
    def boot(cls, config: Any) -> Backend:
        """Boot its engine."""
        options = engine_options(config, "tl_vllm_capture")
        from transformer_lens.model_bridge.sources.vllm import boot_vllm

        options["dtype"] = getattr(torch, config.dtype)
        bridge = boot_vllm(config.path, tokenizer=tokenizer_of(config.path), enable_batching=True, **options)
        return cls(bridge)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        capture: Sequence[str],
        edits: Sequence[Sequence[Mapping[str, Any]]],
        new_tokens: int,
        logits: bool,
    ) -> dict[str, Any]:
        """See :class:`harness.elsewhere.PlainBackend`."""
        del new_tokens  # one: its driver refuses more, and decode is not declared
        found = self.engine._driver.forward(  # noqa: SLF001 - the bridge replays captures by name only
            [list(prompt) for prompt in prompts],
            capture=tuple(capture),
            intervene={edit["hook"]: _spec(edit) for edit in edits[0]},
            return_logits=logits,
        )
        result: dict[str, Any] = {
            "captured": {name: _cut(found.captured[name], prompts) for name in capture},
        }
        if logits:
            result["logits"] = [rows.float() for rows in _cut(found.logits, prompts)]
        return result

    def close(self) -> None:
        """End its engine."""
        if self.engine is not None and hasattr(self.engine, "close"):
            self.engine.close()
        self.engine = None


def _cut(padded: Any, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """One (rows, …) per prompt out of (batch, longest, …), padded on the right."""
    values = torch.as_tensor(padded)
    return [values[row, : len(prompt)] for row, prompt in enumerate(prompts)]


def _spec(edit: Mapping[str, Any]) -> dict[str, Any]:
    """The edit in the source's own words."""
    bias = edit["bias"].tolist()
    own: dict[str, dict[str, Any]] = {
        "suppress": {},
        "scale": {"factor": edit["scale"]},
        "add": {"value": bias},
        "set": {"value": bias},
    }
    return {"op": edit["op"], **own[edit["op"]]}
