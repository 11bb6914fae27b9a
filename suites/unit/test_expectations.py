"""The ledger of known bugs: what it excuses, what it does not, and that it cannot go stale unnoticed."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from harness.cli import INCOMPLETE, main
from harness.errors import UsageError
from harness.expectations import Expectation, Ledger, load
from harness.report import build_report
from harness.report.ledger import known_bug
from harness.store import CaseResult, RunRecords, RunStore, read_run, why_not_green
from suites.unit import mini_suite
from suites.unit.synthetic_run import declaration, result

TODAY = date(2026, 11, 30)
ENTRY = """
[[expect]]
id = "{id}"
case = "{case}"
reason = "the kernel rounds twice"
link = "https://example.org/issues/1"
expires = {expires}
{more}
"""


def ledger(folder: Path, case: str, name: str = "bug-1", expires: str = "2999-01-31", more: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    text = ENTRY.format(id=name, case=case, expires=expires, more=more)
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return folder


def entry(**more) -> Expectation:
    given = {"id": "b", "case": "*", "reason": "r", "link": "https://x", "expires": TODAY}
    return Expectation(**{**given, **more})


def test_only_a_star_is_special_in_patterns() -> None:
    one = entry(case="s/t.py::test_a[*-bf16-*]")
    assert one.matches("s/t.py::test_a[tiny-bf16-eager]")
    assert not one.matches("s/t.py::test_a[tiny-fp32-eager]")
    assert not one.matches("s/txpy::test_a[tiny-bf16-eager]")
    assert not one.matches("x s/t.py::test_a[tiny-bf16-eager]")


def test_another_failure_of_a_listed_case_is_not_excused() -> None:
    def failed(*hooks: str) -> list[dict]:
        return [{"verdict": {"passed": False, "divergence": {"hook": hook}}} for hook in hooks]

    one = entry(began="blocks.*.mlp.hook_out")
    assert one.excuses([*failed("blocks.1.mlp.hook_out"), {"verdict": {"passed": True}}, {"verdict": None}])
    assert not one.excuses(failed("blocks.1.mlp.hook_out", "embed.hook_out"))
    assert not one.excuses([]), "a failure with no verdict began nowhere"
    assert entry().excuses([])
    known = failed("blocks.1.mlp.hook_out")
    assert one.excuses([*known, {"verdict": None, "detail": {"rows": 3, "differing": 0}}])
    for beside in ({"unjudged": ["not reverted: embed.hook_out"]}, {"differing": 2}):
        assert not one.excuses([*known, {"verdict": None, "detail": beside}])


def test_the_day_it_expires_is_its_last(tmp_path: Path) -> None:
    folder = ledger(tmp_path, "*", expires="2026-11-30")
    assert load(folder, date(2026, 11, 30)).of("a") is not None
    late = load(folder, date(2026, 12, 1))
    assert late.of("a") is None
    assert late.entries[0].expired
    assert Ledger().of("a") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[expect]\n", r"a\.toml cannot be read as TOML: .*line 1"),
        ("[[expected]]\n", r"key 'expected': .* a table \[\[expect\]\]"),
        ('expect = "all"\n', r"key 'expect': .* a table \[\[expect\]\]"),
        (
            ENTRY.format(id="a", case="*", expires="2027-01-31", more='until = "x"'),
            r"entry 1: key 'until': there is no",
        ),
        (
            ENTRY.format(id="a", case="*", expires='"2027-01-31"', more=""),
            r"key 'expires': .* is no date; .*2027-01-31",
        ),
        (
            ENTRY.format(id="a", case="*", expires="2027-01-31T00:00:00", more=""),
            r"key 'expires': .* is no date",
        ),
        (ENTRY.format(id=" ", case="*", expires="2027-01-31", more=""), r"key 'id': ' ' is not text"),
        (
            ENTRY.format(id="a", case="*", expires="2027-01-31", more="began = 3"),
            r"key 'began': 3 is not text",
        ),
        (
            ENTRY.replace("https:", "see:").format(id="a", case="*", expires="2027-01-31", more=""),
            r"key 'link': .*https://",
        ),
        (
            ENTRY.replace("reason", "#").format(id="a", case="*", expires="2027-01-31", more=""),
            r"key 'reason': it is missing",
        ),
        (
            2 * ENTRY.format(id="a", case="*", expires="2027-01-31", more=""),
            r"key 'id': 'a' stands in a\.toml too",
        ),
    ],
)
def test_a_malformed_ledger_names_file_key_and_way_out(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=says) as caught:
        load(tmp_path)
    assert str(tmp_path / "a.toml") in str(caught.value)


def test_the_shipped_ledger_can_be_read() -> None:
    load(mini_suite.ROOT / "suites" / "expectations")


def test_the_example_of_the_readme_can_be_read(tmp_path: Path) -> None:
    readme = (mini_suite.ROOT / "suites" / "expectations" / "README.md").read_text(encoding="utf-8")
    (tmp_path / "a.toml").write_text(readme.split("```toml")[1].split("```")[0], encoding="utf-8")
    (one,) = load(tmp_path).entries
    assert one.matches("suites/test_logits.py::test_rebuilt[tiny-granite-bf16-compiled-tp1-step64]")


# --- runs ---------------------------------------------------------------------------------------------------


def test_a_known_bug_is_shown_and_does_not_break_the_run(tmp_path: Path) -> None:
    folder = ledger(tmp_path / "bugs", "*::test_three[*fp32*]")
    done = mini_suite.run(tmp_path, "--expectations", str(folder), env={"RED": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 xfailed" in done.stdout
    assert "1 known-bug" in done.stdout
    assert "parity holds" in done.stdout
    case = next(case for case in read_run(mini_suite.only_run(tmp_path)).cases if case.check == "three")
    assert (case.outcome, case.skip_class) == ("skipped", "known-bug")
    assert case.reason == "the kernel rounds twice (bug-1, https://example.org/issues/1, until 2999-01-31)"
    assert "red was asked for" in case.message
    assert case.expectation == "bug-1 of bug-1.toml"


def test_a_run_of_nothing_but_known_bugs_says_so(tmp_path: Path) -> None:
    folder = ledger(tmp_path / "bugs", "*::test_three[*fp32*]")
    done = mini_suite.run(tmp_path, "--expectations", str(folder), "-k", "three", env={"RED": "1"})
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "not green: the one case that ran is a known bug, so nothing was shown to hold" in done.stdout
    assert "nothing ran" not in done.stdout
    run = mini_suite.only_run(tmp_path)
    assert "<h1>KNOWN BUGS ONLY</h1>" in (run / "index.html").read_text(encoding="utf-8")
    assert main(["report", str(run)]) == INCOMPLETE


@pytest.mark.parametrize(
    ("expectation", "says"),
    [
        ("", ["nothing ran"]),
        ("bug of a.toml", ["all 2 cases that ran are known bugs, so nothing was shown to hold"]),
    ],
)
def test_a_skip_of_that_class_is_a_known_bug_only_if_the_ledger_has_it(
    expectation: str, says: list[str]
) -> None:
    skipped = {"outcome": "skipped", "skip_class": "known-bug", "reason": "r", "expectation": expectation}
    cases = tuple(CaseResult(name, **skipped) for name in "ab")
    assert why_not_green(RunRecords(Path("x"), {}, cases, end={})) == says


# --- what the page says of it -------------------------------------------------------------------------------

BUG = {
    "id": "bug",
    "file": "a.toml",
    "case": "*",
    "reason": "it <b>rounds</b> twice",
    "link": "https://example.org/1",
    "expires": "2999-01-31",
    "began": "blocks.*",
    "expired": False,
}


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (
            "skipped",
            "Known bug bug of a.toml: an excuse until 2999-01-31, for a failure that begins at blocks.*.",
        ),
        ("passed", "until 2999-01-31). It passed: take it off the list."),
        ("failed", "It failed otherwise: the entry is about a failure that begins at blocks.*."),
        ("error", "No verdict was reached, which the ledger never excuses."),
    ],
)
def test_a_listed_case_says_what_the_ledger_has_to_do_with_it(outcome: str, says: str) -> None:
    case = CaseResult("c", outcome=outcome, expectation="bug of a.toml")
    assert known_bug(case, [BUG]).endswith(says)
    assert known_bug(case, []) == "Listed as known bug bug of a.toml."
    assert known_bug(CaseResult("c", outcome=outcome), [BUG]) == ""


def test_the_page_lists_the_ledger_with_what_became_of_each_entry(tmp_path: Path) -> None:
    expired, unmet = {**BUG, "id": "old", "expired": True}, {**BUG, "id": "unmet"}
    cases = [declaration(n) for n in range(3)]
    listed = {"skip_class": "known-bug", "reason": "it rounds", "expectation": "bug of a.toml"}
    with RunStore.create(tmp_path, {"run_id": "r", "started": "2026-11-30T00:00:00+0000"}) as store:
        store.append({"type": "declared", "cases": cases})
        store.append({"type": "expectations", "entries": [BUG, expired, unmet]})
        store.append({**result(cases[0], "skipped"), **listed})
        store.append({**result(cases[1]), "expectation": "bug of a.toml"})
        store.append(result(cases[2]))
        store.append({"type": "end", "exit_status": 1})
    page = build_report(tmp_path).read_text(encoding="utf-8")
    section = page.split('id="known"')[1].split("</section>")[0]
    assert "it &lt;b&gt;rounds&lt;/b&gt; twice" in section
    assert 'href="https://example.org/1"' in section
    assert "<code>blocks.*</code>" in section
    assert "excuses 1 case; 1 case passed: take it off the list" in section
    assert "expired: renew or remove it" in section
    assert "no case of this run is like it" in section
    assert section.count('class="bad"') == 2
    assert section.count("2999-01-31") == 3


def test_the_default_ledger_stands_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "suites").mkdir()
    ledger(tmp_path / "suites" / "expectations", "*::test_three*")
    assert mini_suite.run(tmp_path, env={"RED": "1"}).returncode == 0


def test_a_listed_case_that_passes_is_not_green(tmp_path: Path) -> None:
    done = mini_suite.run(tmp_path, "--expectations", str(ledger(tmp_path / "bugs", "*::test_three*")))
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "passed and is listed as a known bug (bug-1 of bug-1.toml): take it off the list" in done.stdout


def test_an_expired_entry_excuses_nothing_and_is_not_green(tmp_path: Path) -> None:
    folder = ledger(tmp_path / "bugs", "*::test_three*", expires="2020-01-31")
    done = mini_suite.run(tmp_path, "--expectations", str(folder), env={"RED": "1"})
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed" in done.stdout
    assert "known bug bug-1 of bug-1.toml expired on 2020-01-31: renew or remove it" in done.stdout


@pytest.mark.parametrize("name", ["nowhere", "broken"])
def test_a_bad_ledger_ends_the_run_before_anything_starts(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.toml").write_text("[[expect]]\n", encoding="utf-8")
    done = mini_suite.run(tmp_path, "--expectations", name)
    assert done.returncode == 2
    says = "is no folder" if name == "nowhere" else "a.toml, entry 1: key 'id': it is missing"
    assert says in done.stdout + done.stderr
    assert not (tmp_path / "reports").exists()
