"""Writing results as they come, so that a ``kill -9`` costs the running case and nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from harness.errors import HarnessError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

__all__ = ["OUTCOMES", "RESULTS", "SCHEMA", "SKIP_CLASSES", "RunStore", "dump", "ensure_writable"]

SCHEMA = 1
RESULTS = "results.jsonl"
OUTCOMES = ("passed", "failed", "error", "skipped")
SKIP_CLASSES = ("not-applicable", "not-installed", "no-hardware", "known-bug", "upstream-failed")

#: Keys without which a record cannot be counted; everything else may be absent.
_REQUIRED = {
    "run": {"run_id", "started"},
    "declared": {"cases"},
    "expectations": {"entries"},
    "engine": {"id"},
    "started": {"id"},
    "case": {"id", "outcome"},
    "end": {"exit_status"},
}
#: Row errors are for the heat map: three digits are plenty there, and a passing comparison needs no more columns
#: than the map has. Unrounded and unpooled, 92 hooks by 240 rows would cost half a megabyte per comparison.
_ROW_DIGITS = 3
_PASSING_COLUMNS, _FAILING_COLUMNS = 40, 512


class RunStore:
    """Appends records to ``results.jsonl`` of one run.

    Safe to call from several threads, and beside other processes' stores of the same run: each line is written under a
    lock on the file, which the kernel lets go of however its holder dies.
    """

    def __init__(self, path: Path, descriptor: int, hold: int | None = None) -> None:
        """Take over open descriptors; use :meth:`create`, :meth:`resume` or :meth:`join`."""
        self.path = path
        self._descriptor: int | None = descriptor
        self._hold = hold
        self._lock = threading.Lock()

    @classmethod
    def create(cls, folder: Path | str, run_record: Mapping[str, Any]) -> Self:
        """Start the results of a new run.

        Raises:
            UsageError: the folder cannot be written, already holds results, or is another process's.
        """
        folder = Path(folder)
        ensure_writable(folder)
        hold = _hold(folder)
        path = folder / RESULTS
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            os.close(hold)
            msg = f"report folder {folder} already holds results of a run: resume it, or name another folder"
            raise UsageError(msg) from None
        store = cls(path, descriptor, hold)
        store.append({"schema": SCHEMA, **run_record, "type": "run"})
        return store

    @classmethod
    def resume(cls, folder: Path | str, run_record: Mapping[str, Any]) -> Self:
        """Go on appending to a run that stopped early.

        Raises:
            UsageError: the folder holds no results, cannot be written, or the run has not stopped.
        """
        path = Path(folder) / RESULTS
        if not path.is_file():
            msg = f"report folder {folder} holds no {RESULTS} to resume: start a new run there instead"
            raise UsageError(msg)
        ensure_writable(Path(folder))
        store = cls(path, os.open(path, os.O_RDWR | os.O_APPEND), _hold(Path(folder)))
        store.append({"schema": SCHEMA, **run_record, "type": "run", "resumed": True})
        return store

    @classmethod
    def join(cls, folder: Path | str, run_record: Mapping[str, Any]) -> Self:
        """Append to a run that other processes write too; the first of them starts it.

        Raises:
            UsageError: the folder cannot be written, or belongs to a run that is not shared.
        """
        folder = Path(folder)
        ensure_writable(folder)
        hold = _hold(folder, shared=True)
        path = folder / RESULTS
        store = cls(path, os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644), hold)
        store._write({"schema": SCHEMA, **run_record, "type": "run"}, only_if_empty=True)
        return store

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and return once it is on disk.

        Raises:
            ValueError: an unknown type, outcome or skip class, or a key without which the record means nothing.
            HarnessError: the disk refused it, or the store is closed.
        """
        _check(record)
        self._write(_compact(record))

    def _write(self, record: Mapping[str, Any], *, only_if_empty: bool = False) -> None:
        data = (dump(record) + "\n").encode()
        with self._lock:
            if self._descriptor is None:
                msg = f"{self.path} is closed: no more records can be appended"
                raise HarnessError(msg)
            try:
                with _locked(self._descriptor):
                    if only_if_empty and os.fstat(self._descriptor).st_size:
                        return
                    # A killed writer can leave half a line; it stays, but must not swallow the next record.
                    view = memoryview(data if _ends_a_line(self._descriptor) else b"\n" + data)
                    while view:
                        view = view[os.write(self._descriptor, view) :]
                    os.fsync(self._descriptor)
            except OSError as error:
                msg = f"cannot append to {self.path}: {error.strerror}; what was recorded before is kept"
                raise HarnessError(msg) from error

    def close(self) -> None:
        """Close the file and let go of the folder; safe to call twice."""
        with self._lock:
            for descriptor in (self._descriptor, self._hold):
                if descriptor is not None:
                    os.close(descriptor)
            self._descriptor = self._hold = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _hold(folder: Path, *, shared: bool = False) -> int:
    """Take a run's folder for this process, or for those that share it, while the returned descriptor is open.

    The lock is on the folder itself: nothing is left behind, and a killed process holds nothing.

    Raises:
        UsageError: another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        msg = f"report folder {folder} belongs to a run that is still going on: wait for its end, or stop it first"
        raise UsageError(msg) from None
    except OSError:
        pass  # a file system without locks: two runs in one folder are then the caller's to avoid
    return descriptor


@contextlib.contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Keep other processes from appending meanwhile, where the file system can."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _ends_a_line(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


def ensure_writable(folder: Path | str) -> None:
    """Make sure that files can be created in ``folder``, making it if need be.

    A file is really written: root passes every permission check, and yet cannot write to a read-only mount.

    Raises:
        UsageError: it cannot be done; one line with the folder, the reason and the way out.
    """
    folder = Path(folder)
    probe = folder / f".writable-{os.getpid()}-{threading.get_ident()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with probe.open("xb") as file:
                file.write(b"probe")
                file.flush()
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        msg = f"cannot write to report folder {str(folder)!r}: {reason}; name a folder that can be written"
        raise UsageError(msg) from error


def _check(record: Mapping[str, Any]) -> None:
    kind = record.get("type")
    if kind not in _REQUIRED:
        msg = f"record type {kind!r} is not one of {', '.join(_REQUIRED)}"
        raise ValueError(msg)
    missing = sorted(key for key in _REQUIRED[kind] if record.get(key) is None)
    if missing:
        msg = f"a {kind!r} record needs {', '.join(missing)}"
        raise ValueError(msg)
    if kind == "case":
        if record["outcome"] not in OUTCOMES:
            msg = f"outcome {record['outcome']!r} of {record['id']} is not one of {', '.join(OUTCOMES)}"
            raise ValueError(msg)
        if record.get("skip_class") not in (None, *SKIP_CLASSES):
            msg = f"skip class {record['skip_class']!r} of {record['id']} is not one of {', '.join(SKIP_CLASSES)}"
            raise ValueError(msg)


def _compact(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with its row errors rounded and pooled over positions, few where the comparison passed."""
    if record["type"] != "case" or not record.get("verdicts"):
        return record
    return {**record, "verdicts": [_compact_verdict(entry) for entry in record["verdicts"]]}


