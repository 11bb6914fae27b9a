"""One peer as a process that lives as long as the run: commands and replies are JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, Self

from harness.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = ["LAUNCH", "PeerProcess"]

#: The script that serves a runner.
LAUNCH = Path(__file__).resolve().parent / "runners" / "launch.py"
_SHOWN = 200


class PeerProcess:
    """Started at once; leads its own process group, all of which ends with it.

    Args:
        name: what it is called in errors.
        argv: the command.
        log: where its stderr goes.
        environment: variables beside this process' own.
    """

    def __init__(
        self, name: str, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        self._closed = False
        self._lines: queue.Queue[str | None] = queue.Queue()
        try:
            with log.open("wb") as stderr:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                )
        except OSError as error:
            msg = f"{name} cannot be started: {error.strerror or error}"
            raise EngineError(msg) from error
        assert self._process.stdout is not None  # noqa: S101 - for mypy: it was asked for above
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, stdout: IO[bytes]) -> None:
        with stdout:
            for line in stdout:
                self._lines.put(line.decode("utf-8", "replace"))
        self._lines.put(None)

    def ask(self, command: Mapping[str, Any], timeout: float, what: str = "") -> dict[str, Any]:
        """Send one command and wait for its reply.

        Args:
            command: JSON-able.
            timeout: seconds.
            what: what it is called in errors; by default its first key.

        Raises:
            EngineError: it reported an error, died, was too slow, or wrote what is no reply. It is gone after any but
                the first.
        """
        what = what or next(iter(command))
        started = time.monotonic()
        self._send(command, what)
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self._fail(f"did not finish {what} within {timeout:.0f} s and was killed")
        except BaseException:  # Ctrl-C too: the reply would be taken for that of the next command
            self.close()
            raise
        if line is None:
            self._fail(f"died during {what} after {time.monotonic() - started:.0f} s ({self._exit()})")
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            self._fail(f"printed what is no reply to {what}: {line.strip()[:_SHOWN]!r}")
        if "error" in reply:
            raise EngineError(str(reply["error"]))
        return reply

    def _send(self, command: Mapping[str, Any], what: str) -> None:
        stdin = self._process.stdin
        try:
            assert stdin is not None  # noqa: S101 - for mypy
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
        except (OSError, ValueError):
            # It may have said why before it went.
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=2.0)
                if line is not None and (error := _error_in(line)):
                    self.close()
                    raise EngineError(error) from None
            self._fail(f"was gone before {what} ({self._exit()})")

    def _exit(self) -> str:
        deadline = time.monotonic() + 2
        while not self._ended() and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._process.returncode is not None:
            return f"exit code {self._process.returncode}"
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return "its output closed"
        if found.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            return f"signal {signal.Signals(found.si_status).name}"
        return f"exit code {found.si_status}"

    def _last_words(self) -> str:
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return ""
        said = [line.strip() for line in lines if line.strip()]
        return f"; its log ends: {said[-1][:_SHOWN]}" if said else ""

    def _fail(self, what: str) -> NoReturn:
        self.close(wait=0)
        raise EngineError(f"{self.name} {what}{self._last_words()}")

    def close(self, wait: float = 5.0) -> None:
        """Let it end, then end it and all it started; safe to call twice."""
        if self._closed:
            return  # its id may belong to somebody else by now
        self._closed = True
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        deadline = time.monotonic() + wait
        while not self._ended() and time.monotonic() < deadline:
            time.sleep(0.02)
        # An engine's own processes outlive it now and then; its id is still its group's, as nobody has waited for it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ended(self) -> bool:
        """Whether it has ended, leaving its id to it."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _error_in(line: str) -> str:
    try:
        reply = json.loads(line)
    except ValueError:
        return ""
    return str(reply.get("error", "")) if isinstance(reply, dict) else ""
