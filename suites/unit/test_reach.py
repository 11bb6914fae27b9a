"""How far an edit can reach, by structure: worked out by hand on two blocks."""

from __future__ import annotations

import torch

from harness.interventions import Edit
from harness.parity.reach import reach
from harness.points import all_points


def rows_of(*edits, n_rows=5, same_tokens=5):
    return {
        name: mask.nonzero().flatten().tolist()
        for name, mask in reach(edits, n_layers=2, n_rows=n_rows, same_tokens=same_tokens).items()
    }


def edit(hook, *pos):
    return Edit(hook, "suppress", 0.0, torch.zeros(()), pos or None)


def test_nothing_edited_reaches_nothing():
    assert not any(rows_of().values())


def test_a_branch_of_the_first_block():
    found = rows_of(edit("blocks.0.mlp.hook_out", 2))
    assert {name: found[name] for name in all_points(2)} == {
        "embed.hook_out": [],
        "blocks.0.attn.hook_out": [],
        "blocks.0.mlp.hook_out": [2],
        "blocks.0.hook_out": [2],
        "blocks.1.attn.hook_out": [2, 3, 4],
        "blocks.1.mlp.hook_out": [2, 3, 4],
        "blocks.1.hook_out": [2, 3, 4],
        "ln_final.hook_normalized": [2, 3, 4],
    }


def test_a_query_meets_every_key_and_a_key_later_queries():
    ends = ("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k", "hook_z", "hook_out")
    wanted = {
        "hook_q": ([2], [], [], [2], [], [2], [2]),
        "hook_rot_q": ([], [], [], [2], [], [2], [2]),
        "hook_k": ([], [2], [], [], [2], [2, 3, 4], [2, 3, 4]),
        "hook_v": ([], [], [2], [], [], [2, 3, 4], [2, 3, 4]),
        "hook_z": ([], [], [], [], [], [2], [2]),
    }
    for end, rows in wanted.items():
        found = rows_of(edit(f"blocks.0.attn.{end}", 2))
        assert tuple(found[f"blocks.0.attn.{one}"] for one in ends) == rows


def test_what_attention_reads_is_read_by_all_of_it():
    found = rows_of(edit("blocks.1.attn.hook_in", 2))
    assert {name: rows for name, rows in found.items() if rows and name.startswith("blocks.1.attn.")} == {
        **{f"blocks.1.attn.hook_{end}": [2] for end in ("in", "q", "k", "v", "rot_q", "rot_k")},
        **{f"blocks.1.attn.hook_{end}": [2, 3, 4] for end in ("z", "out")},
    }
    assert not found["blocks.1.hook_in"]


def test_the_input_of_the_mlp_leaves_attention_alone():
    found = rows_of(edit("blocks.0.mlp.hook_in", 2))
    assert found["blocks.0.attn.hook_out"] == []
    assert found["blocks.0.mlp.hook_out"] == found["blocks.1.hook_in"] == [2]


def test_the_last_residual_reaches_its_own_row_alone():
    found = rows_of(edit("blocks.1.hook_out", 1, 3))
    assert {name: rows for name, rows in found.items() if rows} == {
        "blocks.1.hook_out": [1, 3],
        "ln_final.hook_normalized": [1, 3],
    }


def test_every_row():
    found = rows_of(edit("embed.hook_out"))
    assert all(rows == [0, 1, 2, 3, 4] for rows in found.values())


def test_other_tokens_change_everything_from_there_on():
    found = rows_of(edit("ln_final.hook_normalized", 0), same_tokens=4)
    assert found["embed.hook_out"] == [4]
    assert found["ln_final.hook_normalized"] == [0, 4]
