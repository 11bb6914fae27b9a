"""``vllm-parity audit``: the suites on somebody's backend, and a report for its authors."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.codes import BROKEN, INCOMPLETE, NOTHING_RAN, OK
from harness.errors import HarnessError, UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from harness.audit import Audit

__all__ = ["ABOUT", "HELP", "add_arguments", "run"]

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
    from harness.audit import audit_of, audit_text, run_suites
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
    _, where = run_suites(folder, arguments.suites, options)
    audit = audit_of(read_run(where))
    audit.command = _command(arguments, models, dtypes)
    if arguments.beside != "none" and any(suite.passed for suite in audit.suites):
        _add_overhead(audit, arguments, models[0], dtypes[0], where)
    (where / "audit.json").write_text(json.dumps(audit.to_json(), indent=1) + "\n", encoding="utf-8")
    (where / "audit.md").write_text(audit_text(audit), encoding="utf-8")
    print(f"{audit.backend}: {audit.verdict}\naudit: {where / 'audit.md'}")
    return _status(audit)


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


def _add_overhead(audit: Audit, arguments: argparse.Namespace, model: str, dtype: str, where: Path) -> None:
    """Measure both; one that cannot be measured says why and costs nothing else."""
    from harness.audit import measure_overhead
    from harness.backend import DTYPES, BootConfig
    from harness.geometry import Geometry
    from harness.models import load_config, resolve
    from harness.pool import EnginePool

    path = str(resolve(model).fetch())
    hf_config = load_config(path)
    pool = EnginePool(
        where / "overhead", boot_timeout=arguments.boot_timeout, step_timeout=arguments.step_timeout
    )
    try:
        for backend in dict.fromkeys((arguments.backend, arguments.beside)):
            config = BootConfig(
                backend, model, path, DTYPES[dtype], "eager", max_num_batched_tokens=512, max_model_len=256
            )
            layers, vocab = Geometry.of(hf_config).layers, int(hf_config.vocab_size)
            audit.overhead.append(measure_overhead(pool, config, layers=layers, vocab=vocab))
    except (HarnessError, KeyError) as error:
        if isinstance(error, UsageError):
            raise
        print(f"not measured: {error}")
    finally:
        pool.close()
