"""nnsight on vLLM: one invoke per prompt, in which each layer's output is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from .engines import EngineBackend, engine_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Backend"]


class Backend(EngineBackend):
    """nnsight's ``VLLM``."""

    packages = ("nnsight",)
    #: Its one table of names is this: layer i's two outputs together are ``blocks.{i}.hook_out``.
    capabilities: ClassVar[dict[str, Any]] = {"capture": ["blocks.*.hook_out"], "batch": True}

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
        layers = [self.engine.model.layers[int(name.split(".")[1])] for name in capture]
        with self.engine.trace(temperature=0.0, max_tokens=1) as tracer:
            values = [].save()  # type: ignore[attr-defined]  # nnsight gives it to lists
            for prompt in prompts:
                with tracer.invoke(list(prompt)):
                    # What a layer adds, and the stream it adds it to.
                    values.append([sum(layer.output) for layer in layers])
        return {"captured": {name: [one[place] for one in values] for place, name in enumerate(capture)}}
