"""``vllm-parity plan``: what taps will hold in an engine, before one boots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.cli.codes import OK
from harness.errors import UsageError

if TYPE_CHECKING:
    import argparse

__all__ = ["ABOUT", "HELP", "add_arguments", "run"]

HELP = "say what taps will hold in an engine, before one boots"
ABOUT = "Bytes per rank, from the model's config and the specs alone; no weight is loaded."

#: From here on `plan` advises to ask for less, bytes.
_LARGE_CACHE = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine that is asked about."""
    parser.add_argument("model", metavar="MODEL", help="bundled name, checkpoint folder or Hugging Face id")
    parser.add_argument("--dtype", help="of the engine; the checkpoint's own by default")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument(
        "--hooks",
        nargs="+",
        metavar="PATTERN",
        help="points to install, as hook_points of boot_vllm; 'every' for all of them",
    )
    parser.add_argument("--step", type=int, default=2048, help="tokens per step (max_num_batched_tokens)")
    parser.add_argument("--max-model-len", type=int, help="longest request; the model's own limit by default")
    parser.add_argument(
        "--edits", type=int, default=16, help="programs of edits (max_edit_programs); 0 for none"
    )


def run(arguments: argparse.Namespace) -> int:
    """Two lines per rank, and advice where one number is large.

    Raises:
        UsageError: no engine could be booted like that.
    """
    import torch

    from harness.budgets import plan_memory
    from harness.geometry import Geometry
    from harness.models import resolve
    from harness.vllm.boot import check_boot, chosen_taps
    from harness.vllm.overlays import get_overlay

    path = str(resolve(arguments.model).fetch_config())
    config, spec, dtype, length = check_boot(
        path,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        tensor_parallel_size=arguments.tp,
        pipeline_parallel_size=arguments.pp,
        planned=True,
    )
    if arguments.step < 1 or arguments.edits < 0:
        msg = f"--step is from 1 and --edits from 0, not {arguments.step} and {arguments.edits}"
        raise UsageError(msg)
    hooks = "every" if arguments.hooks == ["every"] else arguments.hooks
    plan = plan_memory(
        chosen_taps(spec, hooks, config, arguments.tp),
        Geometry.of(config),
        itemsize=getattr(torch, dtype).itemsize,
        max_num_batched_tokens=arguments.step,
        max_model_len=length,
        max_programs=arguments.edits,
        tensor_parallel_size=arguments.tp,
        pipeline_parallel_size=arguments.pp,
        tied=config.tie_word_embeddings,
        ends_everywhere=get_overlay(config.architectures[0]).ends_everywhere,
    )
    print(
        f"{arguments.model} at {dtype}, {arguments.step} tokens per step, {arguments.edits} programs of edits"
    )
    for rank in plan.ranks:
        parts = f"step buffers {_size(rank.rows)}, edit tables {_size(rank.tables)}, row tables {_size(rank.index)}"
        print(f"pp{rank.stage}/tp{rank.tensor}: {rank.points} points hold {_size(rank.state)} ({parts})")
        print(
            f"  {_size(rank.transient)} more while a step runs, {_size(rank.per_token)} per captured token; "
            f"keys and values of one request of {length} tokens {_size(rank.kv_cache)}"
        )
    if plan.largest.kv_cache > _LARGE_CACHE and length > 2048:
        print(
            f"a request of {length} tokens is long: max_model_len=2048 would need "
            f"{_size(plan.largest.kv_cache * 2048 // length)} of KV cache"
        )
    if plan.largest.rows > _LARGE_CACHE:
        print(
            "step buffers grow with max_num_batched_tokens and with the points installed: lower one of them"
        )
    return OK


def _size(n_bytes: int) -> str:
    """Bytes as a person reads them, in powers of 1024."""
    value, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
