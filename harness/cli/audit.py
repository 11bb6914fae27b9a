"""``vllm-parity audit``: the suites on somebody's backend, and a report for its authors."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.codes import BROKEN, INCOMPLETE, NOTHING_RAN, OK
from harness.errors import HarnessError, UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from harness.audit import Audit
    from harness.backend import BootConfig
    from harness.pool import EnginePool
    from harness.store import RunRecords

__all__ = ["ABOUT", "HELP", "add_arguments", "run"]

#: pytest's exit status where it was told to end.
_INTERRUPTED = 2

HELP = "run the suites on a backend and write a report for its authors"
ABOUT = (
    "Runs pytest on suites that any backend can be asked, and writes audit.md and audit.json into the run's folder. "
    "Exit status: 0 parity holds, 1 it is broken, 2 a usage error, 4 cases could not be judged, 5 nothing was."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The backend, what it is tried on, and by which suites."""
    parser.add_argument(
        "--backend", required=True, metavar="NAME[@PYTHON]", help="as pytest takes it: see docs/backends.md"
    )
    parser.add_argument("--model", action="append", metavar="NAME", help="repeatable. Default: tiny-llama")
    parser.add_argument("--dtype", action="append", metavar="DTYPE", help="repeatable. Default: fp32")
    parser.add_argument("--engine-mode", default="eager", choices=("compiled", "eager", "both"))
    parser.add_argument(
        "--suites",
        nargs="+",
        default=[],
        metavar="PATH",
        help="default: activations, interventions, logits, generation",
    )
    parser.add_argument("-k", dest="keyword", metavar="EXPRESSION", help="only these cases, as pytest's -k")
    parser.add_argument(
        "--beside",
        default="vllm",
        metavar="NAME",
        help="whose cost of capturing stands beside; 'none' measures nothing. Default: %(default)s",
    )
    parser.add_argument("--report-dir", default="reports", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--boot-timeout", type=float, default=600.0, metavar="S")
    parser.add_argument("--step-timeout", type=float, default=300.0, metavar="S")


def run(arguments: argparse.Namespace) -> int:
    """Run, write, print where.

    Raises:
        UsageError: no such backend, interpreter or suites; nothing was run.
    """
    from harness.audit import audit_of, run_suites
    from harness.backend import load_backend
    from harness.store import ensure_writable, read_run

    models, dtypes = arguments.model or ["tiny-llama"], arguments.dtype or ["fp32"]
    load_backend(arguments.backend)  # an unknown one is refused here, in one line
    folder = Path(arguments.report_dir, f"{time.strftime('%Y%m%d-%H%M%S')}-audit")
    ensure_writable(folder)
    options = ["--backend", arguments.backend, "--engine-mode", arguments.engine_mode]
    for name in ("boot_timeout", "step_timeout"):
        options += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    options += [part for model in models for part in ("--model", model)]
    options += [part for dtype in dtypes for part in ("--dtype", dtype)]
    options += ["-k", arguments.keyword] if arguments.keyword else []
    status, where = run_suites(folder, arguments.suites, options)
    records = read_run(where)
    audit = audit_of(records)
    audit.command = _command(arguments, models, dtypes)
    _write(audit, where)
    if status != _INTERRUPTED:
        if any(suite.failed for suite in audit.suites):
            _add_smallest(audit, arguments, records, where)
        if arguments.beside != "none" and any(suite.passed for suite in audit.suites):
            _add_overhead(audit, arguments, models[0], dtypes[0], where)
        _write(audit, where)
    print(f"{audit.backend}: {audit.verdict}\naudit: {where / 'audit.md'}")
    return _status(audit)


def _write(audit: Audit, where: Path) -> None:
    """Into the run's folder, in place of what stood there."""
    from harness.audit import audit_text
    from harness.store.writer import dump

    text = json.dumps(json.loads(dump(audit.to_json())), indent=1)
    (where / "audit.json").write_text(text + "\n", encoding="utf-8")
    (where / "audit.md").write_text(audit_text(audit), encoding="utf-8")


def _command(arguments: argparse.Namespace, models: Sequence[str], dtypes: Sequence[str]) -> str:
    """What makes this audit again, wherever its reports go."""
    parts = ["vllm-parity", "audit", "--backend", arguments.backend]
    parts += [part for model in models for part in ("--model", model)]
    parts += [part for dtype in dtypes for part in ("--dtype", dtype)]
    if arguments.engine_mode != "eager":
        parts += ["--engine-mode", arguments.engine_mode]
    parts += ["--suites", *arguments.suites] if arguments.suites else []
    parts += ["-k", arguments.keyword] if arguments.keyword else []
    return shlex.join(parts)


def _status(audit: Audit) -> int:
    if any(suite.failed for suite in audit.suites):
        return BROKEN
    if not any(suite.passed for suite in audit.suites):
        return INCOMPLETE if audit.failures else NOTHING_RAN
    return INCOMPLETE if any(suite.verdict == "not judged" for suite in audit.suites) else OK


@contextlib.contextmanager
def _pool(arguments: argparse.Namespace, where: Path, what: str) -> Iterator[EnginePool]:
    """Engines for a figure beside the verdict; one that cannot be had says why and costs nothing else."""
    from harness.pool import EnginePool

    pool = EnginePool(where / what, boot_timeout=arguments.boot_timeout, step_timeout=arguments.step_timeout)
    try:
        yield pool
    except UsageError:
        raise
    except (HarnessError, KeyError) as error:
        print(f"{what}: not measured: {error}")
    finally:
        pool.close()


def _config(backend: str, model: str, dtype: str) -> BootConfig:
    from harness.backend import DTYPES, BootConfig
    from harness.models import resolve

    path = str(resolve(model).fetch())
    return BootConfig(
        backend, model, path, DTYPES[dtype], "eager", max_num_batched_tokens=512, max_model_len=256
    )


def _add_overhead(audit: Audit, arguments: argparse.Namespace, model: str, dtype: str, where: Path) -> None:
    """What capturing costs, of the backend and of the one beside it."""
    from harness.audit import measure_overhead
    from harness.geometry import Geometry
    from harness.models import load_config

    with _pool(arguments, where, "overhead") as pool:
        for backend in dict.fromkeys((arguments.backend, arguments.beside)):
            config = _config(backend, model, dtype)
            hf_config = load_config(config.path)
            layers, vocab = Geometry.of(hf_config).layers, int(hf_config.vocab_size)
            audit.overhead.append(measure_overhead(pool, config, layers=layers, vocab=vocab))


def _add_smallest(audit: Audit, arguments: argparse.Namespace, records: RunRecords, where: Path) -> None:
    """The smallest call that shows the first failure that a short call can show, and its script."""
    from harness.audit import asked_of, find_smallest, minimal_script
    from harness.models import load_config
    from harness.reference.families import tree_of_config

    with _pool(arguments, where, "smallest") as pool:
        for case in records.cases:
            if case.outcome != "failed" or not (asked := list(asked_of(records, case))):
                continue
            config = _config(audit.backend, case.model, case.dtype)
            audit.smallest = find_smallest(pool.get(config), config.path, asked, k=audit.k)
            if audit.smallest is not None:
                tree = tree_of_config(load_config(config.path))
                audit.script = minimal_script(audit.smallest, audit.backend, tree, Path(config.path))
                return
