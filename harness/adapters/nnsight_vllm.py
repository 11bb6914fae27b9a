"""nnsight on vLLM: one invoke per prompt, in which each layer's output is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from .engines import BLOCK_OUT, EngineBackend, blocks, by_point, engine_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Backend"]


class Backend(EngineBackend):
    """nnsight's ``VLLM``."""

    packages = ("nnsight",)
    #: Layer i's two outputs together are the point.
    capabilities: ClassVar[dict[str, Any]] = {"capture": [BLOCK_OUT], "batch": True}

    @classmethod
    def boot(cls, config: Any) -> Backend:
        """Boot its engine."""
        options = engine_options(config, "")
        from nnsight.modeling.vllm import VLLM

        return cls(VLLM(config.path, dispatch=True, **options))

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
        layers = [self.engine.model.layers[block] for block in blocks(capture)]
        with self.engine.trace(temperature=0.0, max_tokens=1) as tracer:
            values = [].save()  # type: ignore[attr-defined]  # nnsight gives it to lists
            for prompt in prompts:
                with tracer.invoke(list(prompt)):
                    # What a layer adds, and the stream it adds it to.
                    values.append([sum(layer.output) for layer in layers])
        return {"captured": by_point(capture, values)}
