"""What a backend declares, and what is then not asked of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.asking import undeclared, undeclared_in_call
from harness.capabilities import FLAGS, FULL, Capabilities
from harness.errors import EngineError, UsageError
from harness.points import all_points, every_point

POINTS = all_points(2)


def test_what_is_not_declared_is_not_there():
    nothing = Capabilities.read({}, "thin")
    assert nothing.points(POINTS) == []
    assert not nothing.edits("add", "embed.hook_out")
    assert not any(getattr(nothing, flag) for flag in FLAGS)


def test_a_backend_that_declares_nothing_at_all_is_held_to_everything():
    assert FULL.points(every_point(2)) == every_point(2)
    assert all(getattr(FULL, flag) for flag in FLAGS)
    assert all(FULL.edits(op, hook) for op in ("suppress", "set") for hook in every_point(2))
    assert all(FULL.is_emitted(hook) for hook in every_point(2))


def test_patterns_do_not_cross_dots():
    some = Capabilities.read({"capture": ["blocks.*.hook_out"], "edit": {"add": ["blocks.1.*"]}}, "some")
    assert some.points(POINTS) == ["blocks.0.hook_out", "blocks.1.hook_out"]
    assert some.edits("add", "blocks.1.hook_out")
    assert not some.edits("add", "blocks.0.hook_out")
    assert not some.edits("set", "blocks.1.hook_out")


def test_edits_of_none_are_every_op_at_what_is_captured():
    some = Capabilities.read({"capture": ["blocks.*.hook_out"], "edit": None}, "some")
    assert some.edits("set", "blocks.0.hook_out")
    assert not some.edits("set", "embed.hook_out")


def test_json_carries_a_declaration():
    some = Capabilities.read(
        {"capture": ["embed.hook_out"], "edit": {"add": ["embed.*"]}, "batch": True}, "some"
    )
    assert Capabilities.read(some.to_json(), "some") == some
    assert Capabilities.read(FULL.to_json(), "full") == FULL


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"catpure": []}, r"backend odd: it declares 'catpure'; there are capture, edit"),
        ({"batch": 1}, r"backend odd: it declares batch as 1; say True or False"),
        ({"capture": "embed.hook_out"}, r"it declares capture as 'embed.hook_out'; it is a list of patterns"),
        ({"emitted": None}, r"it declares emitted as None; it is a list of patterns"),
        ({"edit": {"multiply": []}}, r"it declares the op 'multiply'; there are suppress, scale, add, set"),
        ({"edit": ["add"]}, r"it declares edit as \['add'\]; it is a mapping"),
        ({"edit": {"add": [1]}}, r"it declares edit\['add'\] as \[1\]"),
        (["batch"], r"its capabilities are \['batch'\], not a mapping"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_the_backend_s_fault(declared, message):
    with pytest.raises(EngineError, match=message):
        Capabilities.read(declared, "odd")


SOME = Capabilities.read({"capture": ["blocks.*.hook_out"], "edit": {"add": ["blocks.*.hook_out"]}}, "some")


@pytest.mark.parametrize(
    ("prompts", "names", "asked", "missing"),
    [
        ([[1, 2]], ["blocks.0.hook_out"], {}, None),
        ([[1], [2]], [], {}, "batch ("),
        ([[1]], [], {"max_new_tokens": 2}, "decode ("),
        ([[1]], [], {"return_logits": True}, "logits ("),
        ([[1]], ["blocks.0.hook_out", "embed.hook_out"], {}, "capture at embed.hook_out"),
        ([[1]], [], {"intervene": {"blocks.0.hook_out": {"op": "add", "value": 1}}}, None),
        (
            [[1]],
            [],
            {"intervene": {"blocks.0.hook_out": {"op": "set", "value": 1}}},
            "set at blocks.0.hook_out",
        ),
        ([[1]], [], {"intervene": [{"embed.hook_out": {"op": "add", "value": 1}}]}, "add at embed.hook_out"),
        # Specs that no backend can do are for the backend to refuse.
        ([[1]], [], {"intervene": {"blocks.0.hook_out": {"op": "multiply"}}}, None),
        ([[1]], [], {"intervene": {"blocks.0.hook_outt": {"op": "set"}}}, None),
        ([[1]], [], {"intervene": "suppress"}, None),
    ],
)
def test_what_a_call_needs(prompts, names, asked, missing):
    found = undeclared_in_call(SOME, prompts, names, asked)
    assert found is None if missing is None else found.startswith(missing)


def test_sets_of_edits_for_each_prompt_are_a_capability():
    batch = Capabilities.read({"capture": None, "edit": None, "batch": True}, "some")
    edit = {"embed.hook_out": {"op": "suppress"}}
    assert undeclared_in_call(batch, [[1], [2]], [], {"intervene": edit}) is None
    assert undeclared_in_call(batch, [[1], [2]], [], {"intervene": [edit, None]}).startswith(
        "edit_per_prompt ("
    )


def test_edits_of_some_rows_are_a_capability():
    whole = Capabilities.read({"capture": None, "edit": None}, "some")
    edit = {"op": "suppress"}
    assert undeclared_in_call(whole, [[1]], [], {"intervene": {"embed.hook_out": edit}}) is None
    some = {"embed.hook_out": {**edit, "pos": 0}}
    assert undeclared_in_call(whole, [[1]], [], {"intervene": some}).startswith("edit_positions (")


def test_a_capability_that_there_is_not():
    assert undeclared(FULL, "chunking") is None
    with pytest.raises(UsageError, match=r"'chunks' is no capability; there are batch"):
        undeclared(FULL, "chunks")


def test_the_fixture_skips_what_is_not_declared_by_class_and_reason():
    from harness.check import Parity

    parity = Parity.__new__(Parity)
    parity.config = SimpleNamespace(backend_name="some", options={})
    parity.__class__ = type("Some", (Parity,), {"engine": SimpleNamespace(capabilities=SOME, forward=None)})
    with pytest.raises(pytest.skip.Exception, match=r"not-applicable: some declares no batch \("):
        parity.forward([[1], [2]], capture=[])
    with pytest.raises(pytest.skip.Exception, match=r"not-applicable: some declares no chunking"):
        parity.requires("chunking")


def test_missing_software_is_a_class_of_its_own():
    from harness.check import Parity

    parity = Parity.__new__(Parity)
    parity.needs("json", "never said")
    with pytest.raises(pytest.skip.Exception, match="not-installed: no such thing here"):
        parity.needs("no_module_of_this_name", "no such thing here")
