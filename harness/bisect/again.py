"""Shows what is wrong by itself in one call: it is run again and again, with the truth put in at more points each time.

Needs the `harness` package and what the run had. Reads `call.json` and `truth.safetensors` beside it: the token ids,
and the truth's values, one row per point. Ends with 1 where the fault is still there, with 0 where it is gone.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from harness.backend import BootConfig, load_backend
from harness.pool import ENVIRONMENT

HERE = Path(__file__).parent


def main() -> int:
    """Boot the engine, run the call three times, print errors over bounds."""
    call = json.loads((HERE / "call.json").read_text(encoding="utf-8"))
    truth = load_file(HERE / "truth.safetensors")
    os.environ.update(ENVIRONMENT | dict(os.environ))
    from harness.models import resolve

    config = BootConfig.from_json(json.dumps(call["engine"]))
    engine = load_backend(config.backend).boot(replace(config, path=str(resolve(config.model).fetch())))
    request, position = call["row"]
    hooks = list(call["bounds"])

    def run(healed: list[str]) -> dict[str, float]:
        specs: list[dict[str, Any]] = [
            dict(one or {}) for one in call["intervene"] or [None] * len(call["prompts"])
        ]
        for hook in healed:
            specs[request][hook] = {"op": "set", "value": truth[hook].float(), "pos": position}
        more = {"max_new_tokens": call["new_tokens"]}
        if call["disturbed"]:
            engine.forward([ids[::-1] for ids in call["prompts"]], capture=hooks, **more)
        captured = engine.forward(call["prompts"], capture=hooks, intervene=specs, **more)
        rows = {hook: captured.rows(hook, request)[position].flatten().double() for hook in hooks}
        return {
            h: float((row - truth[h].double()).norm() / truth[h].double().norm()) for h, row in rows.items()
        }

    runs = [run(healed) for healed in call["healed"]]
    for number, healed in enumerate(call["healed"]):
        print(f"run {number}: the truth put in at {', '.join(healed) or 'no point'}")  # noqa: T201
    print(f"row {position} of request {request}, error over its bound; above 1 is wrong:")  # noqa: T201
    for hook, bound in call["bounds"].items():
        shares = "".join(f"{one[hook] / bound:>12.3g}" for one in runs)
        print(f"  {hook:<32}{shares}{'   <- ' + call['wrong'][hook] if hook in call['wrong'] else ''}")  # noqa: T201
    engine.close()
    still = any(not runs[int(at)][hook] <= call["bounds"][hook] for hook, at in call["shown_by"].items())
    print("still wrong" if still else "no longer wrong")  # noqa: T201
    return int(still)


if __name__ == "__main__":  # an engine may start processes that import this file again
    raise SystemExit(main())
