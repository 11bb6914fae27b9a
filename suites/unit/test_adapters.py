"""Adapters of other libraries: what they are made of, and how they cut, edit and name rows."""

from __future__ import annotations

import ast

import pytest
import torch

from harness.adapters import ADAPTERS, FOLDER


def test_each_adapter_has_its_pins_its_session_and_its_module(pytestconfig):
    tree = ast.parse((pytestconfig.rootpath / "noxfile.py").read_text())
    (audited,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "AUDITED"
    ]
    assert audited == {name: adapter.requirements for name, adapter in ADAPTERS.items()}
    for adapter in ADAPTERS.values():
        assert (FOLDER / f"{adapter.module}.py").is_file()
        pins = (pytestconfig.rootpath / "requirements" / "peers" / f"{adapter.requirements}.txt").read_text()
        assert all("==" in line for line in pins.splitlines() if line and not line.startswith("#"))


def test_adapters_import_nothing_of_this_project():
    for file in FOLDER.glob("*.py"):
        imported = [
            (node.module or "", node.level) if isinstance(node, ast.ImportFrom) else (node.names[0].name, 0)
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not [name for name, level in imported if not level and name.split(".")[0] == "harness"], (
            file.name
        )


def edit(hook="embed.hook_out", rows=None, scale=1.0, bias=0.0):
    return {"hook": hook, "rows": rows, "scale": scale, "bias": torch.as_tensor(bias)}


def test_a_rectangle_edits_and_cuts_rows_by_their_place_in_the_prompt_at_every_step():
    from harness.adapters.rectangle import Rectangle

    every = edit(rows=None, scale=0.0)
    some = edit(rows=[0, 2, 3], bias=[10.0, 20.0])
    batch = Rectangle([[5, 6, 7], [8]], [[every], [some]])
    assert batch.ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.positions.tolist() == [[0, 1, 2], [0, 0, 0]]
    prompts = torch.ones(2, 3, 2)
    prompts[0] = torch.inf
    made = [batch.edited("embed.hook_out", 0, prompts)]
    made += [batch.edited("embed.hook_out", step, torch.full((2, 1, 2), float(step))) for step in (1, 2, 3)]
    first, second = batch.rows(made)
    assert first.tolist() == [[0.0, 0.0]] * 6
    # Row 1 is the first step's, and is not edited; padding is neither edited nor handed out.
    assert second.tolist() == [[11.0, 21.0], [1.0, 1.0], [12.0, 22.0], [13.0, 23.0]]
    assert made[0][1, :2].tolist() == [[1.0, 1.0]] * 2
    assert prompts[1, 2].tolist() == [1.0, 1.0]
    assert batch.edited("blocks.0.hook_out", 0, prompts) is prompts


@pytest.mark.parametrize("given", [True, False])
def test_an_adapter_on_transformers_returns_rows_of_all_steps_and_the_tokens(given):
    from harness.adapters.padded import PaddedBackend, Passes

    class Echo(PaddedBackend):
        def call(self, batch, capture, new_tokens, *, logits):
            assert logits
            steps = [batch.ids, *(torch.full((2, 1), 40 + step) for step in range(1, new_tokens))]
            wide = [ids[:, :, None].half() for ids in steps]
            said = [torch.nn.functional.one_hot(ids, 50).half() for ids in steps]
            tokens = torch.tensor([[1, 2], [3, 4]]) if given else None
            return Passes(dict.fromkeys(capture, wide), said, tokens)

    found = Echo(None).run([[5, 6, 7], [8]], capture=["x"], edits=[[], []], new_tokens=2, logits=True)
    assert [rows.flatten().tolist() for rows in found["captured"]["x"]] == [[5, 6, 7, 41], [8, 41]]
    assert found["new_tokens"] == ([[1, 2], [3, 4]] if given else [[7, 41], [8, 41]])
    assert [rows.argmax(1).tolist() for rows in found["logits"]] == [[5, 6, 7, 41], [8, 41]]
    assert {rows.dtype for rows in found["logits"]} == {torch.float32}


def test_a_table_of_names_is_read_for_a_block_and_for_all():
    from harness.adapters.engines import blocks, by_point
    from harness.adapters.names import everywhere, patterns, translated

    table = {"embed.hook_out": "wte", "blocks.{i}.hook_out": "h.{i}"}
    assert [translated(table, name) for name in ("embed.hook_out", "blocks.12.hook_out")] == ["wte", "h.12"]
    assert patterns(table) == ["embed.hook_out", "blocks.*.hook_out"]
    assert everywhere(table)["set"] == patterns(table)
    names = ["blocks.2.hook_out", "blocks.0.hook_out"]
    assert blocks(names) == [2, 0]
    assert by_point(names, [["a2", "a0"], ["b2", "b0"]]) == {names[0]: ["a2", "b2"], names[1]: ["a0", "b0"]}
