"""Figures of what cases record beside their comparisons: paired maps and rank layouts."""

from __future__ import annotations

from harness.report.maps import paired_maps
from harness.report.ranks import layout_caption, layout_figure

MAPS = {
    "title": "a <story>",
    "rows": ["block 0", "block 1"],
    "columns": ["The", "<b>"],
    "engine": [[0.0, 1.0], [0.5, -0.25]],
    "reference": [[0.0, 1.0], [0.5, float("nan")]],
}
LAYOUT = {
    "ranks": ["pp0/tp0", "pp1/tp0"],
    "served": {"embed.hook_out": [0], "blocks.1.hook_out": [1]},
    "fires": {"embed.hook_out": [4], "blocks.1.hook_out": [4]},
    "largest_difference": 0.0,
    "largest_at": "",
}


def test_maps_show_every_number_and_escape_every_label():
    figure = str(paired_maps(MAPS))
    assert figure.count("<rect") == 8
    assert "&lt;b&gt;" in figure
    assert "<b>" not in figure
    assert "a &lt;story&gt;" in figure
    assert "-0.25" in figure
    assert "nan" in figure
    assert 'class="past"' in figure


def test_maps_that_do_not_fit_their_labels_are_left_out():
    assert paired_maps({**MAPS, "engine": [[0.0, 1.0]]}) == ""
    assert paired_maps({**MAPS, "columns": ["one"]}) == ""
    assert paired_maps({}) == ""


def test_a_layout_has_one_cell_per_serving_rank():
    figure = str(layout_figure(LAYOUT))
    assert figure.count("<rect") == 2
    assert "pp1/tp0" in figure
    assert "2 hooks on 2 ranks" in figure
    assert "Largest difference between replicas: 0" in layout_caption(LAYOUT)
    many = {f"blocks.{i}.hook_out": [i % 2] for i in range(90)}
    assert str(layout_figure({**LAYOUT, "served": many})).count("<rect") == 90
    assert layout_figure({}) == ""
