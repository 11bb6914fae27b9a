"""The reference proves itself: what the hooks say must agree with other ways of reading the same model.

A harness that trusts its reference turns the reference's mistakes into the engine's. Each hook point is read a second
time by a path that shares neither the module table nor the hook with the first: rows of the embedding matrix, the
NEXT block's input, ``output_hidden_states``, the inputs of the last projections, the head's input, arithmetic.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers.pytorch_utils import Conv1D

from harness.conventions import MIN_DIVISOR, safe_divisor
from harness.errors import CaptureError
from harness.geometry import Geometry
from harness.points import (
    ATTN_IN,
    ATTN_OUT,
    BLOCK_IN,
    BLOCK_OUT,
    EMBED,
    FINAL_NORM,
    HEAD_K,
    HEAD_Q,
    HEAD_V,
    HEAD_Z,
    MLP_IN,
    MLP_OUT,
    TEMPLATES,
)
from harness.reference.families import tree_of
from harness.reference.run import forward_logits, run_reference
from harness.reference.truth import RecordNarrowing, exact_forward

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from harness.reference.families import ModuleTree

__all__ = ["BOUNDS", "check_reference"]

#: How far two readings may be apart per row, ‖a - b‖ / scale, as (multiple of the dtype's eps, multiple of the eps
#: products are summed in, fp32's or better). eps is 2⁻⁷ at bf16, a rounding costs at most half of it. Copies of one
#: tensor agree bit for bit. Largest seen on SmolLM2 at 120 tokens, in eps at (bf16, fp32), beside each.
BOUNDS = {
    "copy": (0, 0),
    "projection": (1, 16),  # one rounding of the output, and the sums' order: 0.4, 4.9
    "embedding": (1, 0),  # one multiplication
    "residual": (2, 0),  # two additions, perhaps two multiplications: 0.7, 0.7
    "norm": (2, 4),  # rounded normalised, times the weight, divided by it: 0.6, 1.7
    "logits": (2, 16),  # the norm's three roundings, then as a projection: 0.4, 3.3
}
#: The last projection of each branch, by whichever of these names the family has: its output is the branch's.
_LAST_PROJECTION = {
    ATTN_OUT: (
        "self_attn.o_proj",
        "self_attn.out_proj",
        "self_attn.dense",
        "attn.out_proj",
        "attn.c_proj",
        "attention.dense",
        "self_attention.dense",
    ),
    MLP_OUT: ("mlp.down_proj", "mlp.fc_out", "mlp.fc2", "mlp.c_proj", "mlp.dense_4h_to_h", "fc2"),
}
_LINEAR = (torch.nn.Linear, Conv1D)
#: A mixture of experts has no one last projection; what it adds to the stream is checked by the sum alone.
_MIXTURE = "mlp.experts"


@dataclass
class _Readings:
    """Both readings of one sequence; every tensor (n, width) at the model's dtype, logits (n, d_vocab) fp32."""

    model: PreTrainedModel
    ids: list[int]
    captured: dict[str, torch.Tensor]  #: the reading under test
    logits: torch.Tensor
    block_in: dict[int, torch.Tensor] = field(default_factory=dict)
    projection_in: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  #: hook → input of its last projection
    positions: torch.Tensor | None = None  #: what is added to the embedding
    head_in: torch.Tensor | None = None
    hidden_states: list[torch.Tensor] = field(default_factory=list)
    narrowing: dict[str, int] = field(default_factory=dict)


