"""``python launch.py MODULE``: boot the peer of MODULE, then answer one JSON line on stdout per JSON line on stdin.

First comes the task: ``checkpoint``, ``dtype``, ``threads``, ``prompts`` (name → lists of token ids), ``micro_batch``,
``max_model_len``, ``max_num_batched_tokens``. Then commands: ``{"collect": name}``, ``{"plain": name}``, and
``{"save": file, "prompts": n}``, which writes what was collected last. The end of stdin ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

__all__ = ["Answers", "Runner", "main"]


class Runner(Protocol):
    """One peer, booted."""

    #: Distributions whose versions are reported.
    packages: tuple[str, ...]

    def collect(self, prompts: Sequence[Sequence[int]]) -> Any:
        """Run the prompts and bring every block's residual stream into this process, in the peer's own form."""

    def plain(self, prompts: Sequence[Sequence[int]]) -> None:
        """The same forward with nothing collected."""

    def residuals(self, collected: Any, prompt: int) -> Mapping[int, torch.Tensor]:
        """One prompt's rows of what was collected: block → (length, width). Not timed."""


class Answers:
    """Carries out commands on one runner."""

    def __init__(self, runner: Runner, prompts: Mapping[str, Sequence[Sequence[int]]]) -> None:
        self._runner = runner
        self._prompts = prompts
        self._collected: Any = None

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """What to reply to one command; ``seconds`` are of the peer's own calls alone."""
        if "collect" in command:
            self._collected = None  # what the last one holds is freed outside the measured time
            prompts = self._prompts[command["collect"]]
            started = time.perf_counter()
            self._collected = self._runner.collect(prompts)
            return {"seconds": time.perf_counter() - started}
        if "plain" in command:
            prompts = self._prompts[command["plain"]]
            started = time.perf_counter()
            self._runner.plain(prompts)
            return {"seconds": time.perf_counter() - started}
        return {"blocks": self._save(command["save"], command["prompts"])}

    def _save(self, file: str, prompts: int) -> list[int]:
        from safetensors.torch import save_file

        blocks: set[int] = set()
        tensors: dict[str, torch.Tensor] = {}
        for prompt in range(prompts):
            rows = self._runner.residuals(self._collected, prompt)
            blocks |= set(rows)
            tensors |= {f"{prompt}/{block}": value.clone().contiguous() for block, value in rows.items()}
        save_file(tensors, file)
        return sorted(blocks)


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those of the distributions that are there."""
    found = {}
    for package in ("torch", "transformers", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe(error: BaseException) -> str:
    """One line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def end() -> NoReturn:
    """End, and everything that was started with it: an engine's own processes outlive a front end that just leaves."""
    sys.stderr.flush()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def commands(lines: Iterable[str]) -> Iterator[str]:
    """Lines as they come; read by a thread, so that the end of stdin ends even what is in the middle of a forward."""
    waiting: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in lines:
            waiting.put(line)
        end()

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield waiting.get()


def main(module: str) -> None:
    """Serve until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to the log

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    lines = commands(sys.stdin)
    try:
        task = json.loads(next(lines))
        started = time.perf_counter()
        import torch

        torch.set_num_threads(task["threads"])
        runner: Runner = importlib.import_module(module).boot(task)
        answers = Answers(runner, task["prompts"])
        reply({"boot_seconds": time.perf_counter() - started, "versions": installed(runner.packages)})
        for line in lines:
            try:
                reply(answers.answer(json.loads(line)))
            except Exception as error:  # noqa: BLE001 - reported to the driver; the peer may still do other things
                traceback.print_exc()
                reply({"error": describe(error)})
    except BaseException as error:  # noqa: BLE001 - a peer that cannot boot raises anything
        traceback.print_exc()
        reply({"error": describe(error)})
    end()


if __name__ == "__main__":
    # The folder above is looked in for this package alone, since it holds modules with everyday names.
    here = Path(__file__).resolve().parent
    sys.path[0] = str(here.parent)
    importlib.import_module(here.name)
    sys.path.pop(0)
    main(f"{here.name}.{sys.argv[1]}")
