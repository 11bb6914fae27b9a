"""What the intervention suites share: hooks at three depths, ops of a hook's own size, kinds of positions."""

from __future__ import annotations

import torch

from harness.points import HookPoint
from harness.prompts import of_length


class randn(list):  # noqa: N801 - printed as the call that makes it, so that a shrunk example can be pasted
    """Seeded normal numbers, ``width`` of them, times ``size``."""

    def __init__(self, seed: int, width: int, size: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        super().__init__((torch.randn(width, generator=generator) * size).tolist())
        self.text = f"randn({seed}, {width}, {size!r})"

    def __repr__(self) -> str:
        return self.text


#: Every op with every kind of number, made of a hook's size and width.
OPS = (
    lambda _size, _width: {"op": "suppress"},
    lambda _size, _width: {"op": "scale", "factor": -0.5},
    lambda size, _width: {"op": "add", "value": size},
    lambda size, width: {"op": "add", "value": randn(1, width, size)},
    lambda size, _width: {"op": "set", "value": 0.5 * size},
    lambda size, width: {"op": "set", "value": randn(2, width, size)},
)
#: Every kind of position in a prompt of n tokens: all rows, the first, a middle one, the last, a list, a range.
POSITIONS = (
    lambda _n: None,
    lambda _n: 0,
    lambda n: n // 2,
    lambda n: n - 1,
    lambda n: sorted({n // 3, n - 2}),
    lambda n: list(range(n // 2, n)),
)


def hooks_by_depth(parity) -> list[str]:
    """Each kind of hook that the engine serves, at the first, the middle and the last block."""
    depths = {0, parity.n_layers // 2, parity.n_layers - 1}
    places = {name: HookPoint.parse(name) for name in parity.hook_points}
    return [name for name, point in places.items() if point.stage != 1 or point.block in depths]


class Sizes:
    """How large a hook's values are: the median over rows of their root mean square, measured on the engine."""

    def __init__(self, parity) -> None:
        self._parity = parity
        self._captured = parity.forward([of_length(parity, 20)]).captured

    def of(self, hook: str) -> float:
        """Two digits, so that what is printed is short."""
        if hook not in self._captured:
            self._parity.not_applicable(f"{hook} is not among the points that the backend declares")
        rows = self._captured[hook][0].flatten(1).double()
        return float(f"{float(rows.square().mean(dim=1).sqrt().median()):.2g}")
