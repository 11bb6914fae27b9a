"""What taps may cost, promised from specs alone and measured: memory, and time as ratios within one run.

May import the vocabulary and, for sizes of taps, ``harness.vllm.overlays``; boots nothing.
"""

from __future__ import annotations

from harness.budgets.memory import MemoryPlan, RankMemory, plan_memory
from harness.budgets.throughput import Paired, Sided, paired, sided

__all__ = ["MemoryPlan", "Paired", "RankMemory", "Sided", "paired", "plan_memory", "sided"]
