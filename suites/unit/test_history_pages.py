"""The pages about several runs: self-contained, escaped, and every sign leads where it says."""

from __future__ import annotations

import math
import re
import shutil
from urllib.parse import unquote

import pytest

from harness.cli import BROKEN, OK, main
from harness.report import build_report
from harness.report.sparklines import shares_figure, sparkline
from suites.unit.synthetic_run import Page, declaration
from suites.unit.synthetic_runs import change_run, rewrite, run, verdict_json

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def pages(tmp_path):
    """The comparison and the history of two runs full of markup, with their reports."""
    case = declaration(0, model=EVIL, title=f"title {EVIL} \u202e", check=f"check {EVIL}", suite=EVIL)
    before = run(tmp_path / "reports" / "a b#?%", cases=[case], outcomes=["passed"], name=EVIL)
    after = run(
        tmp_path / "reports" / "b",
        cases=[case],
        outcomes=["failed"],
        message=EVIL,
        started="2026-11-30T01:00:00+0000",
        versions={"torch": EVIL},
        verdict=lambda _: verdict_json(scale=9, hook=""),
    )
    rewrite(after, lambda one: {**one, "profile": EVIL} if one["type"] == "run" else one)
    rewrite(after, lambda one: {**one, "rerun": EVIL} if one["type"] == "case" else one)
    (tmp_path / "reports" / f"x{EVIL.replace('/', '')}").mkdir()
    build_report(before)
    build_report(after)
    comparison, history = tmp_path / "compare.html", tmp_path / "history.html"
    assert main(["compare", str(before), str(after), "--html", str(comparison)]) == BROKEN
    assert main(["history", str(tmp_path / "reports"), "--html", str(history)]) == OK
    return [Page(comparison), Page(history)]


def test_text_for_a_terminal_holds_nothing_that_moves_the_cursor(tmp_path, capsys):
    folder = run(tmp_path / "a", outcomes=["passed"], cases=[declaration(0, check="red \x1b[31m")])
    bad = run(
        tmp_path / "b",
        outcomes=["failed"],
        message="\x1b[2Jgone",
        cases=[declaration(0, check="red \x1b[31m")],
    )
    assert main(["compare", str(folder), str(bad)]) == BROKEN
    assert main(["history", str(tmp_path)]) == OK
    assert "\x1b" not in capsys.readouterr().out


def test_everything_shown_is_escaped(pages):
    for page in pages:
        assert not page.all("script")
        assert EVIL in page.text
        assert "\u202e" not in page.source


def test_nothing_is_loaded(pages):
    for page in pages:
        assert not {tag for tag, _ in page.tags} & {"img", "script", "iframe", "object", "embed", "form"}
        assert not re.search(r"url\(|@import|https?://", page.source)
        (policy,) = [one["content"] for one in page.all("meta") if one.get("http-equiv")]
        assert "default-src 'none'" in policy


def test_links_lead_to_reports_and_to_places_in_the_page(pages, tmp_path):
    for page in pages:
        ids = {attributes["id"] for _, attributes in page.tags if attributes.get("id")}
        links = [one["href"] for one in page.all("a")]
        assert any("index.html#case-" in href for href in links)
        for href in links:
            path, _, anchor = href.partition("#")
            if not path:
                assert anchor in ids
                continue
            report = tmp_path / unquote(path)
            assert report.is_file()
            assert not anchor or f'id="{unquote(anchor)}"' in report.read_text()


def test_runs_without_a_report_are_named_and_not_linked(tmp_path):
    run(tmp_path / "a")
    assert main(["history", str(tmp_path), "--html", str(tmp_path / "page.html")]) == OK
    page = Page(tmp_path / "page.html")
    assert all(one["href"].startswith("#") for one in page.all("a"))
    assert "All checks good" in page.words


def test_the_comparison_says_what_and_how_much(pages):
    words = pages[0].words
    assert words.count("2 regressions") >= 1
    assert "1 verdict worse; errors grew in 1 comparison" in words
    assert "2.13.0+cpu" in words


