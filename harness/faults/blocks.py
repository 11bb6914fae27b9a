"""Blocks that compute something else, for bisections, which must name block, branch and row (``docs/faults.md``)."""

from __future__ import annotations

from typing import Any

from harness.faults.families import _OtherModel

__all__ = ["AttentionWrongInChunks", "MlpWrongFromFive"]


def _spoil(layer: Any, branch: Any, wrong: Any) -> None:
    """Make a branch's output half as large again at the rows for which ``wrong`` of their positions (rows,)."""
    positions: list[Any] = []

    def learn(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions[:] = [args[0] if args else kwargs["positions"]]

    def change(_module: Any, _args: Any, output: Any) -> Any:
        output = output.clone()
        output[wrong(positions[0])] *= 1.5
        return output

    layer.register_forward_pre_hook(learn, with_kwargs=True)
    branch.register_forward_hook(change, prepend=True)


class MlpWrongFromFive(_OtherModel):
    """The third block's MLP gives half as much again from position 5 on."""

    def changed(self, model: Any) -> None:
        """Llama's."""
        layer = model.model.layers[2]
        _spoil(layer, layer.mlp, lambda positions: positions >= 5)


class AttentionWrongInChunks(_OtherModel):
    """The second block's attention gives half as much again in a prompt's second and later chunks."""

    def changed(self, model: Any) -> None:
        """Llama's; a step that does not begin at position 0 and has more than one row."""
        layer = model.model.layers[1]
        _spoil(
            layer,
            layer.self_attn,
            lambda positions: (positions >= positions[0]) & (positions[0] > 0) & (positions.shape[0] > 1),
        )
