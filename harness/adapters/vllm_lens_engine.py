"""vllm-lens: its plugin in a ``vllm.LLM``, asked for blocks' outputs per request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from .engines import EngineBackend, engine_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Backend"]


class Backend(EngineBackend):
    """An engine that the plugin has patched."""

    packages = ("vllm-lens",)
    #: Its one table of names is this: layer i's residual stream is ``blocks.{i}.hook_out``.
    capabilities: ClassVar[dict[str, Any]] = {"capture": ["blocks.*.hook_out"], "batch": True}

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
        del edits, new_tokens, logits  # none of them declared
        from vllm import SamplingParams

        layers = [int(name.split(".")[1]) for name in capture]
        extra = {"extra_args": {"output_residual_stream": layers}} if layers else {}
        outputs = self.engine.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            SamplingParams(max_tokens=1, temperature=0.0, **extra),
            use_tqdm=False,
        )
        streams = [output.activations["residual_stream"] for output in outputs] if layers else []
        captured = {name: [stream[place] for stream in streams] for place, name in enumerate(capture)}
        return {"captured": captured, "new_tokens": [list(output.outputs[0].token_ids) for output in outputs]}
