"""The report in a real browser: opened, narrowed, sorted, followed to a row, printed; nothing fetched, no error."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.report import build_report
from harness.report.build import render
from harness.store import CaseResult, RunRecords
from suites.unit.synthetic_run import declaration, make_verdict, result, smoke_run, write_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: Generous: other jobs share the machine, and a page that got slow got much slower than this.
OPENS_WITHIN, NARROWS_WITHIN = 15.0, 3.0  # s
TIMEOUT = 60_000  # ms

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="not-installed: no Chromium on PATH")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--disable-gpu", "--disable-quic", "--no-first-run"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def green(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_report(smoke_run(tmp_path_factory.mktemp("green"), n_cases=100)).as_uri()


@pytest.fixture(scope="module")
def red(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_report(smoke_run(tmp_path_factory.mktemp("red"), broken=True, n_cases=44)).as_uri()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that must not complain, nor ask for anything but itself."""
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    one = context.new_page()
    one.set_default_timeout(TIMEOUT)
    heard: list[str] = []
    one.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
    one.on("pageerror", lambda error: heard.append(f"error: {error}"))
    one.on("dialog", lambda dialog: (heard.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    one.on(
        "request", lambda request: heard.append(request.url) if not request.is_navigation_request() else None
    )
    yield one
    context.close()
    assert not heard


def shown(page: Page) -> list[str]:
    return page.locator("table.cases tbody tr[data-id]").evaluate_all(
        "rows => rows.map(row => row.dataset.id)"
    )


def column(page: Page, number: int) -> list[str]:
    return page.locator(f"table.cases tbody tr[data-id] td:nth-child({number})").all_inner_texts()


def counted(page: Page) -> str:
    return page.locator("form.tools output").inner_text()


def in_view(page: Page, selector: str) -> bool:
    return page.locator(selector).evaluate(
        "e => { const box = e.getBoundingClientRect(); return box.top >= -1 && box.top < innerHeight; }"
    )


def test_it_opens_with_the_verdict_first(page: Page, green: str) -> None:
    page.goto(green)
    assert page.title() == "✓ PARITY HOLDS · 20261129-174455-smoke"
    assert page.get_by_role("heading", level=1).inner_text() == "PARITY HOLDS"
    assert counted(page) == "100 cases"
    for role in ("banner", "main", "contentinfo", "search", "navigation"):
        assert page.get_by_role(role).count() == 1


def test_filters_narrow_the_list_and_stand_in_the_address(page: Page, green: str) -> None:
    page.goto(green)
    page.get_by_label("model").select_option("tiny-llama")
    page.get_by_label("dtype").select_option("fp32")
    assert counted(page) == "24 of 100 cases"
    assert set(column(page, 4)) == {"tiny-llama"}
    assert page.url.endswith("#model=tiny-llama&dtype=fp32")
    page.get_by_label("Search").fill("chunked")
    ids = shown(page)
    assert ids
    assert all("test_chunked" in name for name in ids)
    page.reload()
    assert shown(page) == ids, "the address alone brings the same list back"
    assert page.get_by_label("Search").input_value() == "chunked"
    page.get_by_role("button", name="Show all").click()
    assert counted(page) == "100 cases"
    page.get_by_label("Search").fill("nothing like this")
    assert counted(page) == "no case is like that"


def test_columns_sort_and_say_so(page: Page, green: str) -> None:
    page.goto(green)
    head = page.get_by_role("columnheader", name="of bound").last
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    ratios = [float(text) for text in column(page, 8) if text]
    assert ratios == sorted(ratios, reverse=True)
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert page.url.endswith("#sort=ratio")
    page.get_by_role("columnheader", name="model").get_by_role("button").click()
    assert head.get_attribute("aria-sort") is None
    models = column(page, 4)
    assert models == sorted(models)


def test_from_the_verdict_to_a_row_each_step_is_one_click(page: Page, green: str) -> None:
    page.goto(green)
    page.get_by_role("link", name="Matrix", exact=True).click()
    page.locator("table.matrix a[href^='#case-']").first.click()
    opened = page.locator("tr.opened")
    opened.locator(".panel").wait_for()
    assert in_view(page, "tr.target")
    assert opened.locator("svg.depth").count() == 1
    hook = opened.get_by_role("button", name="blocks.7.mlp.hook_out")
    hook.click()
    assert hook.get_attribute("aria-expanded") == "true"
    strip = opened.locator("tr.rows")
    assert "Worst rows" in strip.inner_text()
    assert re.search(r"\d+:\d+.* of the bound", strip.inner_text())
    assert "blocks.7.mlp.hook_out" in opened.locator(".readout").inner_text()
    hook.click()
    assert strip.count() == 0


def test_a_figure_reads_out_what_is_pointed_at(page: Page, green: str) -> None:
    page.goto(green)
    page.locator("table.cases a").first.click()
    heat = page.locator("tr.opened svg.heat")
    heat.hover(position={"x": 300, "y": 60})
    told = page.locator("tr.opened .readout")
    assert re.match(
        r"blocks\.\d+\.\S+, \d+:\d+( to \d+:\d+)?: [\d.]+ to [\d.]+ of the bound$", told.inner_text()
    )
    heat.focus()
    before = told.inner_text()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert told.inner_text() != before, "arrow keys move as well"
    page.keyboard.press("Enter")
    assert page.locator("tr.opened tr.rows").count() == 1


def test_a_failed_case_shows_every_gate(page: Page, red: str) -> None:
    page.goto(red)
    assert page.get_by_role("heading", level=1).inner_text() == "PARITY BROKEN"
    case = page.locator("details.case.failed").first
    assert "is the first hook over its bound" in case.locator(".first-sentence").inner_text()
    case.get_by_role("button", name="blocks.5.mlp.hook_out").first.click()
    gates = case.locator("tr.rows table.gates").get_by_role("rowheader")
    assert gates.all_inner_texts() == ["aggregate", "worst row", "worst slice"]
    page.get_by_role("link", name="show this case").click()
    assert in_view(page, "details.case.failed >> nth=0")


def test_links_lead_to_a_case_on_load_and_later(page: Page, green: str) -> None:
    page.goto(green)
    first, second = (page.locator("table.cases tbody tr").nth(n).get_attribute("id") for n in (70, 3))
    page.goto("about:blank")
    page.goto(f"{green}#{first}")
    page.locator("tr.opened .panel").first.wait_for()
    assert page.locator("tr.target").get_attribute("id") == first
    assert in_view(page, "tr.target")
    page.evaluate(f"location.hash = '#{second}'")
    page.locator(f"tr.target[id='{second}']").wait_for()
    assert in_view(page, "tr.target")
    page.goto("about:blank")
    page.goto(f"{green}#model=smollm2-135m&case={first}")
    page.locator(f"tr.target[id='{first}']").wait_for()
    page.goto(f"{green}#no-such-case")
    assert page.get_by_role("heading", level=1).is_visible()


def test_a_link_to_a_case_that_is_filtered_out_shows_it(page: Page, green: str) -> None:
    page.goto(f"{green}#model=tiny-llama")
    page.evaluate("location.hash = document.querySelector('.closest a[href*=smollm2]').getAttribute('href')")
    page.locator("tr.target").wait_for()
    assert counted(page).startswith("100 cases, all shown again")


def test_the_command_is_copied(page: Page, green: str) -> None:
    page.goto(green)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("table.cases a").first.click()
    button = page.locator("tr.opened").get_by_role("button", name="Copy")
    button.click()
    page.locator("tr.opened").get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("pytest 'suites/test_activations.py::")


def ground(page: Page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_dark_follows_the_system_or_the_reader_and_is_kept(page: Page, green: str) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto(green)
    assert ground(page) == "rgb(20, 24, 28)"
    page.get_by_role("button", name="Theme: as the system").click()
    assert ground(page) == "rgb(255, 255, 255)"
    page.reload()
    assert ground(page) == "rgb(255, 255, 255)", "the choice is kept"
    page.get_by_role("button", name="Theme: light").click()
    page.emulate_media(color_scheme="light")
    assert ground(page) == "rgb(20, 24, 28)"


def test_it_prints_light_and_whole(page: Page, green: str) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto(green)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.get_by_role("navigation").count() == 0, "hidden on paper"
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    data = page.pdf(format="A4")
    assert data.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b", data)) >= 3


def test_it_works_by_keyboard_alone(page: Page, green: str) -> None:
    page.goto(green)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    link = page.locator("table.cases tbody a").first
    link.focus()
    page.keyboard.press("Enter")
    page.locator("tr.opened .panel").wait_for()
    assert link.get_attribute("aria-expanded") == "true"
    page.keyboard.press("Enter")
    assert page.locator("tr.opened").count() == 0


@pytest.mark.parametrize("width", [390, 760, 1300])
def test_nothing_is_squeezed_away(page: Page, green: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(green)
    assert page.locator("table.cases tbody a").first.evaluate("a => a.parentElement.clientWidth") > 150
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "wide tables scroll by themselves"
    )
    page.set_viewport_size({"width": 700, "height": 1000})  # A4 within its margins
    page.emulate_media(media="print")
    assert page.locator("table.cases tbody a").first.evaluate("a => a.parentElement.clientWidth") > 100


def test_what_breaks_is_told_without_the_script(browser: Browser, red: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(red)
    assert page.get_by_role("heading", level=1).inner_text() == "PARITY BROKEN"
    assert page.locator("details.case.failed table.hooks").first.is_visible()
    assert page.locator("table.cases tbody tr").count() == 44
    assert page.get_by_text("This page's script did not run").is_visible()
    assert not page.get_by_role("search").is_visible()
    context.close()


def test_a_script_that_fails_hides_nothing(browser: Browser, green: str) -> None:
    page = browser.new_page()
    page.add_init_script("Map = undefined")
    page.goto(green)
    assert page.locator("table.cases tbody tr").last.is_visible()
    assert page.get_by_text("This page's script did not run").is_visible()
    page.close()


def test_a_model_named_like_markup_is_a_name(page: Page, tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
    case = declaration(0, model=evil, title=evil, check=evil, id=f"t.py::{evil}", topology=evil)
    verdict = make_verdict(layers=2).to_json()
    for hook in verdict["hooks"]:
        hook["hook"] = f"blocks.0.{evil}{hook['hook']}"
    record = result(case, verdicts=[verdict], reason=evil)
    page.goto(build_report(write_run(tmp_path, [case], [record])).as_uri())
    page.locator("table.cases a").first.click()
    page.locator("tr.opened .panel").wait_for()
    page.locator("tr.opened table.hooks button").first.click()
    page.locator("tr.opened svg.heat").hover(position={"x": 200, "y": 8})
    page.get_by_label("Search").fill("<script>")
    assert counted(page) == "1 case"
    assert evil in page.locator("table.cases").inner_text()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    verdicts = [
        make_verdict(dtype, layers=1, seed=n).to_json() for n in range(4) for dtype in ("bf16", "fp32")
    ]
    cases = []
    for n in range(5000):
        case = declaration(
            n, model=f"model-{n % 21}", dtype=("bf16", "fp32")[n % 2], mode=("eager", "compiled")[n % 3 % 2]
        )
        outcome = "failed" if n % 1000 == 999 else "passed"
        found = ({"label": "activations", "verdict": verdicts[n % 8], "detail": None},)
        cases.append(
            CaseResult(**case, outcome=outcome, seconds=n / 100, verdicts=found, rerun=f"pytest {n}")
        )
    folder = tmp_path_factory.mktemp("large")
    path = folder / "index.html"
    path.write_text(render(RunRecords(folder, {"run_id": "large", "k": 3.0}, tuple(cases))))
    return path


def test_five_thousand_cases_stay_usable(page: Page, large: Path) -> None:
    assert large.stat().st_size <= 15_000_000
    started = time.monotonic()
    page.goto(large.as_uri())
    assert counted(page) == "5,000 cases"
    opened = time.monotonic() - started
    assert len(shown(page)) == 200
    started = time.monotonic()
    page.get_by_label("model").select_option("model-7")
    assert counted(page) == "238 of 5,000 cases"
    narrowed = time.monotonic() - started
    started = time.monotonic()
    page.get_by_role("columnheader", name="time").get_by_role("button").click()
    assert column(page, 9)[0] == "50 s"
    in_order = time.monotonic() - started
    page.get_by_role("button", name="Show 38 more of 38").click()
    assert len(shown(page)) == 238
    page.goto("about:blank")
    started = time.monotonic()
    page.goto(f"{large.as_uri()}#case-suites-test_activations.py-test_every_hook-model-0-bf16-eager-4998")
    page.locator("tr.opened .panel").wait_for()
    found = time.monotonic() - started
    assert in_view(page, "tr.target")
    print(
        f"{large.stat().st_size:,} bytes; opened in {opened:.2f} s, narrowed in {narrowed:.2f} s, sorted in "
        f"{in_order:.2f} s, a case found in {found:.2f} s"
    )
    assert max(opened, found) < OPENS_WITHIN
    assert max(narrowed, in_order) < NARROWS_WITHIN
