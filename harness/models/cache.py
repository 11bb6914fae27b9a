"""A folder of built checkpoints that is either complete and verified, or not there.

A build runs in a hidden sibling of its destination and is moved into place by one rename, so a process that
is killed half-way leaves nothing that looks finished. `MANIFEST.json` records the size and SHA-256 of every
file; each process checks both before it uses an entry, and rebuilds one that does not match.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import platformdirs

from harness.errors import HarnessError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CACHE_ENV", "MANIFEST", "cache_dir", "materialise"]

logger = logging.getLogger(__name__)

CACHE_ENV = "VLLM_PARITY_CACHE"
MANIFEST = "MANIFEST.json"

_MANIFEST_FORMAT = 1
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
#: How long a process waits for another one that builds the same entry; SmolLM2 takes 20 to 40 s.
_LOCK_TIMEOUT_S = 1800.0
#: Waits shorter than this are not worth a line in the log.
_QUIET_WAIT_S = 1.0

#: entry folder -> (name, size, mtime in ns) of each file when it was last hashed here. Hashing SmolLM2's
#: 538 MB takes about a second, which a run that resolves the model for every case should pay once.
_verified: dict[Path, tuple[tuple[str, int, int], ...]] = {}


def __dir__() -> list[str]:
    """Only the public names."""
    return __all__


def cache_dir() -> Path:
    """Return the folder that holds what the harness builds: `$VLLM_PARITY_CACHE`, else the user's cache.

    The folder is not created here.
    """
    configured = os.environ.get(CACHE_ENV, "").strip()
    if configured:
        return Path(configured).expanduser().absolute()
    return Path(platformdirs.user_cache_dir("vllm-parity", appauthor=False))


def materialise(name: str, recipe_version: int, build: Callable[[Path], None]) -> Path:
    """Return the folder of cache entry `name`, running `build(empty_folder)` first if it is not there intact.

    An entry is keyed by `name` and `recipe_version`: raise the version whenever `build` would write other
    bytes. Processes that ask for the same entry at once build it once; the others wait.

    Raises:
        UsageError: `name` cannot be a folder name, or the cache folder cannot be written.
        HarnessError: the build ran out of disk, wrote nothing, or another process never let go of the lock.
        Exception: whatever `build` raises; the entry is then absent, never half-written.
    """
    if not _NAME.fullmatch(name):
        msg = f"{name!r} cannot name a cache entry: use lower-case letters, digits, '.', '_' and '-'"
        raise UsageError(msg)
    parent = cache_dir() / "models"
    key = f"{name}-v{recipe_version}"
    entry = parent / key
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock = _acquire(parent / f".{key}.lock", key)
    except OSError as error:
        msg = (
            f"the model cache {parent} cannot be written ({error}); "
            f"set {CACHE_ENV} to a folder that can, with about 600 MB free"
        )
        raise UsageError(msg) from error
    try:
        if (defect := _defect(entry)) is None:
            return entry
        if entry.exists():
            logger.warning("model cache: rebuilding %s: %s", entry, defect)
        # We hold the lock, so a leftover sibling belongs to a process that died while it built.
        for leftover in sorted(parent.glob(f".{key}.tmp-*")):
            logger.warning("model cache: removing %s, left half-written by an earlier process", leftover)
            shutil.rmtree(leftover, ignore_errors=True)
        _build(entry, parent / f".{key}.tmp-{os.getpid()}", build)
        return entry
    finally:
        lock.release()


def _acquire(path: Path, key: str) -> filelock.BaseFileLock:
    """Take the lock of one entry; the system frees it when its holder dies, however it dies."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=_QUIET_WAIT_S)
    except filelock.Timeout:
        logger.info("model cache: waiting for another process that builds %s", key)
        try:
            lock.acquire(timeout=_LOCK_TIMEOUT_S)
        except filelock.Timeout as error:
            msg = (
                f"model cache: another process has held {path} for {_LOCK_TIMEOUT_S:.0f} s; "
                f"end it, or set {CACHE_ENV} to another folder"
            )
            raise HarnessError(msg) from error
    return lock


