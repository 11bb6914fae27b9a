"""Runs in the interpreter of a backend that lives elsewhere: boots it and answers messages until told to stop.

This file is started by its path and imports nothing of this project; it needs Python 3.10, torch, safetensors and the
backend. ``python -I worker.py FD``: FD is a socket, on which each message is two frames of
:class:`multiprocessing.connection.Connection`: a JSON header, which says the protocol's version, and tensors as the
bytes of a safetensors file, or nothing. What is printed goes wherever stdout and stderr went, and can disturb no
message.

============  ======================================================  =====================================
``op``        header, tensors                                         reply
============  ======================================================  =====================================
(the first)                                                           ``hello``: ``python``, ``pid``
``boot``      ``load``: how to find the class, ``config``             ``describe``, ``capabilities``
``run``       ``prompts``, ``capture``, ``new_tokens``, ``logits``,   ``hooks``, ``new_tokens``, ``stats``,
              ``edits``: per prompt ``hook``, ``op``, ``scale``,      ``seconds``; tensors ``c/{hook}/{prompt}``
              ``rows``; tensors ``{prompt}/{hook}``: their biases     by the hook's number, ``l/{prompt}``
``close``                                                             (empty)
============  ======================================================  =====================================

A reply has ``ok``; where it is false, ``error`` has ``type`` and ``message``, and ``ending`` says that the worker ends.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
import traceback
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

__all__ = ["PROTOCOL", "answer", "main"]

#: Bumped when a message changes its meaning; both ends say theirs.
PROTOCOL = 1
#: What our adapters are called here, where nothing else of this project is.
_ADAPTERS = "vllm_parity_adapters"


def send(connection: Connection, header: dict[str, Any], tensors: dict[str, Any] | None = None) -> None:
    """One message, made whole before its first byte goes."""
    payload = b""
    if tensors:
        from safetensors.torch import save

        # A copy: tensors that share memory, as rows of one batch do, are refused otherwise.
        payload = save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})
    head = json.dumps({"protocol": PROTOCOL, **header}).encode()
    connection.send_bytes(head)
    connection.send_bytes(payload)


def receive(connection: Connection) -> tuple[dict[str, Any], dict[str, Any]]:
    """One message.

    Raises:
        EOFError: the other end is gone.
        RuntimeError: it speaks another version.
    """
    header = json.loads(connection.recv_bytes())
    payload = connection.recv_bytes()
    if header.get("protocol") != PROTOCOL:
        message = f"the harness speaks protocol {header.get('protocol')}, this worker {PROTOCOL}"
        raise RuntimeError(message)
    if not payload:
        return header, {}
    from safetensors.torch import load

    return header, load(payload)


def find(load: dict[str, str]) -> Any:
    """The backend's class: one of our adapters, ``module:Class``, or an entry point of what is installed here."""
    if load["kind"] == "adapter":
        folder = load["folder"]
        spec = importlib.util.spec_from_file_location(
            _ADAPTERS, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        if spec is None or spec.loader is None:
            message = f"no adapters in {folder}"
            raise ImportError(message)
        package = importlib.util.module_from_spec(spec)
        sys.modules[_ADAPTERS] = package
        spec.loader.exec_module(package)
        return importlib.import_module(f"{_ADAPTERS}.{load['module']}").Backend
    if load["kind"] == "object":
        return getattr(importlib.import_module(load["module"]), load["attribute"])
    points = importlib.metadata.entry_points(group="harness.backends")
    for point in points:
        if point.name == load["name"]:
            return point.load()
    there = ", ".join(sorted(point.name for point in points)) or "none"
    message = (
        f"no backend {load['name']!r} is installed in {sys.prefix} (entry points harness.backends: {there})"
    )
    raise LookupError(message)


def boot(header: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The backend, and what it says of itself."""
    config = json.loads(header["config"])
    config["topology"] = SimpleNamespace(**config["topology"])
    started = time.monotonic()
    backend = find(header["load"]).boot(SimpleNamespace(**config))
    described = {"boot_seconds": round(time.monotonic() - started, 3), **backend.describe()}
    return backend, {"describe": described, "capabilities": dict(backend.capabilities)}


def run(
    backend: Any, header: dict[str, Any], biases: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One call of the backend, and its reply."""
    edits = [
        [{**edit, "bias": biases[f"{number}/{edit['hook']}"]} for edit in edits]
        for number, edits in enumerate(header["edits"])
    ]
    started = time.perf_counter()
    found = backend.run(
        header["prompts"],
        capture=header["capture"],
        edits=edits,
        new_tokens=header["new_tokens"],
        logits=header["logits"],
    )
    seconds = time.perf_counter() - started
    captured = found["captured"]
    tensors = {
        f"c/{number}/{prompt}": rows
        for number, hook in enumerate(captured)
        for prompt, rows in enumerate(captured[hook])
    }
    tensors.update({f"l/{prompt}": rows for prompt, rows in enumerate(found.get("logits") or ())})
    reply = {
        "hooks": list(captured),
        "new_tokens": [[int(token) for token in tokens] for tokens in found.get("new_tokens") or ()],
        "stats": dict(found.get("stats") or {}),
        "seconds": seconds,
    }
    return reply, tensors


def answer(connection: Connection) -> None:
    """Say hello, then reply to each message until told to close or the other end is gone."""
    send(connection, {"ok": True, "hello": {"python": platform.python_version(), "pid": os.getpid()}})
    backend: Any = None
    while True:
        try:
            header, tensors = receive(connection)
        except EOFError:
            return
        try:
            if header["op"] == "boot":
                backend, reply = boot(header)
                send(connection, {"ok": True, **reply})
            elif header["op"] == "run":
                reply, values = run(backend, header, tensors)
                send(connection, {"ok": True, **reply}, values)
            else:
                if backend is not None and hasattr(backend, "close"):
                    backend.close()
                send(connection, {"ok": True})
                return
        except BaseException as error:  # noqa: BLE001 - reported to the harness, which charges it to the backend
            traceback.print_exc()
            sys.stderr.flush()
            ending = isinstance(error, (KeyboardInterrupt, SystemExit))
            told = {"type": type(error).__name__, "message": str(error)}
            send(connection, {"ok": False, "error": told, "ending": ending})
            if ending:
                return


def main() -> None:
    """Serve the socket named on the command line."""
    connection = Connection(int(sys.argv[1]))
    # A child that the backend forks would keep it open, and nobody would see this process die.
    os.register_at_fork(after_in_child=connection.close)
    answer(connection)
    sys.stdout.flush()
    sys.stderr.flush()
    # Engines hang in their own clean-up now and then; nothing of value is left to do.
    os._exit(0)


if __name__ == "__main__":
    main()
