"""What runs inside an engine's own process: boot one backend, answer messages until told to stop.

The process leads its own session, so that everything it starts can be killed with it; when the suite's end of the pipe
closes, however the suite died, it kills that whole group itself. No engine outlives its run.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

__all__ = ["serve"]


def serve(connection: Connection, log_path: str, environment: Mapping[str, str]) -> None:
    """Entry point of the process: everything printed goes to ``log_path``."""
    os.setsid()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno() if sys.stdout else 1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    messages: queue.Queue[tuple[dict[str, Any], Any]] = queue.Queue()
    threading.Thread(target=_read, args=(connection, messages), daemon=True, name="suite-watch").start()
    # Returning runs the process' own clean-up; what an engine leaves hanging is killed by the suite soon after.
    _answer(connection, messages)


def _read(connection: Connection, messages: queue.Queue[tuple[dict[str, Any], Any]]) -> None:
    """Receive while the main thread works, to notice at once when the suite is gone."""
    from harness.transport import receive

    try:
        while True:
            messages.put(receive(connection))
    except BaseException as error:  # noqa: BLE001 - whatever it was, nobody can be answered any more
        if not isinstance(error, EOFError | OSError):
            traceback.print_exc()
            sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)


def _answer(connection: Connection, messages: queue.Queue[tuple[dict[str, Any], Any]]) -> None:
    from harness.transport import send

    backend: Any = None
    while True:
        header, _ = messages.get()
        operation = header["op"]
        try:
            if operation == "boot":
                backend = _boot(header["config"])
                reply: tuple[dict[str, Any], dict[str, Any]] = (_introduce(backend), {})
            elif operation == "close":
                if backend is not None:
                    backend.close()
                send(connection, {"ok": True})
                return
            else:
                reply = _run(backend, operation, header["arguments"])
        except BaseException as error:  # noqa: BLE001 - everything is reported to the suite, which raises it there
            traceback.print_exc()
            sys.stderr.flush()
            ending = isinstance(error, (KeyboardInterrupt, SystemExit))
            lost = ending or bool(getattr(backend, "lost", False))
            send(connection, {"ok": False, "error": _describe(error), "lost": lost})
            if ending:
                return
        else:
            send(connection, {"ok": True, **reply[0]}, reply[1])


def _boot(config_json: str) -> Any:
    from harness.backend import BootConfig, load_backend

    config = BootConfig.from_json(config_json)
    return load_backend(config.backend).boot(config)


def _introduce(backend: Any) -> dict[str, Any]:
    from harness.capabilities import FULL

    return {
        "capabilities": getattr(backend, "capabilities", FULL).to_json(),
        "describe": backend.describe(),
        "supported": list(backend.supported_hook_points),
        "non_fireable": dict(backend.non_fireable_hook_points),
    }


def _run(backend: Any, operation: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    from harness.transport import pack_result

    if operation == "forward":
        return pack_result(backend.forward(**arguments))
    if operation in ("raw_logits", "worker_logits"):
        logits = getattr(backend, operation)(**arguments)
        return {"count": len(logits)}, {str(i): tensor for i, tensor in enumerate(logits)}
    if operation == "memory":
        return {"memory": _memory(backend)}, {}
    if operation == "forward_memory":
        return {"memory": _forward_memory(backend, arguments)}, {}
    if operation == "layout":
        return {"layout": backend.layout()}, {}
    if operation == "get_param":
        found = backend.get_param(**arguments)
        return {}, {} if found is None else {"param": found}
    msg = f"unknown operation {operation!r}"
    raise ValueError(msg)


def _memory(backend: Any) -> dict[str, Any]:
    """What this process holds, and the taps of each rank; an engine of one rank computes in this process."""
    from harness.budgets.measure import measure_memory

    taps = backend.tap_bytes() if hasattr(backend, "tap_bytes") else []
    return {**measure_memory(), "taps": taps}


def _forward_memory(backend: Any, arguments: dict[str, Any]) -> dict[str, int]:
    """What a forward takes at most, in the process that runs it; the result is let go, not packed and sent."""
    from harness.budgets.measure import measure_memory, reset_peak

    reset_peak()
    before = measure_memory()
    backend.forward(**arguments)
    after = measure_memory()
    pairs = [("resident", "peak"), ("allocated", "allocated_peak")]  # the second on CUDA only
    return {name: after[peak] - before[name] for name, peak in pairs if name in before}


def _describe(error: BaseException) -> dict[str, str]:
    from harness.errors import CaptureError, UndeclaredError, UsageError

    if isinstance(error, UndeclaredError):
        kind = "undeclared"
    elif isinstance(error, UsageError):
        kind = "usage"
    elif isinstance(error, CaptureError):
        kind = "capture"
    else:
        kind = "engine"
    return {"kind": kind, "type": type(error).__name__, "message": str(error) or type(error).__name__}
