"""Engines in their own processes: booted once per key, supervised, killed with everything they started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from harness.capabilities import FULL, Capabilities
from harness.errors import CaptureError, EngineError, HarnessError, UndeclaredError, UsageError
from harness.host import serve
from harness.interventions import plain_specs
from harness.transport import receive, send, unpack_result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from harness.backend import BootConfig
    from harness.results import ForwardResult

__all__ = ["ENVIRONMENT", "Engine", "EnginePool", "Listener"]

#: Defaults of an engine's process; what the caller's environment says wins.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_AOT_COMPILE": "0",
}
_ERRORS = {"usage": UsageError, "undeclared": UndeclaredError, "capture": CaptureError}
_LOG_TAIL_LINES = 15


class Listener(Protocol):
    """Who wants to know what the pool is doing (the progress line, the records)."""

    def boot_started(self, config: BootConfig) -> contextlib.AbstractContextManager[None]:
        """Surrounds a boot."""

    def booting(self, config: BootConfig, seconds: float) -> None:
        """Called about once a second while an engine boots."""

    def booted(
        self, config: BootConfig, describe: dict[str, Any] | None, error: str | None, log: Path
    ) -> None:
        """Called once when a boot ends, well or not."""


class Engine:
    """A live engine; the same calls as a :class:`~harness.backend.Backend`, answered by its process."""

    def __init__(
        self, config: BootConfig, process: Any, connection: Any, log: Path, step_timeout: float
    ) -> None:
        self.config = config
        self.log = log
        self.describe: dict[str, Any] = {}
        self.supported_hook_points: list[str] = []
        self.non_fireable_hook_points: dict[str, str] = {}
        self.capabilities: Capabilities = FULL
        self._process = process
        self._connection = connection
        self._step_timeout = step_timeout
        self._killed = False

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return bool(self._process.is_alive())

    @property
    def pid(self) -> int:
        """Process id, which is also its process group's."""
        return int(self._process.pid)

    def forward(self, input_ids: Sequence[Sequence[int]], **kwargs: Any) -> ForwardResult:
        """See :meth:`harness.backend.Backend.forward`."""
        # Tensors and arrays as lists: what is said to an engine is JSON. What it means is judged over there.
        kwargs = {name: plain_specs(value) for name, value in kwargs.items()}
        header, tensors = self.request(
            "forward", self._step_timeout, input_ids=plain_specs(input_ids), **kwargs
        )
        return unpack_result(header, tensors)

    def raw_logits(self, input_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[torch.Tensor]:
        """See :meth:`harness.backend.Backend.raw_logits`."""
        return self._logits("raw_logits", input_ids, **kwargs)

    def worker_logits(self, input_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logits by the model's own ``compute_logits`` inside the worker, (n_prompt, d_vocab) each."""
        return self._logits("worker_logits", input_ids)

    def _logits(
        self, operation: str, input_ids: Sequence[Sequence[int]], **kwargs: Any
    ) -> list[torch.Tensor]:
        header, tensors = self.request(
            operation, self._step_timeout, input_ids=plain_specs(input_ids), **kwargs
        )
        return [tensors[str(i)] for i in range(header["count"])]

    def layout(self) -> dict[str, Any]:
        """Which rank serves which hook, as far as captures have been verified."""
        header, _ = self.request("layout", self._step_timeout)
        found: dict[str, Any] = header["layout"]
        return found

    def memory(self) -> dict[str, Any]:
        """Bytes the engine's process holds, and those of the taps of each rank.

        See :func:`harness.budgets.measure.measure_memory`.
        """
        header, _ = self.request("memory", self._step_timeout)
        found: dict[str, Any] = header["memory"]
        return found

    def forward_memory(self, input_ids: Sequence[Sequence[int]], **kwargs: Any) -> dict[str, int]:
        """Run a forward, throw its result away, and say how far memory rose above what was held before it.

        Returns:
            Bytes: ``resident`` of the engine's process and, on CUDA, ``allocated`` by its device allocator.
        """
        kwargs = {name: plain_specs(value) for name, value in kwargs.items()}
        header, _ = self.request(
            "forward_memory", self._step_timeout, input_ids=plain_specs(input_ids), **kwargs
        )
        found: dict[str, int] = header["memory"]
        return found

    def get_param(self, name: str) -> torch.Tensor | None:
        """A parameter of the engine's model by its dot path, joined over ranks; None where no rank has it."""
        _, tensors = self.request("get_param", self._step_timeout, name=name)
        return tensors.get("param")

    def request(
        self, operation: str, timeout: float, **arguments: Any
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Ask the engine's process for something.

        Raises:
            UsageError, CaptureError, EngineError: as raised there; EngineError too when it died or was too slow, in
                which case everything it had started is gone as well.
        """
        self._send({"op": operation, "arguments": arguments})
        try:
            return self._reply(operation, timeout)
        except (UsageError, CaptureError, EngineError):
            raise
        except BaseException:  # Ctrl-C too: the reply would be taken for that of the next call
            self.kill()
            raise

    def _boot(self, timeout: float, tick: Callable[[float], None]) -> None:
        self._send({"op": "boot", "config": self.config.to_json()})
        header, _ = self._reply("boot", timeout, tick)
        self.describe = header["describe"]
        self.supported_hook_points = header["supported"]
        self.non_fireable_hook_points = header["non_fireable"]
        self.capabilities = Capabilities.read(header["capabilities"], self.config.backend_name)

    def _send(self, header: dict[str, Any]) -> None:
        try:
            send(self._connection, header)
        except (BrokenPipeError, OSError):
            self._fail(f"is gone ({self._exit()})")

    def _reply(
        self, operation: str, timeout: float, tick: Callable[[float], None] | None = None
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        started = time.monotonic()
        while True:
            ready = wait([self._connection, self._process.sentinel], timeout=1.0)
            elapsed = time.monotonic() - started
            if self._connection in ready:
                break
            if ready:
                self._fail(f"died during {operation} after {elapsed:.0f} s ({self._exit()})")
            if elapsed > timeout:
                self._fail(f"did not finish {operation} within {timeout:.0f} s and was killed")
            if tick is not None:
                tick(elapsed)
        try:
            header, tensors = receive(self._connection)
        except (EOFError, OSError):
            self._fail(f"died during {operation} ({self._exit()})")
        if not header["ok"]:
            error = header["error"]
            message = error["message"] if error["kind"] in _ERRORS else self._with_log(error["message"])
            if header.get("lost"):
                self.kill()  # what it stood for is gone; the next who asks gets a fresh one
            raise _ERRORS.get(error["kind"], EngineError)(message)
        return header, tensors

    def _exit(self) -> str:
        self._process.join(2)
        code = self._process.exitcode
        if code is None:
            return "its pipe closed"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _with_log(self, message: str) -> str:
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        except OSError:
            lines = []
        return "\n".join([message, f"last lines of {self.log}:", *(f"  {line}" for line in lines)])

    def _fail(self, what: str) -> NoReturn:
        self.kill()
        raise EngineError(self._with_log(f"engine {self.config.id} {what}"))

    def close(self, timeout: float = 20.0) -> None:
        """Ask it to stop, then make sure; safe to call twice."""
        with contextlib.suppress(EngineError, UsageError, CaptureError, OSError):
            if self.alive:
                self.request("close", timeout)
                self._process.join(timeout)
        self.kill()

    def kill(self) -> None:
        """Kill the process and all it started, now; safe to call twice."""
        if self._killed:
            return  # its id may belong to somebody else by now
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join(10)
        self._connection.close()


class EnginePool:
    """Boots engines on demand and keeps the last few alive.

    Args:
        log_folder: one log file per engine goes there.
        max_live: engines alive at once; the one used longest ago makes room.
        boot_timeout, step_timeout: seconds before an engine counts as hung.
        listener: told about boots.
    """

    def __init__(
        self,
        log_folder: Path,
        *,
        max_live: int = 2,
        boot_timeout: float = 600.0,
        step_timeout: float = 300.0,
        listener: Listener | None = None,
    ) -> None:
        self._log_folder = log_folder
        self._max_live = max_live
        self._boot_timeout = boot_timeout
        self._step_timeout = step_timeout
        self._listener = listener
        self._live: dict[str, Engine] = {}
        self._failed: dict[str, HarnessError] = {}
        # A server process that has imported torch and vLLM once; each engine is forked from it before any thread runs.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["harness.preload"])

    def get(self, config: BootConfig) -> Engine:
        """The live engine for ``config``, booted if need be.

        Raises:
            EngineError: it did not boot, now or earlier in this run (it is not tried twice). A refusal counts: what a
                caller can know beforehand has been checked before the first boot.
            UndeclaredError: its backend does not declare such a mode, or ranks.
        """
        key = config.to_json()
        engine = self._live.pop(key, None)
        if engine is not None and engine.alive:
            self._live[key] = engine  # most recently used last
            return engine
        if engine is not None:
            engine.kill()  # it died between calls; what it had started may live
        if key in self._failed:
            raise type(self._failed[key])(str(self._failed[key]))
        while len(self._live) >= self._max_live:
            self._live.pop(next(iter(self._live))).close()
        try:
            self._live[key] = self.boot(config)
        except (EngineError, UsageError) as error:
            kind = UndeclaredError if isinstance(error, UndeclaredError) else EngineError
            self._failed[key] = kind(str(error))
            raise kind(str(error)) from error
        return self._live[key]

    def boot(self, config: BootConfig) -> Engine:
        """Boot an engine that the pool does not keep; the caller closes it."""
        watch = contextlib.nullcontext() if self._listener is None else self._listener.boot_started(config)
        with watch:
            return self._boot(config)

    def _boot(self, config: BootConfig) -> Engine:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        log = self._log_folder / f"{config.id}.log"
        ours, theirs = self._context.Pipe()
        environment = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
        process = self._context.Process(target=serve, args=(theirs, str(log), environment), name=config.id)
        with _environment(environment):
            process.start()
        theirs.close()
        engine = Engine(config, process, ours, log, self._step_timeout)
        try:
            engine._boot(self._boot_timeout, lambda seconds: self._tell_booting(config, seconds))  # noqa: SLF001
        except BaseException as error:  # Ctrl-C too must leave no engine behind, and no boot without an end
            engine.kill()
            self._tell_booted(config, None, str(error) or type(error).__name__, log)
            raise
        self._tell_booted(config, engine.describe, None, log)
        return engine

    def _tell_booting(self, config: BootConfig, seconds: float) -> None:
        if self._listener is not None:
            self._listener.booting(config, seconds)

    def _tell_booted(
        self, config: BootConfig, describe: dict[str, Any] | None, error: str | None, log: Path
    ) -> None:
        if self._listener is not None:
            self._listener.booted(config, describe, error, log)

    def close(self) -> None:
        """Close every engine; safe to call twice."""
        while self._live:
            self._live.popitem()[1].close()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Any:
    """Set variables while the fork server may be started, which freezes the environment it sees."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
