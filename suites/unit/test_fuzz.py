"""What callers and processes send, at random: each is read, or refused with one clear error of the documented kind."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.errors import EngineError, UsageError
from harness.interventions import OPS, parse_interventions, plain_specs
from harness.transport import receive, unpack_result
from harness.vllm.wire import decode_specs, decode_tensor, encode_tensor
from suites.unit.fuzzing import one_line

WIDTHS = {"embed.hook_out": 4, "blocks.0.hook_out": 4, "blocks.0.mlp.hook_out": 3}
MISSING = {"unembed.hook_out": "logits are rebuilt"}


class Shy:
    """Cannot even be shown."""

    def __repr__(self) -> str:
        msg = "repr"
        raise ValueError(msg)


class Hostile:
    """Nothing that is done to it ends well; `ran` would be proof that something of it was run."""

    ran = False

    def __reduce__(self) -> Any:
        type(self).ran = True
        return (print, ())

    def tolist(self) -> Any:
        msg = "tolist"
        raise RuntimeError(msg)

    def __eq__(self, _: object) -> bool:
        msg = "eq"
        raise ValueError(msg)

    __hash__ = None  # type: ignore[assignment]


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 9),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.sampled_from([*OPS, "op", "pos", "value", "factor", *WIDTHS, *MISSING]),
    st.sampled_from(
        [Hostile(), len, Hostile, torch.zeros(4), torch.ones(2, 2) > 0, torch.tensor([1j]), range(10**15)]
    ),
    st.builds(lambda a, b: range(a, a + b), st.integers(-2, 5), st.integers(0, 5)),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.tuples(inner, inner),
        st.dictionaries(
            st.one_of(st.text(max_size=5), st.integers(), st.sampled_from([*WIDTHS, *OPS, "op"])), inner
        ),
    ),
    max_leaves=12,
)
specs = st.dictionaries(
    st.sampled_from([*WIDTHS, *MISSING, "blocks.0.hook_outt"]),
    st.one_of(
        anything,
        st.fixed_dictionaries(
            {"op": st.sampled_from(list(OPS))},
            optional={"pos": anything, "value": anything, "factor": anything, "position": anything},
        ),
    ),
    max_size=3,
)


class TestInterventions:
    @given(st.one_of(anything, specs, st.lists(specs, max_size=3)))
    @settings(max_examples=150)
    def test_a_spec_is_read_or_refused(self, intervene):
        try:
            requests = parse_interventions(intervene, widths=WIDTHS, nonfireable=MISSING, lengths=[3, 5])
        except UsageError as error:
            one_line(error)
        else:
            assert len(requests) == 2
            for edits, length in zip(requests, (3, 5), strict=True):
                for edit in edits:
                    assert edit.hook in WIDTHS
                    assert math.isfinite(edit.scale)
                    assert bool(torch.isfinite(edit.bias).all())
                    assert edit.touches(length)
                    assert (
                        bool(torch.isfinite(edit.apply(torch.ones(2, WIDTHS[edit.hook]))).all())
                        or edit.op != "set"
                    )
        assert not Hostile.ran

    @given(anything)
    def test_it_goes_through_json_or_is_refused(self, intervene):
        try:
            plain = plain_specs(intervene)
        except UsageError as error:
            one_line(error)
        else:
            with contextlib.suppress(
                TypeError
            ):  # keys that JSON has no word for: refused where specs are read
                json.dumps(plain)

    def test_one_that_cannot_be_shown(self):
        for spec in (
            Shy(),
            {"embed.hook_out": Shy()},
            {"embed.hook_out": {"op": Shy()}},
            [{"embed.hook_out": {Shy(): 1}}],
        ):
            with pytest.raises(UsageError):
                parse_interventions(spec, widths=WIDTHS, nonfireable={}, lengths=[3])

    @pytest.mark.parametrize("deep", [list, dict])
    def test_one_that_holds_itself(self, deep):
        """No end of it can be found: a refusal, not a RecursionError."""
        endless: Any = deep()
        endless.append(endless) if deep is list else endless.update(a=endless)
        for spec in (endless, {"embed.hook_out": {"op": "add", "value": endless}}):
            with pytest.raises(UsageError, match="nested"):
                plain_specs(spec)
        with pytest.raises(UsageError, match="nested"):
            parse_interventions(
                {"embed.hook_out": {"op": "add", "value": endless}},
                widths=WIDTHS,
                nonfireable={},
                lengths=[3],
            )


class TestWire:
    @given(
        st.one_of(
            anything,
            st.fixed_dictionaries(
                {
                    "dtype": st.one_of(
                        scalars, st.sampled_from(sorted(n for n in dir(torch) if n.islower()))
                    ),
                    "shape": st.one_of(anything, st.lists(st.integers(-2, 4), max_size=3)),
                    "data": st.one_of(scalars, st.binary(max_size=64)),
                }
            ),
        )
    )
    @settings(max_examples=150)
    def test_a_tensor_is_decoded_or_refused(self, payload):
        for copied in (True, False):
            try:
                tensor = decode_tensor(payload, copy=copied)
            except ValueError as error:
                one_line(error)
            else:
                assert list(tensor.shape) == list(payload["shape"])
                assert tensor.numel() * tensor.element_size() == len(payload["data"])
        assert not Hostile.ran

    @given(st.sampled_from(["float32", "bfloat16", "int64", "bool"]), st.integers(0, 40), st.data())
    def test_a_tensor_cut_short_is_refused(self, dtype, n, data):
        whole = encode_tensor(torch.zeros(n, 2).to(getattr(torch, dtype)))
        assert torch.equal(decode_tensor(whole), torch.zeros(n, 2).to(getattr(torch, dtype)))
        assume(n)
        cut = data.draw(st.integers(0, len(whole["data"]) - 1))
        with pytest.raises(ValueError, match="bytes"):
            decode_tensor({**whole, "data": whole["data"][:cut]})

    @given(st.dictionaries(st.text(max_size=5), anything, max_size=3))
    def test_specs_are_decoded_or_refused(self, payload):
        try:
            decoded = decode_specs(payload)
        except ValueError as error:
            one_line(error)
        else:
            assert list(decoded) == list(payload)


class Pipe:
    """A connection that gives what it was given."""

    def __init__(self, *messages: bytes) -> None:
        self.messages = list(messages)

    def recv_bytes(self) -> bytes:
        if not self.messages:
            raise EOFError
        return self.messages.pop(0)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["protocol", "ok", "error", "kind", "lengths", "new_tokens", "stats", "starts", "prompts"]
            ),
            inner,
        ),
    ),
    max_leaves=8,
)


class TestTransport:
    @given(
        st.one_of(st.binary(max_size=40), json_values.map(lambda v: json.dumps(v).encode())),
        st.binary(max_size=40),
    )
    @settings(max_examples=150)
    def test_a_message_is_received_or_refused(self, header, payload):
        """An engine's process that prints into its pipe, or has gone mad, is an engine's failure."""
        try:
            found, tensors = receive(Pipe(header, payload))
        except EngineError as error:
            one_line(error)
        else:
            assert found["protocol"] == 1
            assert isinstance(tensors, dict)

    @given(json_values, st.dictionaries(st.text(max_size=9), st.just(torch.zeros(1, 2, 3)), max_size=2))
    @settings(max_examples=150)
    def test_a_result_is_unpacked_or_refused(self, header, tensors):
        try:
            unpack_result(header, tensors)
        except EngineError as error:
            one_line(error)

    def test_half_a_message(self):
        with pytest.raises(EOFError):
            receive(Pipe(b"{}"))
