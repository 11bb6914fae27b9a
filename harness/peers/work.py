"""What all peers are given: the same token ids, and an environment with the same cores."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

__all__ = ["make_task", "peer_environment", "ragged_lengths", "waited_seconds"]

RAGGED, SHORTEST, LONGEST, PREFILL = 64, 5, 120, 511
_STEP = 2048


def ragged_lengths(seed: int = 0) -> list[int]:
    """Sixty-four lengths from 5 to 120, evenly spread and in no order."""
    lengths = [SHORTEST + round(number * (LONGEST - SHORTEST) / (RAGGED - 1)) for number in range(RAGGED)]
    random.Random(seed).shuffle(lengths)  # noqa: S311 - reproducible, not secret
    return lengths


def make_task(
    checkpoint: Path, *, dtype: str, threads: int, micro_batch: int, vocabulary: int
) -> dict[str, Any]:
    """What ``runners/launch.py`` reads first.

    Token ids are seeded: what a forward costs does not depend on what they say.
    """
    rng = random.Random(1)  # noqa: S311 - reproducible, not secret

    def ids(length: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(length)]

    ragged = [ids(length) for length in ragged_lengths()]
    return {
        "checkpoint": os.fspath(checkpoint),
        "dtype": dtype,
        "threads": threads,
        "micro_batch": micro_batch,
        "max_model_len": PREFILL + 1,
        "max_num_batched_tokens": _STEP,
        "prompts": {"ragged": ragged, "prefill": [ids(PREFILL)], "warm-up": ragged[:8]},
    }


def peer_environment(threads: int, plugins: str = "") -> dict[str, str]:
    """Variables that give every peer the same cores, and an engine no plugin but its own.

    vLLM on CPU keeps a core back for its front end and would compute on the others alone; here it gets all of them, as
    torch does.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": plugins,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def waited_seconds() -> float | None:
    """Seconds since the machine started in which something runnable waited for a core; None where nobody counts."""
    try:
        text = Path("/proc/pressure/cpu").read_text(encoding="ascii")
        return int(text.split("total=")[1].split()[0]) / 1e6
    except (OSError, ValueError, IndexError):
        return None