def _compact_verdict(entry: Mapping[str, Any]) -> dict[str, Any]:
    verdict = entry.get("verdict")
    if not isinstance(verdict, dict) or "hooks" not in verdict:
        return dict(entry)
    hooks = []
    for hook in verdict["hooks"]:
        rows: Sequence[Sequence[float]] = hook.get("row_errors") or ()
        pooled = max(
            1, -(-sum(map(len, rows)) // (_PASSING_COLUMNS if verdict.get("passed") else _FAILING_COLUMNS))
        )
        errors = [
            [_rounded(_largest(row[i : i + pooled])) for i in range(0, len(row), pooled)] for row in rows
        ]
        hooks.append({**hook, "row_errors": errors, "rows_per_error": pooled})
    return {**entry, "verdict": {**verdict, "hooks": hooks}}


def _largest(values: Sequence[float]) -> float:
    """The largest, counting a NaN as larger than everything: pooling must not hide one."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


def _rounded(value: float) -> float:
    return float(f"{value:.{_ROW_DIGITS}g}")


def dump(record: Mapping[str, Any]) -> str:
    """One line of strict JSON, whatever is in the record; numbers JSON has no word for are strings."""
    try:
        return json.dumps(record, allow_nan=False, default=_plain, separators=(",", ":"))
    except (TypeError, ValueError):  # a number JSON has no word for, or a key that is no string
        return json.dumps(_spelled_out(record), allow_nan=False, separators=(",", ":"))


def _spelled_out(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _spelled_out(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled_out(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _spelled_out(_plain(value))


def _plain(value: Any) -> Any:
    """A JSON-able stand-in: a result with an odd detail in it is still a result and must not be lost."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if callable(getattr(value, "tolist", None)):  # numpy and torch, scalars and arrays
        return value.tolist()
    return str(value)
