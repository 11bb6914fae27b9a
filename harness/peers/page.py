"""A run of peers as a page of the documentation: what was measured, the figure, the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.peers.figure import bar_figure
from harness.peers.record import COLLECT
from harness.peers.text import markdown_table
from harness.report.numbers import count

if TYPE_CHECKING:
    from pathlib import Path

    from harness.peers.record import Run

__all__ = ["page_text", "write_page"]

#: Rounds from which medians and quartiles say something.
_ENOUGH = 5

_TEXT = """\
# Side by side

What collecting activations costs here and with what one would use instead: the same checkpoint ({model}, {dtype}),
the same token ids, the same {threads} cores, one run, every peer in its own process and, where it needs packages that
the others have not, its own environment. Written by

```
nox -s peers -- --model {model} --dtype {dtype} --page docs/peers.md
```

on {date} UTC: {cpu}, {cores} cores, {memory} GiB.{pressure}

![seconds per peer]({figure})

{table}
## What was measured

- **Ragged batch**: every block's residual stream of {prompts} prompts of {shortest} to {longest} tokens, {tokens}
  tokens together, until all of it is in the process that asked, as CPU tensors. **One long prompt**: the same of
  {prefill} tokens. **Plain**: the same forward with nothing collected, the peer's hooks in place where it has any.
- Seconds are medians of {rounds}.{few} All peers live through the whole run and take turns, so that whatever
  else the machine does meets all of them; ratios are medians of the rounds' own ratios, with their quartiles.
- Engines run eagerly with {step} tokens per step and get all cores: by themselves they would keep one back for their
  front end. Peers on transformers get the prompts sorted by length, {micro_batch} at a time, padded on the right, and
  compute no logits beyond one position.
- **Worst row**: the largest relative error of a row of the first four prompts, in any block, against transformers at
  fp64, one prompt at a time. Up to {bound:g} counts as the right value here; whether it is as near as {dtype} allows
  is what the suites judge.
- **Blocks**: how many of the model's blocks the peer gave the residual stream of.
"""


def page_text(run: Run, *, figure: str) -> str:
    """The page.

    Args:
        run: what was found.
        figure: where the figure lies, as the page names it.
    """
    ragged, prefill = run.lengths["ragged"], run.lengths["prefill"]
    rounds = max((len(peer.seconds(COLLECT, "ragged")) for peer in run.peers), default=0)
    waiting = run.machine.get("waiting_percent")
    pressure = (
        ""
        if waiting is None
        else f" While it ran, something runnable waited for a core {waiting:.0f} % of the time."
    )
    few = ""
    if rounds < _ENOUGH:
        few = f" **That is a first look: {_ENOUGH} rounds were wanted and {rounds} ended in time.**"
    return _TEXT.format(
        model=run.model,
        dtype=run.dtype,
        threads=run.threads,
        date=run.started[:16].replace("T", " "),
        cpu=run.machine.get("cpu", "an unknown CPU"),
        cores=run.machine.get("usable_cores", run.threads),
        memory=run.machine.get("memory_gib", "?"),
        pressure=pressure,
        figure=figure,
        table=markdown_table(run),
        prompts=len(ragged),
        shortest=min(ragged),
        longest=max(ragged),
        tokens=f"{sum(ragged):,}",
        prefill=sum(prefill),
        rounds=count(rounds, "round"),
        few=few,
        step=f"{run.step:,}",
        micro_batch=run.micro_batch,
        bound=run.bound,
    )


def write_page(run: Run, file: Path) -> None:
    """Write the page, and the figure beside it under the same name."""
    figure = file.with_suffix(".svg")
    figure.write_text(bar_figure(run), encoding="utf-8")
    file.write_text(page_text(run, figure=figure.name), encoding="utf-8")
