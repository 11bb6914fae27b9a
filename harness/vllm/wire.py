"""Tensors across a process border: dtype, shape and bytes. Never pickle.

vLLM's own RPC turns a tensor above 256 bytes into an untyped list; bytes arrive as they were sent.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch

from harness.conventions import dtype_name
from harness.interventions import OPS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from harness.interventions import Edit
    from harness.vllm.lending import Lent

__all__ = [
    "decode_block",
    "decode_specs",
    "decode_tensor",
    "dtype_name",
    "encode_block",
    "encode_specs",
    "encode_tensor",
]


def encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Pack a tensor of any device and dtype (bf16 exactly) as ``{"dtype", "shape", "data"}``."""
    data = _bytes_of(tensor.to("cpu")).tobytes()
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data": data}


def encode_block(parts: Sequence[torch.Tensor], lent: Lent | None = None) -> dict[str, Any]:
    """Pack tensors (n_i, width) of one dtype and width, one after the other, as one tensor; each is copied once.

    With ``lent`` they lie there: ``at`` says where they begin, and ``bytes`` how many they are.
    """
    total, width, dtype = sum(part.shape[0] for part in parts), parts[0].shape[1], parts[0].dtype
    size, packed = total * width * dtype.itemsize, {"dtype": dtype_name(dtype), "shape": [total, width]}
    if lent is not None:
        return packed | {"at": lent.put(map(_bytes_of, parts)), "bytes": size}
    data = bytearray(size)
    if size:
        torch.cat(list(parts), out=torch.frombuffer(data, dtype=dtype).view(total, width))
    return packed | {"data": data}


def _bytes_of(tensor: torch.Tensor) -> Any:
    """What a tensor on the CPU holds, as a buffer; of a contiguous one without a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def decode_block(payload: Mapping[str, Any], lent: torch.Tensor | None) -> torch.Tensor:
    """Undo :func:`encode_block`, (n, width): a view of its bytes.

    Raises:
        ValueError: as :func:`decode_tensor`.
    """
    if lent is None:
        return decode_tensor(payload, copy=False)
    data = lent[payload["at"] : payload["at"] + payload["bytes"]].numpy()
    return decode_tensor({**payload, "data": data}, copy=False)


def decode_tensor(payload: Any, *, copy: bool = True) -> torch.Tensor:
    """Undo :func:`encode_tensor`; the tensor owns its memory and may be written to.

    With ``copy=False`` it is a view of the payload's bytes, to be read only.

    Raises:
        ValueError: the payload lacks a field, names no torch dtype, or its bytes do not fill its shape.
    """
    if not isinstance(payload, dict):
        msg = f"tensor payload is {type(payload).__name__}; it is a dict of a torch dtype name, a shape and data"
        raise ValueError(msg)  # noqa: TRY004 - as below
    try:
        name, shape, data = payload["dtype"], torch.Size(payload["shape"]), memoryview(payload["data"])
        dtype = getattr(torch, name)
    except (KeyError, AttributeError, TypeError, ValueError, OverflowError) as error:
        msg = f"tensor payload needs a torch dtype name, a shape and data: {type(error).__name__}: {error}"
        raise ValueError(msg) from error
    if not isinstance(dtype, torch.dtype):
        msg = f"tensor payload names {name!r}, which is no torch dtype"
        raise ValueError(msg)  # noqa: TRY004 - a bad payload is a bad value, not a caller's type mistake
    expected = dtype.itemsize * math.prod(shape)
    if min(shape, default=0) < 0 or data.nbytes != expected:
        msg = f"tensor payload of shape {tuple(shape)} {name} needs {expected} bytes, has {data.nbytes}"
        raise ValueError(msg)
    try:
        if expected == 0:
            return torch.empty(shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(bytearray(data) if copy else data, dtype=dtype).reshape(shape)
    except (RuntimeError, NotImplementedError) as error:
        msg = f"tensor payload of dtype {name}: torch cannot make one of bytes ({str(error).splitlines()[0]})"
        raise ValueError(msg) from error


def encode_specs(edits: Iterable[Edit]) -> dict[str, dict[str, Any]]:
    """A request's edits as a spec set whose values are encoded tensors."""
    specs: dict[str, dict[str, Any]] = {}
    for edit in edits:
        spec: dict[str, Any] = {"op": edit.op}
        if OPS[edit.op] == "factor":
            spec["factor"] = edit.scale
        elif OPS[edit.op] == "value":
            spec["value"] = encode_tensor(edit.bias)
        if edit.pos is not None:
            spec["pos"] = list(edit.pos)
        specs[edit.hook] = spec
    return specs


def decode_specs(specs: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`encode_specs`; values that are plain numbers or lists stay what they are."""

    def decoded(spec: Any) -> Any:
        value = spec.get("value") if isinstance(spec, dict) else None
        return {**spec, "value": decode_tensor(value)} if isinstance(value, dict) else spec

    return {hook: decoded(spec) for hook, spec in specs.items()}
