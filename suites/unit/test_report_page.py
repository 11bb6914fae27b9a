"""The report as a file: self-contained, safe, small and usable; and the parts it is drawn from."""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import re
import shlex
from pathlib import Path

import pytest

import harness.report
from harness.errors import HarnessError
from harness.report import build_report
from harness.report.depth import depth_figure
from harness.report.heat import ALPHABET, ONE, cell, heat_map
from harness.report.numbers import duration, ratio, sci
from harness.store import hook_rows
from suites.unit.synthetic_run import Page, declaration, make_verdict, report, result, smoke_page, write_run

SMOKE_BUDGET = 2_000_000  # bytes; a browser opens it at once, and so does a mail client
HOSTILE = (
    "</script><script>alert('x')</script>\"><img src=x onerror=alert(1)>&amp;\x00\x1b[31m\u202eevil\ud800"
)


@pytest.fixture
def green() -> Page:
    return smoke_page(broken=False)


@pytest.fixture
def red() -> Page:
    return smoke_page(broken=True)


def test_it_is_small_at_the_size_of_a_smoke_run(green: Page) -> None:
    assert len(green.source.encode()) <= SMOKE_BUDGET


def test_it_loads_nothing(green: Page) -> None:
    names = {name for name, _ in green.tags}
    assert not names & {"img", "iframe", "object", "embed", "video", "audio", "base"}
    assert [a["href"] for a in green.all("link")] == ["data:,"]
    assert not names & {"image", "use"}
    assert all("action" not in a for a in green.all("form"))
    assert all("src" not in attributes for _, attributes in green.tags)
    assert not re.search(r"@import|url\(", green.source)
    policy = next(a["content"] for a in green.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    scripts = re.findall(r"<script>(.*?)</script>", green.source, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert len(digests) == 2
    assert f"script-src {' '.join(repr(f'sha256-{digest}') for digest in digests)};" in policy


@pytest.mark.parametrize("name", ["green", "red"])
def test_every_link_and_label_leads_somewhere(name: str, request: pytest.FixtureRequest) -> None:
    page: Page = request.getfixturevalue(name)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    inside = {str(a["href"])[1:] for a in page.all("a") if str(a.get("href")).startswith("#")}
    labels = {
        str(attributes["aria-labelledby"]) for _, attributes in page.tags if "aria-labelledby" in attributes
    }
    assert {link for link in inside if "=" not in link} | labels <= set(ids)
    assert sum(str(i).startswith("case-") for i in ids) == {"green": 100, "red": 44}[name], (
        "every case can be linked to"
    )


def test_it_is_usable_by_keyboard_and_by_ear(red: Page) -> None:
    assert red.all("html") == [{"lang": "en"}]
    levels = [int(name[1]) for name, _ in red.tags if re.fullmatch(r"h[1-6]", name)]
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), "no level is skipped"
    scrolling = [a for a in red.all("div") if str(a.get("class", "")).startswith("scroll")]
    assert all(
        a.get("tabindex") == "0" and (a.get("aria-label") or a.get("aria-labelledby")) for a in scrolling
    )
    assert all(a.get("role") == "img" and a.get("aria-label") for a in red.all("svg"))


def test_text_is_text_whatever_it_says(tmp_path: Path) -> None:
    case = declaration(
        0,
        model=HOSTILE,
        title=HOSTILE,
        check=HOSTILE,
        id=HOSTILE,
        engine=HOSTILE,
        dtype=HOSTILE,
        topology=HOSTILE,
    )
    skipped = declaration(1, title=HOSTILE)
    verdict = make_verdict(layers=2, broken_from="blocks.1.hook_out").to_json()
    verdict["notes"] = [HOSTILE]
    verdict["divergence"] = {"hook": HOSTILE, "sentence": HOSTILE}
    for hook in verdict["hooks"]:
        hook["hook"] += HOSTILE
        hook["gates"][0]["name"] = HOSTILE
    record = result(case, "failed", [verdict], message=HOSTILE, reason=HOSTILE)
    record["rerun"] = record["verdicts"][0]["label"] = HOSTILE
    record["verdicts"][0]["detail"] = {HOSTILE: HOSTILE, "list": [HOSTILE]}
    skip = result(
        skipped,
        "skipped",
        skip_class="known-bug",
        reason=f"https://example.org/{HOSTILE} javascript:alert(1)",
    )
    page = report(tmp_path, [case, skipped], [record, skip])
    assert all(a in ({}, {"type": "text/plain", "class": "pack"}) for a in page.all("script"))
    assert len([a for a in page.all("script") if not a]) == 2
    assert not page.all("img")
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert all(str(a["href"]).startswith(("#", "https://example.org/")) for a in page.all("a"))
    assert "<script>alert('x')</script>" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\ud800]", page.source)


