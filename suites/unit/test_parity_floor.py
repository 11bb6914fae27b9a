"""What a dtype may cost: the floor, and how often it counts where a residual stream was once larger."""

from __future__ import annotations

import pytest
import torch

from harness.errors import UsageError
from harness.parity.floor import carried, floor, full_name, unit_roundoff


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_floor_grows_with_the_root_of_depth():
    assert floor("bf16", 0) == 2**-8
    assert floor("float32", 3) == pytest.approx(2 * 2**-24)
    assert unit_roundoff("fp16") == torch.finfo(torch.float16).eps / 2


def test_a_dtype_has_one_name():
    assert [full_name(name) for name in ("torch.bfloat16", "bf16", "bfloat16")] == ["bfloat16"] * 3
    with pytest.raises(UsageError) as caught:
        floor("int8", 1)
    assert str(caught.value) == (
        "dtype 'int8' has no noise floor; known are float64, float32, float16, bfloat16 and fp64, fp32, fp16, bf16"
    )


def times(norms: dict[str, tuple[float, ...]], **kept: tuple[float, ...]) -> dict[str, list[float]]:
    """Factors by hook, block outputs named by their number."""

    def name(hook: str) -> str:
        return f"blocks.{hook[1:]}.hook_out" if hook[1:].isdigit() else hook

    edits = {name(hook): column(*values) for hook, values in kept.items()} or None
    found = carried({name(hook): column(*values) for hook, values in norms.items()}, edits)
    return {hook: found[name(hook)].tolist() for hook in norms}


def test_a_row_counts_as_often_as_its_stream_has_shrunk():
    found = times({"b0": (2.0, 8.0), "b1": (4.0, 2.0), "b2": (2.0, 4.0)})
    assert found == {"b0": [1, 1], "b1": [1, 4], "b2": [2, 2]}


def test_a_branch_counts_as_the_block_before_it():
    mlp, last = "blocks.1.mlp.hook_out", "ln_final.hook_normalized"
    found = times(
        {"embed.hook_out": (99.0,), "b0": (8.0,), mlp: (1.0,), "b1": (2.0,), last: (1.0,), "b10": (8.0,)}
    )
    assert found == {"embed.hook_out": [1], "b0": [1], mlp: [1], "b1": [4], last: [4], "b10": [1]}


def test_without_block_outputs_nothing_is_known_to_have_been_larger():
    assert times({"embed.hook_out": (9.0, 9.0), "blocks.0.mlp.hook_out": (1.0, 0.0)}) == {
        "embed.hook_out": [1, 1],
        "blocks.0.mlp.hook_out": [1, 1],
    }


def test_a_row_that_has_become_zero_counts_once():
    assert times({"b0": (8.0, 8.0), "b1": (0.0, 4.0)}) == {"b0": [1, 1], "b1": [1, 2]}


def test_an_edit_keeps_as_much_of_the_error_as_of_the_row():
    norms = {"b0": (8.0, 8.0, 8.0, 8.0), "b1": (1.0, 1.0, 1.0, 16.0), "b2": (1.0, 1.0, 1.0, 1.0)}
    assert times(norms, b1=(0.0, -0.5, 1.0, 2.0)) == {
        "b0": [1, 1, 1, 1],
        "b1": [1, 4, 8, 1],
        "b2": [1, 4, 8, 16],
    }
    assert times(norms, b0=(0.5, 0.5, 0.5, 0.5)) == times(norms)  # nothing was carried to it


def test_an_edit_of_a_block_s_input_keeps_as_much():
    """Where the stream is set before a block, what it was larger before has left nothing."""
    given = "blocks.1.hook_in"
    norms = {"b0": (8.0, 8.0), given: (1.0, 4.0), "b1": (1.0, 4.0)}
    assert times(norms) == {"b0": [1, 1], given: [1, 1], "b1": [8, 2]}
    kept = {given: column(0.0, 0.5)}
    names = {
        hook.replace("b0", "blocks.0.hook_out").replace("b1", "blocks.1.hook_out"): hook for hook in norms
    }
    found = carried({name: column(*norms[hook]) for name, hook in names.items()}, kept)
    assert [one.tolist() for one in found.values()] == [[1, 1], [1, 1], [1, 1]]
    first = {"blocks.0.hook_in": column(9.0), "blocks.0.hook_out": column(1.0)}
    assert carried(first, {"blocks.0.hook_in": column(0.5)})["blocks.0.hook_out"].tolist() == [1]