def check_reference(
    model: PreTrainedModel, ids: Sequence[int], templates: Sequence[str] = TEMPLATES
) -> list[str]:
    """Check the hooks of ``model`` on one sequence.

    Checks of every capture: shape, dtype, finite, no row constant over its channels, and unchanged by later
    forwards. Then the second readings: the embedding against the first block's input and the matrix's rows; each
    block's output against the next one's input and against ``output_hidden_states`` (whose last entry is after the
    final norm); attention and MLP against their last projections; ``out = before + attn + mlp``, by way of the family's
    factor and norms; a block's input against the block before, the MLP's against its output, queries, keys and values
    against attention's input, the heads' outputs against the last projection's; the final norm from the last block's
    output with the config's eps; the logits from the normalised rows, with bias, soft-cap and scale. At fp64: no
    operation on an fp64 tensor that returns a narrower one.

    Args:
        model: a loaded model, see :func:`~harness.reference.load.load_model`.
        ids: two different tokens at least, or a shift by one row can't be seen.
        templates: of the points to check; the usual five among them.

    Returns:
        One line per defect, naming hook and position; empty when all is well.
    """
    try:
        hooks = tree_of(model).points(model.config.num_hidden_layers, templates)
        run = run_reference(model, [ids], hooks)
        read = _Readings(
            model, list(ids), {hook: rows[0] for hook, rows in run.captured.items()}, run.logits[0]
        )
        problems = _malformed(read, hooks)
        if problems:
            return problems
        before = {hook: rows.clone() for hook, rows in read.captured.items()}
        _read_again(read)
        forward_logits(model, read.ids[::-1])
        changed = [hook for hook, rows in read.captured.items() if not torch.equal(rows, before[hook])]
        problems += [f"{hook}: a later forward changed it" for hook in changed]
        for check in (
            _embedding,
            _block_outputs,
            _projections,
            _residuals,
            _inputs,
            _heads,
            _final_norm,
            _logits,
        ):
            problems += check(read)
    except CaptureError as error:
        return [str(error)]
    return problems + [
        f"fp64: {operation} took fp64 and returned a narrower float, {count} times"
        for operation, count in read.narrowing.items()
    ]


def _malformed(read: _Readings, hooks: Sequence[str]) -> list[str]:
    """Everything that can be said of one capture alone."""
    config, n_rows = read.model.config, len(read.ids)
    widths = Geometry.of(config).widths(hooks)
    expected = {hook: ((n_rows, width), read.model.dtype) for hook, width in widths.items()}
    problems = [f"{hook}: not captured" for hook in expected if hook not in read.captured]
    values = {**read.captured, "logits": read.logits}
    expected["logits"] = ((n_rows, config.vocab_size), torch.float32)
    for hook, rows in values.items():
        shape, dtype = expected[hook]
        if tuple(rows.shape) != shape:
            problems.append(f"{hook}: shape {tuple(rows.shape)}, expected {shape}")
            continue
        if rows.dtype != dtype:
            problems.append(f"{hook}: {rows.dtype}, expected {dtype}")
        bad = ~rows.isfinite().all(dim=-1)
        # All-zero rows are the classic of a capture that never happened (vLLM issue 46301).
        flat = (rows == rows[:, :1]).all(dim=-1)
        for rows_bad, what in ((bad, "not finite"), (flat, "constant over its channels")):
            where = rows_bad.nonzero().flatten().tolist()
            if where:
                problems.append(
                    f"{hook}: {len(where)} of {n_rows} rows {what}, the first at position {where[0]}"
                )
    return problems


def _read_again(read: _Readings) -> None:
    """One more forward, read at module inputs and through ``output_hidden_states``."""
    model = read.model
    tokens = torch.tensor([read.ids], device=model.device)
    with _reading_inputs(read), exact_forward(model.dtype), RecordNarrowing() as recorder:
        out = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    read.hidden_states = [states[0].detach().cpu() for states in out.hidden_states]
    read.narrowing = recorder.found


