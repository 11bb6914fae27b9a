"""A run on several pytest-xdist workers: each appends to the one record itself, the controller starts and ends it.

With ``--dist loadgroup`` a case lands on the worker that owns its engine. Which engine that is stands in the case's id:
xdist's own way, a suffix written into private state of pytest's items, is lost on pytest 9.2.

Workers write each line to the run's one ``results.jsonl`` under a lock, and to disk before the next case, so that a
worker, or all of them, can be killed like a run in one process. Nothing has to be sent or merged.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.plan import Plan
from harness.resume import Resumed
from harness.store.writer import RESULTS

if TYPE_CHECKING:
    from harness.session import ParitySession

__all__ = ["Controller", "Orders", "engine_of", "is_controller", "orders_of", "share_cores"]

_KEY = "vllm_parity"
#: An engine's id inside a case's, see :attr:`harness.backend.BootConfig.id`.
_ENGINE = re.compile(
    r"[^\[\]]*-(?:fp|bf)\d+-(?:compiled|eager)-(?:tp\d+)?(?:pp\d+)?-step\d+(?:-\w+=[^-\]]*)*"
)


def is_controller(config: pytest.Config) -> bool:
    """Whether this process hands cases to workers and runs none itself."""
    option = config.option
    distributes = getattr(option, "dist", "no") != "no" and bool(getattr(option, "tx", None))
    return distributes and not hasattr(config, "workerinput")


def engine_of(case: str) -> str | None:
    """The engine's id in a case's, with whatever other parameters stand before it; None for a test without one."""
    found = _ENGINE.search(case, case.find("[") + 1) if "[" in case else None
    return found[0] if found else None


class Orders:
    """What the controller tells a worker, in words that execnet can carry."""

    def __init__(self, folder: Path, resumed: Resumed | None) -> None:
        self.folder = folder
        self.resumed = resumed

    def to_worker(self) -> dict[str, Any]:
        """Plain lists and strings."""
        if self.resumed is None:
            return {"folder": str(self.folder), "resumed": None}
        plan = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.resumed.plan).items()}
        ids = {name: sorted(getattr(self.resumed, name)) for name in ("declared", "finished")}
        return {"folder": str(self.folder), "resumed": {"plan": plan, **ids}}


def orders_of(config: pytest.Config) -> Orders | None:
    """What this worker has been told; None in a process that is no worker."""
    told = getattr(config, "workerinput", {}).get(_KEY)
    if told is None:
        return None
    folder, resumed = Path(told["folder"]), None
    if told["resumed"] is not None:
        left = told["resumed"]
        plan: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in left["plan"].items()}
        resumed = Resumed(folder, Plan(**plan), frozenset(left["declared"]), frozenset(left["finished"]))
    return Orders(folder, resumed)


def share_cores(workers: int) -> None:
    """Have this worker's engines and reference compute on its share of the cores, unless the caller has said.

    On CPU vLLM binds its threads to cores, and engines of two workers would be bound to the same ones.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


class Controller:
    """A plugin of the controlling process; it starts no engine and judges nothing.

    Args:
        run: the run as this process sees it; its folder is there.
        resumed: the run that is gone on with, if one is.
        publish: called with ``run`` once everything is written, so that the summary shows it.
    """

    def __init__(self, run: ParitySession, resumed: Resumed | None, publish: Any) -> None:
        self._run = run
        self._orders = Orders(run.folder.resolve(), resumed)
        self._publish = publish
        self._joined = False  #: the records, beside the workers
        if resumed is not None:
            run.open_store([], how="resume")
            run.close()  # the folder is the workers' from here on

    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker where the records are, and what of a resumed run is left: the same for all of them."""
        node.workerinput[_KEY] = self._orders.to_worker()

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Keep the cases of an engine together, where xdist is asked to keep groups so."""
        if config.option.dist != "loadgroup":
            return None
        from xdist.scheduler import LoadGroupScheduling

        class ByEngine(LoadGroupScheduling):  # type: ignore[misc]
            def _split_scope(self, nodeid: str) -> str:
                return engine_of(nodeid) or super()._split_scope(nodeid)

            def remove_node(self, node: Any) -> str | None:
                """Give a dead worker's cases to others, but for the one that it died of: it would kill them, too."""
                work = self.assigned_work[node]
                fatal = next(
                    (name for unit in work.values() for name, done in unit.items() if not done), None
                )
                for scope, unit in list(work.items()):
                    if fatal in unit:
                        unit[fatal] = True
                    if all(unit.values()):  # a worker that is handed nothing waits for ever
                        del work[scope]
                super().remove_node(node)
                return fatal

        return ByEngine(config, log)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Record what a worker died of, and say it where pytest lists failures; the worker itself no longer can."""
        report.longrepr = message = (
            f"{report.longrepr}: it was killed, ran out of memory or broke. The case is not given to another worker; "
            f"run it alone to see why"
        )
        if engine_of(crashitem) is not None and (self._run.folder / RESULTS).is_file():
            self._join()
            self._run.write({"type": "case", "id": crashitem, "outcome": "error", "message": message})

    def _join(self) -> None:
        if not self._joined:
            self._run.open_store([], how="join")
            self._joined = True

    @pytest.hookimpl(trylast=True)  # after the workers have been ended
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the one end and the one report."""
        from harness.summary import finish

        run = self._run
        if not (run.folder / RESULTS).is_file():
            with contextlib.suppress(OSError):
                run.folder.rmdir()  # no case with an engine was among them
            return
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            exitstatus = session.exitstatus = pytest.ExitCode.OK
        self._join()
        problems = finish(run, int(exitstatus))
        if problems and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._publish(run)
