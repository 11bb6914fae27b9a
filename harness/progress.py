"""What a person sees while an engine boots: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from rich.status import Status

    from harness.backend import BootConfig

__all__ = ["BootProgress"]

_PLAIN_EVERY_S = 20.0


class BootProgress:
    """Shows the boot that is going on.

    Args:
        uncaptured: a context in which the terminal is really written to (pytest captures it otherwise).
        is_tty: live line or plain ones; None asks the console.
    """

    def __init__(self, uncaptured: Any, *, is_tty: bool | None = None) -> None:
        self._uncaptured = uncaptured
        self._is_tty = is_tty
        self._status: Status | None = None
        self._last = 0.0

    @contextlib.contextmanager
    def watch(self, config: BootConfig) -> Iterator[None]:
        """Surround a boot."""
        context: AbstractContextManager[Any] = self._uncaptured()
        with context:
            console = Console()
            live = console.is_terminal if self._is_tty is None else self._is_tty
            started = time.monotonic()
            if not live:
                print(f"\n[{time.strftime('%H:%M:%S')}] booting {config.id}", flush=True)  # noqa: T201
                self._last = started
                yield
                took = time.monotonic() - started
                print(f"[{time.strftime('%H:%M:%S')}] {config.id}: {took:.1f} s", flush=True)  # noqa: T201
                return
            console.print()
            with console.status(f"booting {config.id}") as self._status:
                yield
            self._status = None
            console.print(f"[dim]{config.id} booted in {time.monotonic() - started:.1f} s[/dim]")

    def tick(self, config: BootConfig, seconds: float) -> None:
        """Show how long it has been."""
        if self._status is not None:
            self._status.update(f"booting {config.id} … {seconds:.0f} s")
        elif time.monotonic() - self._last > _PLAIN_EVERY_S:
            self._last = time.monotonic()
            print(f"[{time.strftime('%H:%M:%S')}] booting {config.id}: {seconds:.0f} s so far", flush=True)  # noqa: T201
