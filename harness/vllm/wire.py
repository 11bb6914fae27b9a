"""Tensors across a process border: dtype, shape and bytes. Never pickle.

vLLM's own RPC turns a tensor above 256 bytes into an untyped list; bytes arrive as they were sent.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["decode_tensor", "dtype_name", "encode_tensor"]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Pack a tensor of any device and dtype (bf16 exactly) as ``{"dtype", "shape", "data"}``."""
    flat = tensor.detach().to("cpu").contiguous()
    data = flat.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": dtype_name(flat.dtype), "shape": list(flat.shape), "data": data}


def decode_tensor(payload: dict[str, Any]) -> torch.Tensor:
    """Undo :func:`encode_tensor`; the tensor owns its memory and may be written to.

    Raises:
        ValueError: the payload lacks a field, names no torch dtype, or its bytes do not fill its shape.
    """
    try:
        dtype, shape, data = getattr(torch, payload["dtype"]), payload["shape"], payload["data"]
    except (KeyError, AttributeError, TypeError) as error:
        msg = f"tensor payload needs a torch dtype name, a shape and data: {error}"
        raise ValueError(msg) from error
    if not isinstance(dtype, torch.dtype):
        msg = f"tensor payload names {payload['dtype']!r}, which is no torch dtype"
        raise ValueError(msg)  # noqa: TRY004 - a bad payload is a bad value, not a caller's type mistake
    expected = dtype.itemsize * torch.Size(shape).numel()
    if len(data) != expected:
        msg = f"tensor payload of shape {tuple(shape)} {payload['dtype']} needs {expected} bytes, has {len(data)}"
        raise ValueError(msg)
    if expected == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
