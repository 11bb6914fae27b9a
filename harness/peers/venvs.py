"""A peer's own environment: a venv that holds only what the shared one has not, and sees that one behind it.

So each peer runs on the same torch and, unless it asks for another, the same transformers and vLLM; a venv takes
megabytes, and what it pins for itself comes before what it shares.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.peers.catalogue import Peer

__all__ = ["Venv", "make_venv", "read_pins"]

STAMP = "installed.json"
#: Not a release of any peer's: a Python for which a pin that refuses this one can be resolved.
_LATER_PYTHON = "3.12"
_TIMEOUT = 900.0
#: What uv draws its trees with.
_DRAWN = " \N{MULTIPLICATION SIGN}╰─▶│├"
_NOT_THE_REASON = ("hint:", "warning:", "error:", "No solution found")
_CONCLUSION = ", we can conclude that your requirements are unsatisfiable"


@dataclass(frozen=True)
class Venv:
    """An interpreter that has the peer.

    Attributes:
        python: its interpreter.
        note: what had to be overruled to get it in, or nothing.
    """

    python: Path
    note: str = ""


def read_pins(file: Path) -> list[str]:
    """The pins of a requirements file: names and versions only.

    Raises:
        UsageError: there is no such file, or a line that is no exact pin.
    """
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        msg = f"cannot read {file}: {error.strerror or error}"
        raise UsageError(msg) from error
    pins = [line for line in lines if line and not line.startswith("#")]
    if wrong := [pin for pin in pins if "==" not in pin or "/" in pin or " " in pin]:
        msg = f"{file} must hold names and exact versions only, and has {wrong[0]!r}"
        raise UsageError(msg)
    return pins


def make_venv(
    peer: Peer, requirements: Path, folder: Path, *, uv: str | None = None, torch_index: str | None = None
) -> Venv:
    """Make the peer's environment below ``folder``, or find it complete.

    Args:
        peer: whose.
        requirements: the folder with a file of pins per environment.
        folder: where environments lie; one per content of the pins.
        uv: the uv to install with; by default the one on PATH.
        torch_index: asked for a peer's own torch where the configured indexes have no such build.

    Raises:
        UsageError: no uv, or pins that are none.
        EngineError: it could not be installed; the message is uv's own.
    """
    if peer.requirements is None:
        return Venv(Path(sys.executable))
    pins = read_pins(requirements / f"{peer.requirements}.txt")
    key = hashlib.sha256("\n".join([*pins, sys.prefix]).encode()).hexdigest()[:8]
    venv = folder / f"{peer.requirements}-{key}"
    python, stamp = venv / "bin" / "python", venv / STAMP
    if stamp.is_file() and python.is_file():
        return Venv(python, json.loads(stamp.read_text(encoding="utf-8"))["note"])
    uv = uv or shutil.which("uv")
    if uv is None:
        msg = "peers are installed with uv, which is not on PATH: `pip install uv` where nox is, or name it with --uv"
        raise UsageError(msg)
    shutil.rmtree(venv, ignore_errors=True)
    _uv(uv, "venv", "--quiet", "--no-project", "--python", sys.executable, str(venv))
    site = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "_shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    install = ("pip", "install", "--quiet", "--no-deps")
    here = (*install, "--compile-bytecode", "--python", str(python))
    note = ""
    if torch := [pin for pin in pins if pin.startswith("torch==")]:
        _torch(uv, here, torch, torch_index)
    forced = [pin for pin in pins if pin.split("==")[0] in peer.forced]
    if others := [pin for pin in pins if pin not in (*torch, *forced)]:
        _uv(uv, *here, *others)
    for pin in forced:
        try:
            _uv(uv, *here, pin)
        except EngineError as error:
            note = f"installed against its own requirements ({error})"
            _uv(uv, *install, "--python-version", _LATER_PYTHON, "--target", str(site), pin)
    stamp.write_text(json.dumps({"note": note}), encoding="utf-8")
    return Venv(python, note)


def _torch(uv: str, here: Sequence[str], pins: Sequence[str], index: str | None) -> None:
    """A peer's own torch: from the configured indexes, else from `index`.

    Raises:
        EngineError: neither has it; with what the first said.
    """
    try:
        _uv(uv, *here, *pins)
    except EngineError as error:
        if index is None:
            raise
        try:
            _uv(uv, *here, "--index-url", index, *pins)
        except EngineError:
            msg = f"{error} (PyTorch's own index was asked too, to no avail)"
            raise EngineError(msg) from error


def _uv(uv: str, *arguments: str) -> None:
    """Run it.

    Raises:
        EngineError: it failed; in its words.
    """
    environment: dict[str, str] = {**os.environ, "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    try:
        done = subprocess.run(
            [uv, *arguments],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
            timeout=_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        msg = f"uv {' '.join(arguments[:2])}: {error}"
        raise EngineError(msg) from error
    if done.returncode:
        raise EngineError(_reason(done.stderr.splitlines()) or f"uv ended with {done.returncode}")


def _reason(lines: Sequence[str]) -> str:
    """What uv says went wrong, on one line, without its drawings, its hints and the conclusion everybody draws."""
    kept = [line.strip(_DRAWN).removeprefix("cause:").strip() for line in lines]
    text = " ".join(line for line in kept if line and not line.startswith(_NOT_THE_REASON))
    text = text.removesuffix(".").removesuffix(_CONCLUSION)
    return text.strip(" :") or " ".join(kept).strip()
