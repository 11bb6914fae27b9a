"""vllm-lens: its plugin in a ``vllm.LLM``, asked for blocks' outputs per request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from .engines import BLOCK_OUT, EngineBackend, blocks, by_point, engine_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Backend"]


class Backend(EngineBackend):
    """An engine that the plugin has patched."""

    packages = ("vllm-lens",)
    capabilities: ClassVar[dict[str, Any]] = {"capture": [BLOCK_OUT], "batch": True, "decode": True}

    @classmethod
    def boot(cls, config: Any) -> Backend:
        """Boot; the plugin comes through vLLM's entry point, and makes the engine eager."""
        options = engine_options(config, "activations")
        from vllm import LLM

        return cls(LLM(config.path, skip_tokenizer_init=True, enable_prefix_caching=False, **options))

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
        del edits, logits  # neither is declared
        from vllm import SamplingParams

        layers = blocks(capture)
        extra = {"extra_args": {"output_residual_stream": layers}} if layers else {}
        outputs = self.engine.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, **extra),
            use_tqdm=False,
        )
        streams = [output.activations["residual_stream"] for output in outputs] if layers else []
        return {
            "captured": by_point(capture, streams),
            "new_tokens": [list(output.outputs[0].token_ids) for output in outputs],
        }
