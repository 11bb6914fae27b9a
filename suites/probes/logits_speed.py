"""How fast logits are rebuilt against a bare fp32 matrix product of the same size, and what memory that takes.

    python -m suites.probes.logits_speed [rows] [vocabulary] [width]

Paired and interleaved; prints medians, their ratio, and the peak of resident memory above result and weight.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time

import psutil
import torch

from harness.vllm.logits import Unembedding

REPEATS = 9


def timed(run):
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def peak_above(run):
    """Largest resident memory while ``run`` runs, above that before it, in MiB."""
    process, done, peak = psutil.Process(), threading.Event(), [0]

    def watch():
        while not done.wait(0.001):
            peak[0] = max(peak[0], process.memory_info().rss)

    before = process.memory_info().rss
    thread = threading.Thread(target=watch)
    thread.start()
    run()
    done.set()
    thread.join()
    return (peak[0] - before) / 2**20


def main():
    rows, vocabulary, width = (int(a) for a in (*sys.argv[1:], *("256", "49152", "576")[len(sys.argv) - 1 :]))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator)
    out = torch.zeros(rows, vocabulary)
    for name, unembedding, given in (
        ("fp32", Unembedding(weight), hidden),
        ("bf16 rows", Unembedding(weight), hidden.bfloat16()),
        ("soft-cap and scale", Unembedding(weight, None, 30.0, 0.5), hidden),
    ):
        bare, rebuilt = [], []
        for _ in range(REPEATS):
            bare.append(timed(lambda: torch.mm(hidden, weight.T, out=out)))
            rebuilt.append(timed(lambda u=unembedding, g=given: u.logits(g, out=out)))
        speed = statistics.median(bare) / statistics.median(rebuilt)
        extra = peak_above(lambda u=unembedding, g=given: u.logits(g, out=out))
        print(
            f"{name}: {rows} rows, {vocabulary} x {width}: bare {statistics.median(bare):.4f} s, rebuilt "
            f"{statistics.median(rebuilt):.4f} s, speed {speed:.2f} of the bare product, {extra:.1f} MiB extra"
        )


if __name__ == "__main__":
    main()