def test_the_history_says_since_when(pages):
    words = pages[1].words
    assert "1 check not good" in words
    assert "Not read" in words


def test_a_check_left_broken_by_an_older_run_is_not_forgotten(tmp_path):
    run(tmp_path / "a", cases=[declaration(0, check="old")], outcomes=["failed"])
    run(tmp_path / "b", outcomes=["passed"], started="2026-12-01T00:00:00+0000")
    assert main(["history", str(tmp_path), "--html", str(tmp_path / "page.html")]) == OK
    words = Page(tmp_path / "page.html").words
    assert "Newest run good, others left open" in words
    assert "1 check was not good where last seen" in words


def test_cases_that_went_wrong_alike_are_told_once(tmp_path):
    before = run(tmp_path / "a", outcomes=["passed"] * 3)
    after = run(tmp_path / "b", outcomes=["error"] * 3, message="EngineError: no memory")
    assert main(["compare", str(before), str(after), "--html", str(tmp_path / "page.html")]) == BROKEN
    words = Page(tmp_path / "page.html").words
    assert words.count("EngineError: no memory") == 1
    assert "the same in 2 more cases" in words


def test_sixty_nights_are_one_page_that_opens(tmp_path):
    cases = [declaration(n, model=f"model-{n % 4}", check=f"check_{n // 4}") for n in range(80)]
    first = run(tmp_path / "00", cases=cases, outcomes=["passed"] * 80, verdict=lambda _: verdict_json())
    for night in range(1, 60):
        folder = tmp_path / f"{night:02}"
        shutil.copytree(first, folder)
        change_run(
            folder,
            versions={},
            run_id=folder.name,
            started=f"2027-{1 + night // 28:02}-{1 + night % 28:02}T02:00:00",
        )
    assert main(["history", str(tmp_path), "--html", str(tmp_path / "page.html")]) == OK
    assert (tmp_path / "page.html").stat().st_size < 1_000_000


# --- figures


def test_a_sparkline_leaves_gaps_and_ends_in_a_dot():
    figure = str(sparkline([0.2, math.nan, 0.4, 0.6], "share", limit=1.0))
    assert figure.count("M") == 3  # the limit, and two pieces
    assert figure.count("<circle") == 2  # the lone first value and the newest
    assert 'aria-label="share"' in figure


def test_nothing_to_draw_draws_nothing():
    assert sparkline([], "x") == sparkline([math.nan], "x") == sparkline([3.0], "seconds") == ""
    assert shares_figure([], lambda share: share) == ""


def test_an_infinite_value_is_on_top():
    assert 'cy="3.0"' in sparkline([0.5, math.inf], "share", limit=1.0)


def test_labels_are_escaped():
    assert "<b>" not in sparkline([1.0, 2.0], '<b>"')


def test_grown_hooks_are_marks_on_top():
    figure = str(
        shares_figure([(0.2, 0.2, False), (0.2, 5.0, True), (0.1, math.inf, True)], lambda s: s + 0.2)
    )
    assert figure.count('class="grown"') == 2
    assert "3 hooks" in figure
    assert "2 grew" in figure


def test_pages_beside_a_report_give_no_secret_away(tmp_path):
    """A token in what a run recorded is blanked in what compare and history write, as in the report itself."""
    secret = "hf_" + "A1b2C3d4" * 4
    case = declaration(0, model=f"model {secret}")
    before, after = (
        run(
            tmp_path / "reports" / name,
            cases=[case],
            outcomes=[outcome],
            message=f"token {secret}",
            name=name,
        )
        for name, outcome in (("a", "passed"), ("b", "failed"))
    )
    comparison, history = tmp_path / "compare.html", tmp_path / "history.html"
    assert main(["compare", str(before), str(after), "--html", str(comparison)]) == BROKEN
    assert main(["history", str(tmp_path / "reports"), "--html", str(history)]) == OK
    for page in (comparison, history):
        text = page.read_text(encoding="utf-8")
        assert secret not in text
        assert "model " in text
