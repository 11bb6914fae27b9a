"""A plain backend in its own interpreter: ``name@path/to/python``.

An engine's process starts the worker and relays to it, so the worker is supervised as that engine is: it has the
engine's timeouts and log, and dies with its process group.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.adapters import ADAPTERS, FOLDER
from harness.elsewhere.plain import Plain, Reply
from harness.elsewhere.worker import PROTOCOL
from harness.errors import EngineError, UsageError
from harness.transport import receive, send

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    import torch

    from harness.backend import BootConfig

__all__ = ["Elsewhere", "RemoteRunner", "split_name"]

WORKER = Path(__file__).with_name("worker.py")
#: The oldest Python the worker runs on.
_PYTHON = (3, 10)
_PROBE = (
    "import importlib.util as u, sys; "
    "print(*sys.version_info[:2], *[m for m in ('torch', 'safetensors') if u.find_spec(m) is None])"
)
_PROBE_TIMEOUT = 60.0
_CLOSING = 10.0


def split_name(backend: str) -> tuple[str, str]:
    """``name@python`` in two; the second is empty for a backend of this interpreter."""
    name, _, python = backend.partition("@")
    return name, python


class Elsewhere:
    """``name@python`` as :func:`harness.backend.load_backend` gives it out: boots ``name`` in that interpreter.

    Raises:
        UsageError: one of the two is missing.
    """

    def __init__(self, name: str, python: str) -> None:
        if not name or not python:
            msg = f"--backend {name}@{python}: it is NAME@PYTHON, as in nnsight@.venv/bin/python"
            raise UsageError(msg)
        self.name, self.python = name, python

    def check(self, config: BootConfig) -> None:
        """Refuse an interpreter that cannot run a worker, before anything is booted.

        Raises:
            UsageError: it does not exist, is none, is too old, or lacks what the worker needs.
        """
        del config
        who = f"--backend {self.name}@{self.python}"
        found = shutil.which(self.python)
        if found is None:
            msg = f"{who}: there is no program {self.python!r}; name the python of the backend's own environment"
            raise UsageError(msg)
        try:
            done = subprocess.run(
                [found, "-I", "-c", _PROBE],
                capture_output=True,
                text=True,
                timeout=_PROBE_TIMEOUT,
                check=False,
            )
            major, minor, *missing = done.stdout.split()
            version = int(major), int(minor)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            msg = f"{who}: {self.python!r} does not behave like a Python interpreter ({type(error).__name__})"
            raise UsageError(msg) from error
        if version < _PYTHON:
            msg = f"{who}: it is Python {major}.{minor}, and the worker needs {'.'.join(map(str, _PYTHON))} or later"
            raise UsageError(msg)
        if missing:
            msg = f"{who}: it lacks {' and '.join(missing)}, which the worker needs: install that beside the backend"
            raise UsageError(msg)

    def boot(self, config: BootConfig) -> Plain:
        """Start the worker and boot the backend in it.

        Raises:
            EngineError: it did not start, speaks another protocol, died, or its backend did not boot.
            UsageError: as :class:`~harness.elsewhere.plain.Plain`.
        """
        runner = RemoteRunner(self.name, self.python)
        try:
            header = runner.ask("boot", {"load": _load(self.name), "config": config.to_json()})[0]
            describe = {**runner.hello, **header["describe"]}
            return Plain(config, runner, header["capabilities"], describe)
        except BaseException:  # Ctrl-C too must leave no worker behind
            runner.close()
            raise


def _load(name: str) -> dict[str, str]:
    if name in ADAPTERS:
        return {"kind": "adapter", "folder": str(FOLDER), "module": ADAPTERS[name].module}
    module, colon, attribute = name.partition(":")
    if colon:
        return {"kind": "object", "module": module, "attribute": attribute}
    return {"kind": "entry point", "name": name}


class RemoteRunner:
    """A worker, asked one thing at a time.

    Attributes:
        hello: what it said first: Python's version and its process id.
        lost: it is gone or out of step, and so is every later call.

    Raises:
        EngineError: it did not start, or speaks another protocol.
    """

    def __init__(self, name: str, python: str) -> None:
        self.lost = False
        self._who = f"backend {name}"
        self._python = python
        ours, theirs = Pipe()
        self._connection: Connection = ours
        program = shutil.which(python) or python
        try:
            self._process = subprocess.Popen(
                [program, "-I", str(WORKER), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        except OSError as error:
            ours.close()
            msg = f"{self._who}: {python} cannot be started: {error.strerror or error}"
            raise EngineError(msg) from error
        finally:
            theirs.close()
        try:
            hello = self._receive("hello")[0].get("hello", {})
        except EngineError:
            self.close()
            raise
        self.hello: dict[str, Any] = {"python": hello.get("python"), "worker_pid": hello.get("pid")}

    def run(
        self,
        prompts: list[list[int]],
        *,
        capture: list[str],
        edits: list[list[dict[str, Any]]],
        new_tokens: int,
        logits: bool,
    ) -> Reply:
        """See :meth:`harness.elsewhere.plain.PlainBackend.run`."""
        # Copies: prompts edited alike share their numbers, which safetensors refuses.
        biases = {
            f"{n}/{edit['hook']}": edit["bias"].clone() for n, here in enumerate(edits) for edit in here
        }
        plain = [[{k: v for k, v in edit.items() if k != "bias"} for edit in here] for here in edits]
        header, tensors = self.ask(
            "run",
            {
                "prompts": prompts,
                "capture": capture,
                "edits": plain,
                "new_tokens": new_tokens,
                "logits": logits,
            },
            biases,
        )
        captured = {hook: _in_order(f"c/{number}/", tensors) for number, hook in enumerate(header["hooks"])}
        found = _in_order("l/", tensors)
        return Reply(captured, header["new_tokens"], found or None, header["stats"], header["seconds"])

    def ask(
        self, operation: str, header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Send one message and wait for its reply; how long is for the engine's supervisor to say.

        Raises:
            EngineError: it reported an error, or is gone.
        """
        try:
            send(self._connection, {"op": operation, **header}, tensors)
        except OSError:
            raise self._lost(f"was gone before {operation}") from None
        reply, found = self._receive(operation)
        if not reply.get("ok"):
            self.lost = bool(reply.get("ending"))
            error = reply.get("error") or {}
            msg = f"{self._who}, in its own interpreter: {error.get('type')}: {error.get('message')}"
            raise EngineError(msg)
        return reply, found

    def _receive(self, operation: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        try:
            return receive(self._connection)
        except (EOFError, OSError):
            raise self._lost(f"died during {operation}") from None
        except EngineError as error:
            self.lost = True
            msg = f"{self._who}: {error}; its worker is {self._python}, and this is for protocol {PROTOCOL}"
            raise EngineError(msg) from error
        except Exception as error:  # bytes of another library may fail to parse in any way
            self.lost = True
            msg = (
                f"{self._who}: what its worker sent during {operation} is no message ({type(error).__name__})"
            )
            raise EngineError(msg) from error

    def _lost(self, what: str) -> EngineError:
        self.lost = True
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:
            how = "its pipe closed"
        else:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return EngineError(f"{self._who}: its worker {what} ({how})")

    def close(self) -> None:
        """Ask it to end, then end it; safe to call twice. What it started goes with the engine's process group."""
        if not self.lost and self._process.poll() is None:
            with contextlib.suppress(OSError):
                send(self._connection, {"op": "close"})
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSING)
        self._connection.close()
        self._process.kill()  # does nothing to one that has ended
        self._process.wait()


def _in_order(prefix: str, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    names = sorted(
        (name for name in tensors if name.startswith(prefix)), key=lambda name: int(name.removeprefix(prefix))
    )
    return [tensors[name] for name in names]
