"""What the figures of trials have in common."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from harness.trial.drawing import Frame, colour

FRAME = Frame(height=200, left=50)


@pytest.mark.parametrize(("curves", "height"), [(0, 200), (1, 200), (2, 200), (3, 216), (7, 248)])
def test_a_figure_is_as_high_as_its_legend_needs(curves: int, height: int):
    keys = [FRAME.key(number, f"engine {number}") for number in range(curves)]
    figure = FRAME.figure("some", keys, curves)
    assert float(ET.fromstring(figure).attrib["viewBox"].split()[3]) == height
    assert all(float(y) < height for y in re.findall(r'<text [^>]*y="([\d.]+)"', figure))


def test_no_two_entries_of_a_legend_lie_on_each_other():
    places = [re.search(r'<text x="(\d+)" y="(\d+)"', FRAME.key(number, "")) for number in range(8)]
    assert len({place.groups() for place in places if place}) == 8


def test_every_text_is_escaped():
    parts = [FRAME.key(0, "<a>"), FRAME.levels([(1.0, "<b>")]), FRAME.ticks([(1.0, "<c>")], "<d>")]
    texts = [element.text for element in ET.fromstring(FRAME.figure("<e>", parts, 1)).iter() if element.text]
    assert {"<a>", "<b>", "<c>", "<d>", "<e>"} <= set(texts)


def test_parts_of_the_width_span_the_frame():
    assert (FRAME.x(0), FRAME.x(1)) == (FRAME.left, FRAME.right)


def test_colours_begin_again_after_the_last():
    again = next(number for number in range(1, 20) if colour(number) == colour(0))
    assert len({colour(number) for number in range(again)}) == again > 2
