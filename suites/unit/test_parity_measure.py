"""One pass over a hook: every figure against its definition written the slow way, whole and in pieces."""

from __future__ import annotations

import math

import pytest
import torch

from harness.parity import metrics, rows
from harness.parity.measure import RowTable, measure
from harness.parity.types import RowRef

WIDTH, GIANT = 24, 5
LENGTHS = (3, 0, 4)


def side(seed: int, noise: float, truth: list[torch.Tensor]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [(t + noise * torch.randn(t.shape, generator=random, dtype=torch.float64)).float() for t in truth]


@pytest.fixture
def case() -> tuple[list[torch.Tensor], list[torch.Tensor], list[list[torch.Tensor]]]:
    """Engine, truth and two realisations: row 0 has a giant channel, rows 1 and 4 are zero in the truth alone."""
    random = torch.Generator().manual_seed(0)
    truth = [torch.randn(n, WIDTH, generator=random, dtype=torch.float64) for n in LENGTHS]
    truth[0][0, GIANT] = -400
    truth[0][1] = truth[2][1] = 0
    return side(1, 1e-3, truth), truth, [side(2, 2e-3, truth), side(3, 4e-3, truth)]


def flat(tensors: list[torch.Tensor]) -> list[list[float]]:
    return torch.cat(tensors).double().tolist()


def norm(values) -> float:
    return math.sqrt(sum(value * value for value in values))


def without(row: list[float], number: int) -> list[float]:
    return [value for i, value in enumerate(row) if (number, i) != (0, GIANT)]


def median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def errors(x: list[list[float]], truth: list[list[float]]) -> list[float]:
    scales = [norm(t) for t in truth]
    scales = [scale or median([s for s in scales if s]) for scale in scales]
    return [
        norm(p - q for p, q in zip(a, t, strict=True)) / s for a, t, s in zip(x, truth, scales, strict=True)
    ]


def test_figures_are_what_their_names_say(case):
    engine, truth, same = case
    t = measure(engine, truth, same, dtype="float32", slices=3)
    e, exact, r = flat(engine), flat(truth), [flat(one) for one in same]
    scale = [norm(row) or median([norm(other) for other in exact if norm(other)]) for row in exact]

    def rest(x):
        cut = [[without(row, i) for i, row in enumerate(values)] for values in (x, exact)]
        return [errors(*cut)[0], *errors(x, exact)[1:]]

    def energies(x, truth):
        differences = [[p - q for p, q in zip(a, b, strict=True)] for a, b in zip(x, truth, strict=True)]
        return [
            [norm(row[begin:end]) ** 2 / s**2 for begin, end in ((0, 8), (8, 16), (16, 24))]
            for row, s in zip(differences, scale, strict=True)
        ]

    zeros = [[0.0] * WIDTH for _ in exact]
    expected = {
        "norms": [norm(row) for row in exact],
        "engine": errors(e, exact),
        "same": [errors(one, exact) for one in r],
        "engine_rest": rest(e),
        "same_rest": [rest(one) for one in r],
        "truth_slices": energies(exact, zeros),
        "engine_slices": energies(e, exact),
        "same_slices": [energies(one, exact) for one in r],
        "max_abs": [
            max(abs(p - q) for p, q in zip(*pair, strict=True)) for pair in zip(e, exact, strict=True)
        ],
        "ulps": [
            max(abs(p - q) / 2.0 ** (math.frexp(q)[1] - 24) for p, q in zip(*pair, strict=True) if q)
            for pair in zip(e, exact, strict=True)
            if any(pair[1])
        ],
    }
    for name, values in expected.items():
        found = getattr(t, name)
        found = found[[0, 2, 3, 5, 6]] if name == "ulps" else found  # an ulp of zero is no scale
        assert found.dtype == torch.float64
        assert torch.allclose(found, torch.tensor(values, dtype=torch.float64), rtol=1e-9, atol=0), name
    products = [sum(p * q for p, q in zip(*pair, strict=True)) for pair in zip(e, exact, strict=True)]
    cosine = [p / (norm(a) * norm(b)) if any(b) else 0 for p, a, b in zip(products, e, exact, strict=True)]
    assert t.cosine.tolist() == pytest.approx(cosine, rel=1e-12)
    for row, channel in enumerate(t.channel.tolist()):
        assert abs(e[row][channel] - exact[row][channel]) == t.max_abs[row]
    assert (t.lengths, t.width, t.spans) == (LENGTHS, WIDTH, ((0, 8), (8, 16), (16, 24)))
    assert t.massive.tolist() == [True] + 6 * [False]
    assert t.ref(4) == RowRef(2, 1)
    assert not bool((t.zero | t.constant).any())


def test_pieces_give_what_one_piece_gives(case, monkeypatch):
    whole = measure(*case, dtype="bfloat16", slices=8)
    for module in (metrics, rows):
        monkeypatch.setattr(module, "CHUNK", 2 * WIDTH)
    pieces = measure(*case, dtype="bfloat16", slices=8)
    for name, figure in vars(whole).items():
        other = getattr(pieces, name)
        assert torch.equal(figure, other) if isinstance(figure, torch.Tensor) else figure == other, name


def test_ulps_are_those_of_the_engine_dtype(case):
    fine, coarse = (measure(*case, dtype=dtype, slices=1) for dtype in ("float32", "bfloat16"))
    assert torch.equal(fine.ulps[2:4], coarse.ulps[2:4] * 2**16)


def of(*truth: list[float], engine=None) -> RowTable:
    t = torch.tensor(truth, dtype=torch.float64)
    e = t if engine is None else torch.tensor(engine, dtype=torch.float64)
    return measure([e], [t], [[t]], dtype="float32", slices=2)


def test_a_row_is_massive_beside_the_others_or_beside_the_rest_of_itself():
    ten_times = of([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 10, 0], [0, 0, 0, 0])
    assert not bool(ten_times.massive.any())
    assert of([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 10.1, 0]).massive.tolist() == [False, False, True]
    assert of([0] * 4, [0] * 4, [0] * 4, [1, 0, 0, 0], [1, 0, 0, 0], [11, 0, 0, 0]).massive.tolist() == [
        *[False] * 5,
        True,
    ]
    assert of([1e-3, 1e-3, 1e-3, 21e-3]).massive.tolist() == [True]
    assert of([1, 1, 1, 21]).massive.tolist() == [True]  # alone, and hidden are channels of a twelfth
    assert of([1, 1, 1, 19]).massive.tolist() == [False]  # no channel of it is massive
    assert of(*[[1.0] * 63 + [41.0]], engine=[[1.0] * 64]).massive.tolist() == [True]
    assert of(*[[1.0] * 63 + [38.0]]).massive.tolist() == [
        False
    ]  # one is, but hides nothing: 4.9 times the rest
    assert not bool(of([0] * 4).massive.any())


def test_what_is_hidden_by_a_giant_is_measured_without_it():
    t = of([1, 1, 1, 40], [1, 1, 1, 1], engine=[[2, 1, 1, 40], [1, 1, 1, 2]])
    assert t.engine.tolist() == pytest.approx([1 / math.sqrt(1603), 0.5])
    assert t.engine_rest.tolist() == pytest.approx([1 / math.sqrt(3), 0.5])
    wrong_giant = of([1, 1, 1, 40], engine=[[1, 1, 1, 80]])
    assert wrong_giant.engine_rest.tolist() == [0.0]


def test_rows_of_one_value_are_told_from_rows_of_zeros():
    truth = ([1, 2], [1, 2], [1, 2], [3, 3], [0, 0])
    t = of(*truth, engine=[[0, 0], [7, 7], [0, 1], [7, 7], [0, 0]])
    assert t.zero.tolist() == [True, False, False, False, False]
    assert t.constant.tolist() == [False, True, False, False, False]
    narrow = of([3], engine=[[0]])  # of one channel, every row is one value
    assert not bool((narrow.zero | narrow.constant).any())


def test_a_row_that_is_zero_everywhere_has_no_error_and_says_nothing():
    t = of([0, 0], [0, 0])
    assert t.engine.tolist() == t.same[0].tolist() == t.engine_rest.tolist() == [0, 0]
    assert (
        t.truth_slices.tolist() == t.engine_slices.tolist() == t.same_slices[0].tolist() == [[0, 0], [0, 0]]
    )
    assert not bool(t.informative.any())
    stray = of([0, 0], engine=[[0, 1]])
    assert stray.engine.tolist() == [math.inf]
    assert stray.engine_slices.tolist() == [[0, math.inf]]
    assert stray.informative.tolist() == [True]
