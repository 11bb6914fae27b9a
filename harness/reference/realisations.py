"""More realisations of the reference: the same mathematics at the same dtype, rounded in another order.

A verdict measures an engine's error in units of the reference's own. One run of the reference is one draw of that
noise, and it draws with one library's kernels; both can be better than the dtype allows. So R is run again:

- **jittered**, its embedding moved by a unit in the last place. Some rows of a trained model are ill-conditioned: one
  neuron's product decides the row, and a single run can be right by luck. Measured on SmolLM2-135M (305 rows, 92 hooks,
  k = 3), Hugging Face with one attention kernel judged against Hugging Face with another: with a single realisation 15
  hooks fail at bf16 (rows 7 times the reference), with two jittered ones beside it none (2.7 times). A jitter of one
  unit is what any engine's first addition costs; it leaves the aggregate error where it was (fp32: 0.9 to 1.1 times).
- **in oneDNN's matmul** at fp32 on CPU, which is what vLLM's CPU backend calls. torch's own linear goes to a BLAS that
  sums in blocks: for 1536 terms its error is 2.5e-7 (root mean square), oneDNN's 5.2e-7, bit-identical to vLLM's.
  Both are correct fp32. Against the BLAS alone vLLM looks 1.5 to 2.8 times noisier than it is.

Seeds and kernels are fixed, so the same sequence always gets the same bound.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers.pytorch_utils import Conv1D

__all__ = ["has_onednn", "jitter", "onednn_linears"]

_INT_OF = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def jitter(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Move each value to the next number up, the next down, or not at all, at random: same shape and dtype.

    Zeros stay zero, so padding stays padding.

    Args:
        values: finite, of a floating dtype.
        seed: the same seed moves a tensor of the same shape in the same way.
    """
    integer = _INT_OF[values.dtype]
    random = torch.Generator().manual_seed(seed)
    steps = torch.randint(-1, 2, values.shape, generator=random).to(device=values.device, dtype=integer)
    # Within one sign, neighbouring floats are neighbouring integers.
    moved = (values.contiguous().view(integer) + steps).view(values.dtype)
    return torch.where(values == 0, values, moved)


def has_onednn() -> bool:
    """Whether this torch can run a plain linear layer in oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@contextmanager
def onednn_linears(model: torch.nn.Module) -> Iterator[None]:
    """Within it, the fp32 linear layers of ``model`` multiply in oneDNN; elsewhere torch already does, or cannot."""
    from transformers.pytorch_utils import Conv1D

    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    linears = [m for m in linears if m.weight.dtype == torch.float32 and m.weight.device.type == "cpu"]
    if not has_onednn():
        linears = []

    def forward_of(module: torch.nn.Linear | Conv1D) -> Any:
        weight = module.weight.T.contiguous() if isinstance(module, Conv1D) else module.weight

        def forward(values: torch.Tensor) -> torch.Tensor:
            multiplied: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - public only as a module
                values, weight, module.bias, "none", [], ""
            )
            return multiplied

        return forward

    try:
        for module in linears:
            vars(module)["forward"] = forward_of(module)
        yield
    finally:
        for module in linears:
            # The instance attribute hid the class's method; without it that one is back.
            vars(module).pop("forward", None)
