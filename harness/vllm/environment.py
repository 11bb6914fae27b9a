"""Process environment an engine boots under, set for the boot and put back after it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import TYPE_CHECKING

from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["INSTALL_LINE", "boot_environment", "require_ray", "require_vllm"]

INSTALL_LINE = (
    "`nox -s env` in a clone makes an environment that works on CPU; for CUDA: pip install -e '.[cuda]'"
)


def require_vllm() -> None:
    """Check, without importing it, that vLLM is there.

    Raises:
        UsageError: it is not, with the line that installs it.
    """
    if importlib.util.find_spec("vllm") is None:
        msg = f"vLLM is not installed in this environment: {INSTALL_LINE}"
        raise UsageError(msg)


def require_ray() -> None:
    """Check, without importing it, that Ray is there.

    Raises:
        UsageError: it is not, with the line that installs it.
    """
    if importlib.util.find_spec("ray") is None:
        msg = 'distributed_executor_backend="ray" needs Ray, which is not installed here: pip install ray'
        raise UsageError(msg)


@contextlib.contextmanager
def boot_environment(ranks: int = 1) -> Iterator[None]:
    """Defaults a boot of so many ranks wants; a value the caller has set is never changed.

    vLLM's ahead-of-time artefact is saved but never loads on CPU and costs every boot, so it is off. Inductor's cache
    makes the second boot a warm one, and stays where PyTorch has it: importing vLLM settles that. 33 s cold and 8 s
    warm were measured for a 4-layer Llama on two cores.
    Large pages for PyTorch's own memory spare captured rows most of what fresh memory costs (Linux, CPU): collecting
    276 MB took 0.1 to 0.4 s longer without.
    """
    defaults = {
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    if ranks > 1:
        # On CPU each rank would bind the same cores and start a thread for each of them.
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
