"""How much memory an instrumented engine takes beside a plain one, from its specs alone.

Per rank and point, with s tokens per step, w numbers per row on this rank, b bytes each and p programs of edits:

- **rows**, the step buffer: (s + 1) · w · b;
- **tables** of edits: 8 + (p + 1) · 4 (w + 16), where p > 0 or not;
- and once per rank the **index** of rows and of programs: 2 · 8 · (2 s + 64).

While a step runs, a tap holds at most the rows it edits, at the model's dtype and four times at fp32 (before, what is
added, scaled, after): s · w · (b + 16), one tap at a time. What is captured waits on the host until it is read: per
token Σ w · b over the points asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.points import EMBED, FINAL_NORM, HookPoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.geometry import Geometry
    from harness.vllm.overlays import TapSpec

__all__ = ["MemoryPlan", "RankMemory", "plan_memory", "stage_of_blocks"]

#: Bytes of a fire counter, a number of an edit table and a number of a row table.
_FIRES, _FLOAT, _INDEX = 8, 4, 8
#: Numbers of an edit table's row before those that are added; not read from the taps, whose size it foretells.
_HEAD = 16


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    Attributes:
        stage, tensor: where the rank stands.
        points: taps it holds.
        rows: step buffers.
        tables: edit tables and counters.
        index: row tables that all taps share.
        transient: most that a tap holds beside while a step runs.
        per_token: captured bytes that wait per token, if every point is asked for.
        kv_cache: keys and values of one request of full length.
    """

    stage: int
    tensor: int
    points: int
    rows: int
    tables: int
    index: int
    transient: int
    per_token: int
    kv_cache: int

    @property
    def state(self) -> int:
        """What taps hold from boot to close."""
        return self.rows + self.tables + self.index


@dataclass(frozen=True)
class MemoryPlan:
    """Every rank's, in the order an engine numbers them."""

    ranks: tuple[RankMemory, ...]

    @property
    def largest(self) -> RankMemory:
        """The rank whose taps hold most."""
        return max(self.ranks, key=lambda rank: rank.state)


def stage_of_blocks(layers: int, stages: int) -> list[int]:
    """Which pipeline stage each block is on, as vLLM cuts them: evenly, the rest from the last but one backwards."""
    sizes = [layers // stages] * stages
    for number in range(layers % stages):
        sizes[-2 - number] += 1
    return [stage for stage, size in enumerate(sizes) for _ in range(size)]


def plan_memory(
    taps: Sequence[TapSpec],
    geometry: Geometry,
    *,
    itemsize: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    max_programs: int,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    tied: bool = False,
    ends_everywhere: bool = False,
) -> MemoryPlan:
    """Predict what the taps of an engine hold.

    Args:
        taps: the points to be installed, see :meth:`harness.vllm.overlays.Overlay.taps`.
        geometry: the model's sizes.
        itemsize: bytes per activation: 4 at fp32, 2 at bf16.
        max_num_batched_tokens: tokens per step.
        max_model_len: longest request.
        max_programs: distinct combinations of edits one call may use.
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: stages the layers are cut into.
        tied: the last stage holds the embedding too, to unembed with it, and a tap on it that never fires.
        ends_everywhere: every stage holds embedding and final norm, see :class:`harness.vllm.overlays.Overlay`.
    """
    last = pipeline_parallel_size - 1
    stages = stage_of_blocks(geometry.layers, pipeline_parallel_size)
    ranks = []
    for stage in range(pipeline_parallel_size):
        too = (EMBED, FINAL_NORM) if ends_everywhere else (EMBED,) if tied and stage == last else ()
        here = [tap for tap in taps if tap.name in too or _stage(tap, stages) == stage]
        for tensor in range(tensor_parallel_size):
            widths = [end - begin for begin, end in (tap.share(tensor, tensor_parallel_size) for tap in here)]
            kv_heads = max(1, geometry.kv_heads // tensor_parallel_size)
            per_token = 2 * stages.count(stage) * kv_heads * geometry.head_dim * itemsize
            ranks.append(
                RankMemory(
                    stage,
                    tensor,
                    len(here),
                    rows=sum((max_num_batched_tokens + 1) * width * itemsize for width in widths),
                    tables=sum(_FIRES + (max_programs + 1) * _FLOAT * (_HEAD + width) for width in widths),
                    index=2 * _INDEX * (2 * max_num_batched_tokens + 64),
                    transient=max_num_batched_tokens * max(widths, default=0) * (itemsize + 4 * _FLOAT),
                    per_token=sum(widths) * itemsize,
                    kv_cache=per_token * max_model_len,
                )
            )
    return MemoryPlan(tuple(ranks))


def _stage(tap: TapSpec, stages: Sequence[int]) -> int:
    point = HookPoint.parse(tap.name)
    return (0, stages[point.block], stages[-1])[point.stage]
