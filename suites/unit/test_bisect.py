"""Bisections end to end, on transformers with a fault planted in it: point, row and request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.bisect.bench import Bench, Call
from harness.bisect.investigate import COMPUTED, READ, REFUSED, SOUND, investigate
from harness.bisect.words import needs, sentence
from harness.errors import CaptureError
from harness.parity.types import RowRef
from suites.unit.planted_engine import CALL, FAULTS, PROMPTS, Planted, late, louder


@pytest.mark.parametrize("fault", FAULTS)
def test_the_point_and_its_first_row_are_named(hf_session, fault) -> None:
    plant, hook, branch, position = FAULTS[fault]
    result = investigate(Planted(hf_session, plant), CALL)
    assert result.kind == COMPUTED
    assert result.found is not None
    ((culprit, site),) = result.found.wrong
    assert site.hook == hook
    assert culprit.stage.name == f"block {hook.split('.')[1]}"
    assert culprit.heals
    assert culprit.stage == result.found.last
    assert result.narrowed is not None
    assert result.narrowed.row.position == position
    text = sentence(result)
    assert "is wrong by itself" in text
    assert f"of {culprit.stage.name}" in text
    assert hook in text
    assert f"position {position}" in text
    assert branch in ("norm", "attention", "MLP", "residual stream")


def test_a_sound_engine_is_not_blamed(hf_session) -> None:
    said: list[str] = []
    result = investigate(Planted(hf_session), CALL, said.append)
    assert (result.kind, result.found, result.narrowed) == (SOUND, None, None)
    assert sentence(result).startswith("Nothing is wrong by itself")
    assert "edited minus clean" not in sentence(result)
    assert sentence(replace(result, about="change")).endswith("only edited values are bisected.")
    assert said == ["right as it is", "right, after another call, too"]


def test_two_wrong_blocks_are_both_named(hf_session) -> None:
    def plant(layers):
        louder(layers[1].mlp.down_proj)
        louder(layers[3].self_attn.o_proj)

    result = investigate(Planted(hf_session, plant), CALL)
    assert result.found is not None
    assert [site.hook for _, site in result.found.wrong] == [
        "blocks.1.mlp.hook_out",
        "blocks.3.attn.hook_out",
    ]
    assert "wrong by itself as well: blocks.3.attn.hook_out (attention)" in sentence(result)


def test_what_lies_between_attention_and_the_mlp_is_one_cause(hf_session) -> None:
    """What attention adds to the stream is changed after it was read: the MLP is given it, and so is the sum."""

    def plant(layers):
        norm = layers[1].post_attention_layernorm

        def spoil(module, args):
            args[0][..., 0].add_(0.5)  # the residual stream's own memory

        norm.register_forward_pre_hook(spoil)

    result = investigate(Planted(hf_session, plant), CALL)
    assert result.found is not None
    assert [site.hook for _, site in result.found.wrong] == ["blocks.1.mlp.hook_in", "blocks.1.hook_out"]
    assert result.found.culprits[0].heals
    assert "so is blocks.1.hook_out, to which the same sum goes on" in sentence(result)


def test_a_decode_row_and_edits_of_the_call(hf_session) -> None:
    edits = (None, {"blocks.1.hook_out": {"op": "scale", "factor": 1.5}}, None)
    plant = lambda layers: late(layers[2].mlp.down_proj, 9)  # noqa: E731
    result = investigate(Planted(hf_session, plant), Call(PROMPTS, 4, edits))
    assert result.kind == COMPUTED
    assert result.site is not None
    assert result.site.hook == "blocks.2.mlp.hook_out"
    narrowed = result.narrowed
    assert narrowed is not None
    assert narrowed.row == RowRef(0, 9)
    assert (narrowed.beside, narrowed.cut) == ((), True)
    assert narrowed.call == (Call((PROMPTS[0],), 3), RowRef(0, 9)), "two tokens fed back make row 9"


def test_an_edit_that_is_applied_wrongly(hf_session) -> None:
    edits = ({"blocks.1.hook_out": {"op": "add", "value": 0.5, "pos": 2}}, None, None)

    parity = Planted(hf_session)
    forward = parity.backend.forward

    def doubled(spec):
        return {h: {**one, "value": 1.0} if one["op"] == "add" else one for h, one in spec.items()}

    def wrong(prompts, *, intervene=None, **kwargs):
        return forward(
            prompts, intervene=[doubled(one or {}) for one in intervene or PROMPTS[:0]] or None, **kwargs
        )

    parity.backend.forward = wrong
    result = investigate(parity, Call(PROMPTS, 1, edits))
    assert result.kind == COMPUTED
    assert result.site is not None
    assert result.site.hook == "blocks.1.hook_out"
    assert result.narrowed is not None
    assert result.narrowed.unedited is False
    assert "right without its edits" in list(needs(result.narrowed))
    assert "or the edit there, is wrong by itself" in sentence(result)


def test_what_is_only_read_wrongly(hf_session) -> None:
    def zeros(_parity, result):
        result.captured["blocks.1.hook_out"].zero_()

    result = investigate(Planted(hf_session, spoil=zeros), CALL)
    assert (result.kind, result.stays) == (READ, True)
    assert "Nothing is computed wrongly" in sentence(result)
    assert "blocks.1.hook_out is read wrongly" in sentence(result)


def test_what_shows_only_after_another_call(hf_session) -> None:
    def spoil(parity, result):
        fresh = result.captured["blocks.2.mlp.hook_out"].clone()
        if parity.before and parity.before[-1].fresh.shape == fresh.shape:
            result.captured["blocks.2.mlp.hook_out"][:] = parity.before[-1].fresh
        result.fresh = fresh

    result = investigate(Planted(hf_session, spoil=spoil), CALL)
    assert result.kind == READ
    assert result.narrowed is not None
    assert result.narrowed.disturbed
    assert "only after another call" in "\n".join(needs(result.narrowed))


def test_the_neighbour_that_it_takes(hf_session) -> None:
    """Wrong only where three requests are run together, one of them of five tokens."""

    def spoil(_parity, result):
        if 5 in result.lengths and 8 in result.lengths:
            result.captured["blocks.2.attn.hook_out"][result.lengths.index(8), 3] += 1

    result = investigate(Planted(hf_session, spoil=spoil), CALL)
    narrowed = result.narrowed
    assert narrowed is not None
    assert (narrowed.row, narrowed.failing, narrowed.beside) == (RowRef(0, 3), (0,), (2,))
    assert narrowed.cut is False, "the prompt of eight tokens is what it takes"
    assert narrowed.call == (Call((PROMPTS[0], PROMPTS[2])), RowRef(0, 3))
    told = list(needs(narrowed))
    assert "needs request 2 beside it in the batch" in told
    assert told[0].startswith("1 request is wrong; looked at: request 0 from position 3")


def test_a_fault_that_moves_when_the_batch_does(hf_session) -> None:
    """As the first row of a second chunk does."""

    def spoil(_parity, result):
        places = {(8, 3, 5): 3, (8,): 6}
        if (place := places.get(tuple(result.lengths))) is not None:
            result.captured["blocks.2.attn.hook_out"][0, place] += 1

    narrowed = investigate(Planted(hf_session, spoil=spoil), CALL).narrowed
    assert narrowed is not None
    assert (narrowed.row, narrowed.beside, narrowed.cut) == (RowRef(0, 3), (), False)
    assert narrowed.call == (Call((PROMPTS[0],)), RowRef(0, 6))
    assert "needs no other request in the batch: alone it is wrong from position 6 on" in list(
        needs(narrowed)
    )


def test_an_engine_that_contradicts_itself(hf_session) -> None:
    parity = Planted(hf_session)

    def refuse(*_args, **_kwargs):
        raise CaptureError("blocks.1.attn.hook_k: replicas differ\nand more")

    parity.backend.forward = refuse
    result = investigate(parity, CALL)
    assert result.kind == REFUSED
    assert sentence(result).endswith("before anything is compared: blocks.1.attn.hook_k: replicas differ")


def test_only_single_rows_are_put_right(hf_session) -> None:
    bench = Bench(Planted(hf_session, FAULTS["query projection"][0]), CALL)
    assert bench.rows == [RowRef(0, 2), RowRef(1, 2), RowRef(2, 2)]
    specs = bench.healing(["blocks.0.hook_out"])
    assert [spec["blocks.0.hook_out"]["pos"] for spec in specs] == [2, 2, 2]
