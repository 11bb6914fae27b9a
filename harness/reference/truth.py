"""The truth: Hugging Face with the engine's weights, computed more precisely than the engine computes.

An engine at bf16 or fp16 is judged against fp32, an engine at fp32 against fp64. For fp64 it isn't enough to load
the model in that dtype: RMSNorm says ``.to(torch.float32)``, the softmax ``dtype=torch.float32``, and each would
leave fp32's noise in what is meant to measure it. :class:`StayInDouble` reads "at least fp32" where they say fp32.

What stays fp32 is what the model's definition computes in fp32 from integers: the rotary angles, ``position.float() *
inv_freq``, their cosine and sine. Engines take the same fp32 values; a truth with fp64 angles would be another
model (at position 200 its angles differ by 5e-6, eighty times fp32's rounding).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.conventions import dtype_name
from harness.errors import UsageError
from harness.reference.load import as_dtype, load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

__all__ = ["RecordNarrowing", "StayInDouble", "exact_forward", "load_truth", "truth_dtype"]

_TRUTH = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})
_NARROWING_METHODS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})


def truth_dtype(engine_dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype in which the truth for an engine of ``engine_dtype`` is computed.

    Raises:
        UsageError: nothing here is more precise than the engine.
    """
    dtype = as_dtype(engine_dtype)
    if dtype not in _TRUTH:
        msg = f"an engine at {dtype_name(dtype)} has no truth: nothing here computes more precisely; use fp32 or bf16"
        raise UsageError(msg)
    return _TRUTH[dtype]


def load_truth(path: str | Path, engine_dtype: torch.dtype | str) -> PreTrainedModel:
    """Load the truth's model: weights rounded to ``engine_dtype``, at :func:`truth_dtype`, plain attention.

    Eager attention, because its matmul and softmax are written out and can be kept in fp64.

    Raises:
        UsageError: as :func:`~harness.reference.load.load_model` and :func:`truth_dtype`.
    """
    dtype = truth_dtype(engine_dtype)
    return load_model(path, dtype, weights_dtype=engine_dtype, attn_implementation="eager")


class StayInDouble(TorchFunctionMode):
    """Within it, an operation on an fp64 tensor that asks for a narrower float gets fp64 instead.

    Covers ``x.to(torch.float32)``, ``x.float()``, ``x.type(torch.float32)`` and every ``dtype=`` argument.
    Operations without an fp64 tensor among their arguments (``position_ids.float()``, ``inv_freq.to(torch.float)``,
    masks, factories) are left alone.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` with its narrow dtype arguments widened."""
        kwargs = kwargs or {}
        if any(_is_double(value) for value in (*args, *kwargs.values())):
            if func in _NARROWING_METHODS:
                return args[0]
            args = tuple(_widen(value) for value in args)
            kwargs = {key: _widen(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


class RecordNarrowing(TorchDispatchMode):
    """Notes every operation that takes an fp64 tensor and returns a narrower float: the check on StayInDouble.

    It looks one level below, at what torch runs, so whatever a model finds to ask for fp32 with is seen.

    Attributes:
        found: operation's name → how often, in the order first seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` and look at the dtypes on both of its sides."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))  # noqa: SLF001  (the mode's own is private too)
        if any(_is_double(value) for value in leaves):
            outs = torch.utils._pytree.tree_leaves(out)  # noqa: SLF001
            if any(isinstance(value, torch.Tensor) and value.dtype in _NARROW for value in outs):
                self.found[str(func)] = self.found.get(str(func), 0) + 1
        return out


@contextmanager
def exact_forward(dtype: torch.dtype) -> Iterator[None]:
    """Run a forward of a model at ``dtype`` as precisely as that dtype says: no gradient, fp32 never as TF32 or bf16.

    The matmul precision is process-wide and engines set it; it is put back afterwards. At fp64 the forward stays in
    double.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad():
            if dtype == torch.float64:
                with StayInDouble():
                    yield
            else:
                yield
    finally:
        torch.set_float32_matmul_precision(before)


def _is_double(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


def _widen(value: object) -> object:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