def test_a_failed_case_that_kept_its_call_names_the_commands_for_it(tmp_path: Path) -> None:
    kept = {"label": "x", "call": "artifacts/a/0.json", "tensors": "artifacts/a/0.safetensors"}
    cases = [declaration(n, id=f"suites/t.py::test_{n}[<b>'a']") for n in range(4)]
    failing = make_verdict(layers=2, broken_from="blocks.1.hook_out").to_json()
    records = [
        {**result(cases[0], "failed", [failing]), "artifacts": [kept]},
        {
            **result(cases[1], "failed", [failing]),
            "artifacts": [{"label": "x", "error": "not written: full"}],
        },
        result(cases[2], "failed", [failing]),
        {**result(cases[3]), "artifacts": [kept]},
    ]
    text = report(tmp_path, cases, records).text
    quoted = shlex.quote(cases[0]["id"])
    for verb in ("repro", "bisect"):
        assert text.count(f"vllm-parity {verb} ") == 1
        (named,) = re.findall(rf"vllm-parity {verb} (.+) --run (\S+?)Copy", text)
        assert named == (quoted, f"reports/{tmp_path.name}")
    assert text.count("load_file('reports/") == 1
    assert "“x” left none: not written: full" in text
    assert text.count("No tensors were kept") == 1


def test_cases_whose_names_fold_together_keep_their_own_links(tmp_path: Path) -> None:
    cases = [declaration(0, id="t[a/b]"), declaration(1, id="t[a:b]"), declaration(2, id="///")]
    page = report(tmp_path, cases, [result(case) for case in cases])
    ids = {str(a["id"]) for a in page.all("tr") if str(a.get("id", "")).startswith("case-")}
    assert ids == {"case-t-a-b", "case-t-a-b-2", "case-x"}


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    cases = [declaration(0)]
    folder = write_run(tmp_path, cases, [result(cases[0], verdicts=[make_verdict(layers=3)])])
    first = build_report(folder).read_bytes()
    assert build_report(folder).read_bytes() == first
    assert sorted(path.name for path in folder.iterdir()) == ["index.html", "results.jsonl"]


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [], [])
    (folder / "index.html").mkdir()
    with pytest.raises(HarnessError, match=r"cannot write .*index\.html"):
        build_report(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["index.html", "results.jsonl"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_from_their_ground(green: Page, scheme: str) -> None:
    found = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{3,6}), (#[0-9a-f]{3,6})\)", green.source)
    colours = {name: {"light": light, "dark": dark}[scheme] for name, light, dark in found}

    def luminance(name: str) -> float:
        text = colours[name][1:]
        text = "".join(c * 2 for c in text) if len(text) == 3 else text
        parts = [int(text[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    pairs = [(ink, "paper") for ink in ("ink", "dim", "link", "good", "bad", "warn")]
    pairs += [("good", "good-bg"), ("bad", "bad-bg"), ("warn", "warn-bg"), ("dim", "bad-bg"), ("ink", "soft")]
    for ink, ground in pairs:
        light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{ink} on {ground}"


def test_figures_take_the_odd_cases() -> None:
    assert depth_figure([]) == ""
    assert heat_map([], 40, 40) == ""
    verdict = make_verdict(layers=1, lengths=(1,)).to_json()
    for gate in verdict["hooks"][0]["gates"]:
        gate.update(err_engine=0.0, err_reference=0.0, bound=0.0)
    rows = hook_rows(verdict)
    assert "NaN" not in depth_figure(rows)
    assert "nan" not in depth_figure(rows[:1])
    assert "data-cells=" in heat_map(rows, 40, 40)


def test_pooling_a_heat_map_keeps_the_outlier() -> None:
    verdict = make_verdict(layers=30, lengths=(200,)).to_json()
    calm = heat_map(hook_rows(verdict), 40, 40)
    errors = [list(row) for row in verdict["hooks"][50]["row_errors"]]
    errors[0][137] = 1e3
    verdict["hooks"][50]["row_errors"] = errors
    assert heat_map(hook_rows(verdict), 40, 40) != calm


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "."), (math.nan, "~"), (0.0, "0"), (1e-9, "0"), (1.0, "U"), (1.001, "V"), (0.5, "R"), (9e9, "z")],
)
def test_a_cell_over_the_bound_never_looks_as_if_on_it(value: float | None, expected: str) -> None:
    assert cell(value) == expected
    assert ALPHABET.index("U") == ONE
    assert cell(math.inf) == "z"


def test_script_and_page_mean_the_same_by_a_cell() -> None:
    script = (Path(harness.report.__file__).parent / "templates" / "heat.js").read_text()
    assert f'const ALPHABET = "{ALPHABET}";' in script
    assert f"const ONE = {ONE};" in script


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.214e-7, "1.21e-7"), (0.0, "0"), (math.nan, "NaN"), (math.inf, "∞"), (1.0, "1.00e0")],
)
def test_errors_have_three_digits(value: float, expected: str) -> None:
    assert sci(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.617, "0.62"),
        (0.001, "<0.01"),
        (0.99961, "0.9996"),
        (1.0, "1.00"),
        (1.003, "1.0030"),
        (12.34, "12.3"),
        (2e6, "2.00e6"),
        (math.nan, "NaN"),
    ],
)
def test_ratios_have_more_digits_where_they_decide(value: float, expected: str) -> None:
    assert ratio(value) == expected


