"""Hook names one by one: each part of what a name is read as, and what a wrong one is told."""

from __future__ import annotations

import pytest

from harness.errors import UsageError
from harness.points import (
    TEMPLATES,
    HookPoint,
    all_points,
    check_capture,
    every_point,
    matching,
    nonfireable_points,
    select,
)

EMBED, LAST, BLOCK = "embed.hook_out", "ln_final.hook_normalized", "blocks.12.hook_out"
NOT_FIRED = {"unembed.hook_out": "logits are rebuilt"}


def refused(read, *given) -> str:
    with pytest.raises(UsageError) as caught:
        read(*given)
    return str(caught.value)


def test_a_name_is_read_into_its_place():
    assert HookPoint.parse(EMBED) == HookPoint(0, 0, 0, EMBED)
    assert HookPoint.parse(LAST) == HookPoint(2, 0, 0, LAST)
    point = HookPoint.parse(BLOCK)
    assert (point.stage, point.block, point.name) == (1, 12, BLOCK)
    assert HookPoint.parse("blocks.3.hook_in") == HookPoint(1, 3, 0, "blocks.3.hook_in")
    assert [HookPoint.parse(name).depth(20) for name in (EMBED, BLOCK, LAST)] == [0, 13, 20]
    assert [HookPoint.parse(name).template for name in (EMBED, BLOCK)] == [EMBED, "blocks.{i}.hook_out"]


@pytest.mark.parametrize(
    "name", ["", "logits", "blocks.0.hook_outt", "blocks.x.hook_out", "blocks.0.hook_out.", "0"]
)
def test_what_is_no_name_is_told_the_templates(name):
    told = refused(HookPoint.parse, name)
    assert told == f"{name!r} is no fireable hook point; the templates are {', '.join(TEMPLATES)}"


def test_points_of_some_templates_come_in_forward_order():
    assert all_points(0) == [EMBED, LAST]
    assert every_point(2, ["blocks.{i}.hook_in", "blocks.{i}.hook_out"]) == [
        "blocks.0.hook_in",
        "blocks.0.hook_out",
        "blocks.1.hook_in",
        "blocks.1.hook_out",
    ]
    assert every_point(1, [EMBED]) == [EMBED]
    assert len(every_point(1)) == len(TEMPLATES)


def test_points_that_cannot_fire_are_listed_per_block():
    templates = {"unembed.hook_out": "logits", "blocks.{i}.hook_x": "not built"}
    assert nonfireable_points(2, templates) == {
        "unembed.hook_out": "logits",
        "blocks.0.hook_x": "not built",
        "blocks.1.hook_x": "not built",
    }


def test_a_star_stays_between_dots():
    names = all_points(2)
    assert matching("blocks.1.*.hook_out", names) == ["blocks.1.attn.hook_out", "blocks.1.mlp.hook_out"]
    assert matching("*", names) == matching("blocks.1", names) == []
    assert select(["ln*.*", "embed.*", "embed.hook_out"], names) == [EMBED, LAST]
    assert (
        refused(select, ["embed.*", "x.*"], names)
        == "hook pattern 'x.*' matches none of the 8 points of this model"
    )


def test_captures_come_once_and_in_forward_order():
    assert check_capture((LAST, EMBED, LAST), [EMBED, BLOCK, LAST], {}) == [EMBED, LAST]
    assert check_capture([], [EMBED], {}) == []


def test_wrong_captures_are_told_what_is_wrong():
    def told(requested, *served):
        return refused(check_capture, requested, served, NOT_FIRED)

    whole = "capture must be a sequence of hook names, not the string"
    assert told(EMBED, EMBED) == f"{whole} {EMBED!r}; write [{EMBED!r}]"
    assert told(7, EMBED) == f"{whole} 7; write [7]"
    assert told([EMBED, 7], EMBED) == "capture holds 7 (int); hook names are strings"
    assert told([EMBED, *NOT_FIRED], EMBED) == (
        "hook 'unembed.hook_out' is known but cannot fire on this backend: logits are rebuilt"
    )
    assert told(["blocks.12.hook_oot"], EMBED, BLOCK) == (
        f"unknown hook 'blocks.12.hook_oot': this model serves 2 points; did you mean {BLOCK!r}?"
    )
    assert told(["zzz"], BLOCK).startswith("unknown hook 'zzz': this model serves 1 points; did you mean ")
    assert refused(check_capture, ["zzz"], [], {}) == "unknown hook 'zzz': this model serves 0 points"