def _build(entry: Path, scratch: Path, build: Callable[[Path], None]) -> None:
    """Run `build` in `scratch`, seal it with a manifest and put it where `entry` was."""
    started = time.monotonic()
    logger.info("model cache: building %s", entry)
    try:
        scratch.mkdir()
        build(scratch)
        files = {path.relative_to(scratch).as_posix(): path for path in _files(scratch)}
        if not files:
            msg = f"model cache: the recipe of {entry.name} wrote no file; this is a fault of the recipe"
            raise HarnessError(msg)
        manifest = {
            "format": _MANIFEST_FORMAT,
            "files": {
                name: {"size": path.stat().st_size, "sha256": _sha256(path)} for name, path in files.items()
            },
        }
        (scratch / MANIFEST).write_text(
            json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        # The rename must not become durable before the bytes it publishes.
        for path in (*files.values(), scratch / MANIFEST):
            _fsync(path)
        for folder in sorted({scratch, *(path.parent for path in files.values())}):
            _fsync(folder)
        _replace(entry, scratch)
    except OSError as error:
        msg = (
            f"model cache: {entry.name} could not be built in {entry.parent} ({error}); "
            f"free some disk (about 600 MB) or set {CACHE_ENV} to another folder"
        )
        raise HarnessError(msg) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _verified[entry] = _signature(entry)
    size_mb = sum(size for _, size, _ in _verified[entry]) / 1e6
    logger.info("model cache: built %s (%.0f MB, %.1f s)", entry, size_mb, time.monotonic() - started)


def _replace(entry: Path, scratch: Path) -> None:
    """Publish `scratch` as `entry`. A folder cannot be renamed onto a full one, so a broken one steps aside."""
    if entry.is_symlink() or entry.is_file():
        entry.unlink()
    elif entry.exists():
        aside = entry.with_name(f"{scratch.name}-broken")
        entry.rename(aside)
        scratch.rename(entry)
        shutil.rmtree(aside, ignore_errors=True)
        _fsync(entry.parent)
        return
    scratch.rename(entry)
    _fsync(entry.parent)


def _defect(entry: Path) -> str | None:
    """Say what is wrong with the entry on disk, or None where every file is the one that was built."""
    if not entry.is_dir():
        return "it is not a folder"
    try:
        manifest: dict[str, Any] = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        recorded = {
            str(name): (int(fact["size"]), str(fact["sha256"])) for name, fact in manifest["files"].items()
        }
        signature = _signature(entry)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is missing or unreadable ({type(error).__name__}: {error})"
    if manifest.get("format") != _MANIFEST_FORMAT:
        return f"{MANIFEST} has format {manifest.get('format')!r}, not {_MANIFEST_FORMAT}"
    sizes = {name: size for name, size, _ in signature if name != MANIFEST}
    if sizes.keys() != recorded.keys():
        missing, surplus = sorted(recorded.keys() - sizes.keys()), sorted(sizes.keys() - recorded.keys())
        return f"its files are not those of {MANIFEST} (missing {missing}, not listed {surplus})"
    for name, size in sizes.items():
        if size != recorded[name][0]:
            return f"{name} has {size} bytes, {recorded[name][0]} were written"
    if _verified.get(entry) == signature:
        return None
    for name in sizes:
        if _sha256(entry / name) != recorded[name][1]:
            return f"{name} is not what was written (its SHA-256 differs)"
    _verified[entry] = signature
    return None


def _signature(entry: Path) -> tuple[tuple[str, int, int], ...]:
    """(name, size, mtime in ns) of each file of an entry, in name order."""
    stats = ((path.relative_to(entry).as_posix(), path.stat()) for path in _files(entry))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _files(folder: Path) -> Iterator[Path]:
    """Every file below `folder` in a fixed order; dot files are the system's (.DS_Store, .nfs…), not ours."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            yield path


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