def test_durations() -> None:
    assert [duration(s) for s in (0.42, 38.4, 372, math.nan)] == ["0.42 s", "38 s", "6 min 12 s", ""]


def test_a_row_within_its_own_bound_is_not_shown_as_over_it() -> None:
    """Only the worst row's bound is on record; another row may err more and yet be within its own."""
    verdict = make_verdict(layers=2, lengths=(40,)).to_json()
    for hook in verdict["hooks"]:
        hook["row_errors"] = [[hook["gates"][1]["bound"] * (0.99 if i != 7 else 2.0) for i in range(40)]]
    calm = [{**hook, "row_errors": [[hook["gates"][1]["bound"] * 0.99] * 40]} for hook in verdict["hooks"]]
    assert heat_map(hook_rows(verdict), 40, 40) == heat_map(hook_rows({"hooks": calm}), 40, 40)
    assert 'data-out=""' in heat_map(hook_rows(verdict), 40, 40)


def test_the_row_that_failed_is_outlined_where_it_lies() -> None:
    verdict = make_verdict(layers=2, lengths=(10, 10), broken_from="blocks.1.hook_out").to_json()
    picture = heat_map(hook_rows(verdict), 40, 40)
    assert 'data-starts="0 10"' in picture
    assert 'data-out="15,6 15,7"' in picture, "request 1 position 5; hooks 6 and 7 of 8"


def test_parameters_tell_cases_of_one_title_apart(tmp_path: Path) -> None:
    engine = "tiny-bf16-eager-tp1-step64"
    cases = [declaration(n, id=f"t.py::test_x[{engine}-{n}]", engine=engine) for n in (-1, 200)]
    page = report(tmp_path, cases, [result(case) for case in cases])
    assert "[-1]" in page.words
    assert "[200]" in page.words


def test_every_figure_says_what_it_is(red: Page) -> None:
    heads = re.findall(r'<th scope="col"([^>]*)>([^<]+)', red.source + "".join(red.bodies))
    for name in ("err(E)", "err(R)", "floor", "bound", "of bound", "k needed", "worst row", "ulps"):
        told = {attributes for attributes, text in heads if text == name}
        assert told, name
        assert all("title=" in attributes for attributes in told), name
