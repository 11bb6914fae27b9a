"""One parity run: its engines, its references, its records. The pytest plugin only calls into here."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.artifacts import save
from harness.backend import load_backend
from harness.errors import EngineError
from harness.pool import Engine, EnginePool
from harness.progress import BootProgress
from harness.provenance import collect, redact_argv
from harness.store import RunStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from harness.artifacts import Evidence
    from harness.backend import BootConfig
    from harness.models import ModelSource
    from harness.parity.types import CaseVerdict
    from harness.plan import Plan
    from harness.reference.experts import Choice
    from harness.reference.references import References

__all__ = ["CaseLog", "ParitySession"]

#: The truth and the same-dtype reference of one model and dtype.
_LOADED_REFERENCES = 2


@dataclasses.dataclass
class CaseLog:
    """What the running case has found so far."""

    id: str
    started: float
    verdicts: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    artifacts: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class ParitySession:
    """Owns what is expensive, hands it out by key, writes what is found.

    Args:
        plan: what the run covers.
        folder: the run's own folder; its records and engine logs go there.
        uncaptured: a context in which the terminal can be written to.
        boot_timeout, step_timeout: seconds until an engine counts as hung.
        reference_cache: folder in which the reference's results outlive the run; None: nowhere.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        argv: Sequence[str],
        uncaptured: Any = contextlib.nullcontext,
        boot_timeout: float = 600.0,
        step_timeout: float = 300.0,
        k: float = 3.0,
        reference_cache: Path | None = None,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.k = k
        self.reference_cache = reference_cache
        self.argv = list(argv)
        self.progress = BootProgress(uncaptured)
        self.pool = EnginePool(
            folder / "engines", boot_timeout=boot_timeout, step_timeout=step_timeout, listener=self
        )
        self.store: RunStore | None = None
        self.case: CaseLog | None = None
        self._paths: dict[str, str] = {}
        self._references: References | None = None
        self._noise: dict[tuple[str, str, tuple[str, ...]], dict[str, float]] = {}
        self._norms: dict[str, torch.Tensor] = {}
        #: Engine, sequence and its edits → where its tokens went to other experts than the truth prefers.
        self.routes: dict[tuple[Any, ...], tuple[Choice, ...]] = {}

    # -- models and engines -----------------------------------------------------------------------------------------

    def preflight(self, configs: Iterable[BootConfig]) -> None:
        """Refuse, before anything slow, what cannot work; fetch every model that is needed.

        Raises:
            UsageError: with the first thing that is wrong.
        """
        configs = list(configs)
        sources = {config.model: self.source(config.model) for config in configs}
        for model, source in sources.items():
            self._paths[model] = str(source.fetch())
        for config in configs:
            check = getattr(load_backend(config.backend), "check", None)
            if check is not None:
                check(self.located(config))

    def source(self, model: str) -> ModelSource:
        """Where a model comes from."""
        from harness.models import resolve

        return resolve(model)

    def located(self, config: BootConfig) -> BootConfig:
        """``config`` with the folder of its checkpoint filled in."""
        if config.path:
            return config
        if config.model not in self._paths:
            self._paths[config.model] = str(self.source(config.model).fetch())
        return dataclasses.replace(config, path=self._paths[config.model])

    def engine(self, config: BootConfig) -> Engine:
        """The live engine of ``config``; boots it on first use, and again if it has died since.

        Raises:
            EngineError: it did not boot.
        """
        return self.pool.get(self.located(config))

    @property
    def references(self) -> References:
        """The truth and the same-dtype reference, computed once per sequence."""
        if self._references is None:
            from harness.reference.disk import DiskCache
            from harness.reference.references import References

            disk = DiskCache(self.reference_cache) if self.reference_cache else None
            self._references = References(max_loaded=_LOADED_REFERENCES, disk=disk)
        return self._references

    def final_norm_weight(self, config: BootConfig) -> torch.Tensor:
        """The final norm's weight as the checkpoint has it, (width,), to recognise it where it was left folded in."""
        if config.path not in self._norms:
            from harness.reference.weights import final_norm_weight

            self._norms[config.path] = final_norm_weight(config.path)
        return self._norms[config.path]

    def noise(
        self, config: BootConfig, hooks: Sequence[str], prompts: Callable[[], Sequence[Sequence[int]]]
    ) -> dict[str, float]:
        """The reference's own aggregate error per hook, measured on ``prompts`` once per checkpoint and dtype."""
        key = (config.path, config.dtype, tuple(hooks))
        if key not in self._noise:
            from harness.parity.verdict import reference_noise

            pair = self.references.get(config.path, config.dtype, prompts(), hooks)
            runs = [reference_noise(pair.truth.captured, run.captured) for run in pair.same]
            self._noise[key] = {name: max(run[name] for run in runs) for name in runs[0]}
        return self._noise[key]

    # -- the pool's listener ----------------------------------------------------------------------------------------

    def boot_started(self, config: BootConfig) -> contextlib.AbstractContextManager[None]:
        """Surround a boot with the progress line."""
        return self.progress.watch(config)

    def booting(self, config: BootConfig, seconds: float) -> None:
        """Move the progress line."""
        self.progress.tick(config, seconds)

    def booted(
        self, config: BootConfig, describe: Mapping[str, Any] | None, error: str | None, log: Path
    ) -> None:
        """Record how a boot ended."""
        self.write(
            {
                "type": "engine",
                "id": config.id,
                "config": {**dataclasses.asdict(config), "path": Path(config.path).name},
                "boot_seconds": (describe or {}).get("boot_seconds"),
                "describe": dict(describe or {}),
                "log": str(log.relative_to(self.folder)) if log.is_relative_to(self.folder) else log.name,
                "error": error,
            }
        )

    # -- records ----------------------------------------------------------------------------------------------------

    def open_store(
        self, cases: Sequence[Mapping[str, Any]], *, how: Literal["create", "resume", "join"] = "create"
    ) -> None:
        """Start the run's records, go on with them or join those of other processes; say what is going to be run.

        Raises:
            UsageError: the folder cannot be written, holds another run's results, or another process is writing them.
        """
        self.store = getattr(RunStore, how)(
            self.folder,
            {
                "run_id": self.folder.name,
                "folder": _from_here(self.folder),
                "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "command": " ".join(["pytest", *redact_argv(self.argv)]),
                "argv": redact_argv(self.argv),
                "profile": self.plan.profile,
                "plan": dataclasses.asdict(self.plan),
                "k": self.k,
                "seeds": {"prompts": 0},
                "provenance": collect(Path(__file__).resolve().parent.parent),
            },
        )
        if cases:
            self.write({"type": "declared", "cases": list(cases)})

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record, where a run is being recorded at all."""
        if self.store is not None:
            self.store.append(record)

    def begin_case(self, case_id: str) -> None:
        """Note that a case has started: one that never finishes is known to be lost."""
        self.case = CaseLog(case_id, time.monotonic())
        self.write({"type": "started", "id": case_id, "time": time.time()})

    def record_verdict(self, label: str, verdict: CaseVerdict | None, detail: Mapping[str, Any]) -> None:
        """Add a finding to the running case."""
        if self.case is not None:
            payload = verdict.to_json() if verdict is not None else None
            self.case.verdicts.append({"label": label, "verdict": payload, "detail": dict(detail)})

    def keep(self, label: str, verdict: CaseVerdict, evidence: Evidence) -> None:
        """Save what the running case's failed comparison is about; see :mod:`harness.artifacts`."""
        if self.case is not None and not verdict.passed:
            saved = save(self.folder, self.case.id, len(self.case.artifacts), label, verdict, evidence)
            self.case.artifacts.append(saved)

    def end_case(self, outcome: str, **fields: Any) -> None:
        """Write what the running case found."""
        if self.case is None:
            return
        self.write(
            {
                "type": "case",
                "id": self.case.id,
                "outcome": outcome,
                "seconds": round(time.monotonic() - self.case.started, 3),
                "verdicts": self.case.verdicts,
                **({"artifacts": self.case.artifacts} if self.case.artifacts else {}),
                **fields,
            }
        )
        self.case = None

    def close(self) -> None:
        """Close engines, references and records; safe to call twice."""
        with contextlib.suppress(EngineError):
            self.pool.close()
        if self._references is not None:
            self._references.close()
        if self.store is not None:
            self.store.close()


def _from_here(folder: Path) -> str:
    """As a command names it that is given where the run was started."""
    here, there = Path.cwd().resolve(), folder.resolve()
    return str(there.relative_to(here)) if there.is_relative_to(here) else str(folder)