@contextmanager
def _reading_inputs(read: _Readings) -> Iterator[None]:
    """Keep the inputs of blocks, last projections and head. Finds them without the table of ``hooks``."""
    handles: list[Any] = []

    def keep(module: nn.Module, store: dict[Any, torch.Tensor], key: Any) -> None:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else kwargs["hidden_states"]
            store[key] = (value if value.ndim == 2 else value[0]).detach().to("cpu", copy=True)

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def keep_positions(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        read.positions = output.detach().to("cpu", copy=True).reshape(-1, output.shape[-1])

    head: dict[str, torch.Tensor] = {}
    try:
        for index, layer in enumerate(_layers(read.model)):
            keep(layer, read.block_in, index)
            for template, (_, module) in _last_projections(layer).items():
                keep(module, read.projection_in, template.format(i=index))
        if positions := tree_of(read.model).positions:
            handles.append(read.model.get_submodule(positions).register_forward_hook(keep_positions))
        keep(read.model.get_output_embeddings(), head, "in")
        yield
        read.head_in = head.get("in")
    finally:
        for handle in handles:
            handle.remove()


def _decoder(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The module that holds the list of blocks, and the list: the one of that length nearest to the base model."""
    count = model.config.num_hidden_layers
    for depth in range(2):
        holders = [
            m for name, m in model.base_model.named_modules() if len(name.split(".")) - (not name) == depth
        ]
        found = [
            (holder, child)
            for holder in holders
            for child in holder.children()
            if isinstance(child, torch.nn.ModuleList) and len(child) == count
        ]
        if len(found) == 1:
            return found[0]
    msg = f"{type(model).__name__}: no module holds one list of {count} blocks"
    raise CaptureError(msg)


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's list of blocks."""
    return _decoder(model)[1]


def _last_projections(layer: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Template → name and module of the linear layer whose output is the branch's; a mixture of experts has none."""
    named = dict(layer.named_modules())
    found: dict[str, tuple[str, nn.Module]] = {}
    for template, names in _LAST_PROJECTION.items():
        here = [(name, named[name]) for name in names if isinstance(named.get(name), _LINEAR)]
        if len(here) == 1:
            found[template] = here[0]
        elif template != MLP_OUT or _MIXTURE not in named:
            msg = f"{type(layer).__name__} has no linear layer {' or '.join(names)}, by which {template} is read again"
            raise CaptureError(msg)
    return found


def _matrix(module: nn.Module) -> torch.Tensor:
    """A projection's weight as (out, in), whichever way it is stored."""
    weight: torch.Tensor = module.weight.detach().cpu()  # type: ignore[operator]
    return weight.T if isinstance(module, Conv1D) else weight


def _apart(
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
    kind: str,
    what: str,
    *,
    scale: torch.Tensor | None = None,
    eps: float | None = None,
) -> list[str]:
    """Compare (n, width) with (n, width), row by row, and say where the worst row is.

    ``scale`` (n,) is what the difference is measured against, ‖want‖ by default; ``eps`` that of the dtype whose
    roundings separate the two, ``got``'s by default.
    """
    got64, want64 = got.double(), want.double()
    scale = want64.norm(dim=-1) if scale is None else scale
    # A row of zeros must equal a row of zeros: 0/0 is agreement, anything else over 0 is not.
    difference = (got64 - want64).norm(dim=-1)
    error = torch.where(difference == 0, difference, difference / scale)
    eps = eps or torch.finfo(got.dtype).eps
    rounding, summing = BOUNDS[kind]
    bound = rounding * eps + summing * min(eps, torch.finfo(torch.float32).eps)
    wrong = ~(error <= bound)
    if not bool(wrong.any()):
        return []
    worst = int(error.nan_to_num(nan=float("inf")).argmax())
    count = f"{int(wrong.sum())} of {len(error)} rows"
    size = f"{float(error[worst]):.2e} (bound {bound:.1e})"
    return [f"{name}: {count} differ from {what}, the worst at position {worst} by {size}"]


def _rounding_scale(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Per row, (n,) fp64: what the rounding errors of ``rows @ matrix.T`` are measured against.

    The larger of ``√ΣᵥΣⱼ (xⱼ Wᵥⱼ)²``, to which independent roundings of the terms add up, and of the product's own
    norm, for those of the running sums. Where large terms cancel, as in SmolLM2's logits, the product has fewer good
    digits than what it comes from; where they add up, as in its block 24, it is the running sum that rounds.
    """
    wide = matrix.detach().cpu().double()
    terms = (rows.double().square() @ wide.square().sum(dim=0)).sqrt()
    return torch.maximum(terms, (rows.double() @ wide.T).norm(dim=-1))


def _embedding(read: _Readings) -> list[str]:
    """What the first block takes in, less learned positions; and the matrix's rows times one number, whichever."""
    got = read.captured[EMBED]
    entering = got if read.positions is None else got + read.positions
    rows = read.model.get_input_embeddings().weight.detach().cpu()[read.ids].double()
    factor = float((got.double() * rows).sum() / rows.square().sum())
    return _apart(EMBED, entering, read.block_in[0], "copy", "the input of block 0") + _apart(
        EMBED, got, rows * factor, "embedding", f"the embedding matrix's rows, times {factor:g}"
    )


def _block_outputs(read: _Readings) -> list[str]:
    problems: list[str] = []
    for index in range(read.model.config.num_hidden_layers - 1):
        hook = BLOCK_OUT.format(i=index)
        following = read.block_in[index + 1]
        problems += _apart(hook, read.captured[hook], following, "copy", f"the input of block {index + 1}")
        states = read.hidden_states[index + 1]
        problems += _apart(hook, read.captured[hook], states, "copy", f"hidden_states[{index + 1}]")
    return problems


def _projections(read: _Readings) -> list[str]:
    problems: list[str] = []
    for index, layer in enumerate(_layers(read.model)):
        for template, (path, module) in _last_projections(layer).items():
            hook = template.format(i=index)
            wanted = read.projection_in[hook].double() @ _matrix(module).double().T
            if module.bias is not None:
                wanted += module.bias.detach().cpu().double()  # type: ignore[operator]
            scale = _rounding_scale(read.projection_in[hook], _matrix(module))
            what = f"{path} of its input"
            problems += _apart(hook, read.captured[hook], wanted, "projection", what, scale=scale)
    return problems


def _residuals(read: _Readings) -> list[str]:
    tree, config = tree_of(read.model), read.model.config
    factor = float(getattr(config, tree.branch_factor)) if tree.branch_factor else 1.0
    problems: list[str] = []
    for index, layer in enumerate(_layers(read.model)):
        hook = BLOCK_OUT.format(i=index)
        before = BLOCK_OUT.format(i=index - 1) if index else EMBED
        branches = [read.captured[t.format(i=index)].double() * factor for t in (ATTN_OUT, MLP_OUT)]
        if tree.branch_norms is not None:
            branches = [
                _normalised(rows, tree, config) * _gain(layer.get_submodule(norm), tree)
                for rows, norm in zip(branches, tree.branch_norms, strict=True)
            ]
        parts = [read.captured[before].double(), *branches]
        if not index and read.positions is not None:
            parts.append(read.positions.double())
        total = torch.stack(parts).sum(dim=0)
        # Against what is added, not the sum: where a block cancels its input the sum is all rounding.
        scale = torch.stack([part.norm(dim=-1) for part in parts]).sum(dim=0)
        what = f"{before} + attention + MLP"
        kind = "residual" if tree.branch_norms is None else "norm"
        problems += _apart(hook, read.captured[hook], total, kind, what, scale=scale)
    return problems


def _inputs(read: _Readings) -> list[str]:
    """A block's input is what came before; the MLP, run once more on its input, gives its output."""
    problems: list[str] = []
    if MLP_IN.format(i=0) not in read.captured:
        return problems
    for index, layer in enumerate(_layers(read.model)):
        entering = read.captured[BLOCK_IN.format(i=index)]
        problems += _apart(
            BLOCK_IN.format(i=index), entering, read.block_in[index], "copy", f"the input of block {index}"
        )
        hook = MLP_IN.format(i=index)
        if (mlp := getattr(layer, "mlp", None)) is not None:
            with exact_forward(read.model.dtype):
                again = mlp(read.captured[hook][None].to(read.model.device))
            again = (again[0] if isinstance(again, tuple) else again)[0].cpu()
            problems += _apart(
                hook, again, read.captured[MLP_OUT.format(i=index)], "copy", "the MLP's output"
            )
    return problems


def _heads(read: _Readings) -> list[str]:
    """Queries and keys follow from attention's input, and the heads' outputs from what meets and is summed."""
    tree, layers = tree_of(read.model), _layers(read.model)
    problems: list[str] = []
    if HEAD_Z.format(i=0) not in read.captured:
        return problems
    for index, layer in enumerate(layers):
        z = HEAD_Z.format(i=index)
        problems += _apart(
            z,
            read.captured[z],
            read.projection_in[ATTN_OUT.format(i=index)],
            "copy",
            "the last projection's input",
        )
        if HEAD_Q in tree.lacks:
            continue
        attention = layer.get_submodule(tree.attn.rsplit("{i}.", 1)[1])
        parts = [attention.get_submodule(name) for name in tree.qkv]
        rows = read.captured[ATTN_IN.format(i=index)]
        matrix = torch.cat([_matrix(part) for part in parts])
        wanted = rows.double() @ matrix.double().T
        if (biases := [part.bias for part in parts])[0] is not None:
            wanted += torch.cat([bias.detach().cpu() for bias in biases]).double()  # type: ignore[operator]
        got = torch.cat([read.captured[part.format(i=index)] for part in (HEAD_Q, HEAD_K, HEAD_V)], dim=1)
        name, what = HEAD_Q.format(i=index), "(with hook_k, hook_v) attention's input, projected"
        problems += _apart(name, got, wanted, "projection", what, scale=_rounding_scale(rows, matrix))
    return problems


def _normalised(rows: torch.Tensor, tree: ModuleTree, config: PreTrainedConfig) -> torch.Tensor:
    """By definition, x / sqrt(mean(x²) + eps), perhaps of x - mean(x), with the config's eps (not the module's)."""
    eps = getattr(config, tree.norm_eps, None) if isinstance(tree.norm_eps, str) else tree.norm_eps
    if eps is None:
        msg = f"the config has no {tree.norm_eps}: the norms are of another kind than the family's entry says"
        raise CaptureError(msg)
    x = rows.double()
    x = x - x.mean(dim=-1, keepdim=True) if tree.layer_norm else x
    normalised: torch.Tensor = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return normalised


def _gain(norm: nn.Module, tree: ModuleTree) -> torch.Tensor:
    """What a norm multiplies by, (width,) fp64."""
    weight: torch.Tensor = norm.weight.detach().cpu().double()  # type: ignore[operator]
    return weight + 1.0 if tree.plus_one else weight


def _weighted(read: _Readings) -> torch.Tensor:
    """What the final norm must have returned, by its captured value, (n, width) fp64."""
    norm, tree = _norm(read.model), tree_of(read.model)
    weighted = read.captured[FINAL_NORM].double() * safe_divisor(_gain(norm, tree))
    if tree.layer_norm and tree.norm_bias:
        weighted += norm.bias.detach().cpu().double()  # type: ignore[operator]
    return weighted


def _final_norm(read: _Readings) -> list[str]:
    tree, config = tree_of(read.model), read.model.config
    last = read.captured[BLOCK_OUT.format(i=config.num_hidden_layers - 1)]
    normalised = _normalised(last, tree, config)
    gain = _gain(_norm(read.model), tree)
    kept = gain.abs() < MIN_DIVISOR
    normalised[:, kept] *= gain[kept]
    name = FINAL_NORM
    problems = _apart(name, read.captured[name], normalised, "norm", "the last block's output, normalised")
    weighted = _weighted(read)
    for value, what in ((read.head_in, "the head's input"), (read.hidden_states[-1], "hidden_states[-1]")):
        if value is None:
            problems.append(f"{name}: the head never ran")
        else:
            problems += _apart(f"{name} · weight", weighted.to(read.model.dtype), value, "norm", what)
    return problems


def _logits(read: _Readings) -> list[str]:
    """``(normalised · weight) @ W_U.T``, plus the head's bias, soft-capped and scaled as the config says."""
    weighted, config = _weighted(read), read.model.config
    head = read.model.get_output_embeddings()
    unembed = head.weight
    wanted = weighted @ unembed.detach().cpu().double().T
    scale = _rounding_scale(weighted, unembed)
    if getattr(head, "bias", None) is not None:
        wanted += head.bias.detach().cpu().double()
    if cap := getattr(config, "final_logit_softcapping", None):
        wanted = cap * torch.tanh(wanted / cap)
    if divisor := getattr(config, "logits_scaling", None):
        wanted, scale = wanted / divisor, scale / divisor
    if factor := getattr(config, "logit_scale", None):
        wanted, scale = wanted * factor, scale * factor
    eps = max(torch.finfo(read.model.dtype).eps, torch.finfo(torch.float32).eps)
    return _apart(
        "logits", read.logits, wanted, "logits", f"{FINAL_NORM} · weight @ W_U.T", scale=scale, eps=eps
    )


def _norm(model: PreTrainedModel) -> nn.Module:
    """The final norm, found as the only norm beside the list of blocks."""
    norms = [m for m in _decoder(model)[0].children() if type(m).__name__.endswith(("RMSNorm", "LayerNorm"))]
    if len(norms) != 1:
        msg = f"{type(model).__name__}: found {len(norms)} final norms, expected one"
        raise CaptureError(msg)
    return norms[0]
