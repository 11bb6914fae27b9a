"""The ``Backend`` protocol: what the suites need of anything they can judge, and how one is found and booted."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, Self

from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.metadata import EntryPoint

    import torch

    from harness.results import ForwardResult

__all__ = [
    "DTYPES",
    "MODES",
    "Backend",
    "BootConfig",
    "Bootable",
    "Topology",
    "backend_names",
    "load_backend",
]

#: Short names people type → torch's names.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
MODES = ("compiled", "eager")
#: Options every suite engine has; naming them in each id would only be noise.
_UNNAMED_OPTIONS = ("logprobs_mode", "max_logprobs")
#: A log file is named after an id, and 255 bytes is what file systems take.
_LONGEST_ID = 160
_TOPOLOGY = re.compile(r"(?:tp(\d+))?(?:pp(\d+))?")


@dataclass(frozen=True)
class Topology:
    """Tensor- and pipeline-parallel sizes; ``str()`` gives ``tp1``, ``tp2``, ``pp2``, ``tp2pp2``."""

    tp: int = 1
    pp: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``tp2pp2`` and its parts.

        Raises:
            UsageError: not of that form, or a size below 1.
        """
        match = _TOPOLOGY.fullmatch(text)
        if not text or match is None or "0" in (match[1], match[2]):
            msg = f"topology {text!r} is not of the form tp2, pp2 or tp2pp2 (sizes from 1)"
            raise UsageError(msg)
        return cls(int(match[1] or 1), int(match[2] or 1))

    def __str__(self) -> str:
        parts = [f"tp{self.tp}"] if self.tp > 1 or self.pp == 1 else []
        return "".join(parts + ([f"pp{self.pp}"] if self.pp > 1 else []))


@dataclass(frozen=True)
class BootConfig:
    """Everything that decides which engine is booted; cases with equal configs share one engine.

    Attributes:
        backend: entry-point name, ``vllm`` or ``hf`` here, or ``name@python`` for one in its own interpreter.
        model: what the person typed; ``path`` is where its checkpoint lies.
        dtype: torch's name, ``float32``.
        mode: ``compiled`` or ``eager``.
        max_num_batched_tokens: tokens per step; longer prompts are served in chunks.
        options: JSON-able extras of one backend (``worker_cls``, ``instrument``, ``logprobs_mode``, …).
    """

    backend: str
    model: str
    path: str
    dtype: str = "float32"
    mode: str = "compiled"
    topology: Topology = Topology()
    max_num_batched_tokens: int = 64
    max_model_len: int = 256
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def short_dtype(self) -> str:
        """``fp32`` for ``float32``."""
        return next(short for short, full in DTYPES.items() if full == self.dtype)

    @property
    def backend_name(self) -> str:
        """The backend in a few characters: an interpreter's path by its digest."""
        name, _, python = self.backend.partition("@")
        return f"{name}~{hashlib.sha256(python.encode()).hexdigest()[:6]}" if python else name

    @property
    def id(self) -> str:
        """Readable, for logs, test ids and the report; equality of configs is decided by :meth:`to_json`."""
        parts = [
            _model_name(self.model),
            self.short_dtype,
            self.mode,
            str(self.topology),
            f"step{self.max_num_batched_tokens}",
        ]
        if self.backend != "vllm":
            parts.insert(0, self.backend_name)
        parts += [
            f"{key}={_short(value)}"
            for key, value in sorted(self.options.items())
            if key not in _UNNAMED_OPTIONS
        ]
        return _file_name("-".join(parts))

    def with_options(self, **options: Any) -> Self:
        """The same but for ``options``; one of None is left out."""
        changed = {**self.options, **{name: value for name, value in options.items() if value is not None}}
        return replace(self, options=changed)

    def to_json(self) -> str:
        """One line of JSON that :meth:`from_json` reads back."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Undo :meth:`to_json`."""
        data = json.loads(text)
        return cls(**{**data, "topology": Topology(**data["topology"])})

    def __hash__(self) -> int:
        return hash(self.to_json())


def _short(value: Any) -> str:
    """An option's value for an id, which also names a file: plain words as they are, anything else by its digest."""
    if isinstance(value, bool | int | float | str):
        return re.sub(r"[^\w.+-]", "_", str(value).rsplit(".", 1)[-1])
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _model_name(model: str) -> str:
    """The last part of a path or hub id, and a digest of the rest: two checkpoints may share a folder name."""
    name = model.rstrip("/").rsplit("/", 1)[-1]
    return name if name == model else f"{name}~{hashlib.sha256(model.encode()).hexdigest()[:6]}"


def _file_name(text: str) -> str:
    """``text`` as it can name a file: other characters replaced, and cut to what file systems take."""
    clean = re.sub(r"[^\w.+=~-]", "_", text)
    if len(clean) <= _LONGEST_ID:
        return clean
    return f"{clean[: _LONGEST_ID - 9]}~{hashlib.sha256(text.encode()).hexdigest()[:8]}"


class Backend(Protocol):
    """A way to run a model that can be captured from.

    One may also have ``capabilities``, a :class:`~harness.capabilities.Capabilities`: without it everything is asked of
    it. For a class with ``run`` in place of ``forward`` see :class:`harness.elsewhere.PlainBackend`.
    """

    supported_hook_points: Sequence[str]  #: in forward order
    non_fireable_hook_points: dict[str, str]  #: name → why not

    @classmethod
    def boot(cls, config: BootConfig) -> Self:
        """Start the engine; everything the caller got wrong is a UsageError before weights are loaded."""
        ...

    def describe(self) -> dict[str, Any]:
        """What is running, JSON-able: versions, runner, device, seconds to boot."""
        ...

    def forward(
        self,
        input_ids: Sequence[Sequence[int]],
        *,
        capture: Sequence[str] = (),
        intervene: Any | None = None,
        max_new_tokens: int = 1,
        return_logits: bool = False,
    ) -> ForwardResult:
        """Run the prompts as one batch; see :class:`~harness.results.ForwardResult` for shapes.

        ``intervene`` is one spec set, or one per prompt, as :mod:`harness.interventions` reads them; what is captured
        is the value after the edit, and the next call is clean again.
        """
        ...

    def raw_logits(self, input_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The backend's own logits of each prompt, (n_prompt, d_vocab) fp32, by a path no capture touches."""
        ...

    def close(self) -> None:
        """Release processes and memory; safe to call twice."""
        ...


def backend_names() -> list[str]:
    """Names registered under the ``harness.backends`` entry-point group."""
    return sorted({point.name for point in entry_points(group="harness.backends")})


class Bootable(Protocol):
    """What a backend is booted with: its class, or what stands for it. It may also have ``check(config)``."""

    def boot(self, config: BootConfig) -> Any:
        """A :class:`Backend`; see :meth:`Backend.boot`."""
        ...


def load_backend(name: str) -> Bootable:
    """Import the backend class registered as ``name``, or say how ``name@python`` is booted.

    Raises:
        UsageError: no such name, with those that exist.
    """
    from harness.elsewhere import Elsewhere, PlainClass

    if "@" in name:
        return Elsewhere(*name.split("@", 1))
    for point in entry_points(group="harness.backends"):
        if point.name == name:
            cls: Any = _loaded(point)
            bootable: Bootable = cls if hasattr(cls, "forward") else PlainClass(cls)
            return bootable
    from harness.adapters import ADAPTERS

    own = f"; in an interpreter of their own, as NAME@path/to/python: {', '.join(ADAPTERS)}"
    msg = f"no backend {name!r} is installed; there are: {', '.join(backend_names()) or 'none'}{own}"
    raise UsageError(msg)


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # whatever a package of somebody else's does when it is imported
        msg = f"backend {point.name!r} ({point.value}) cannot be imported: {type(error).__name__}: {error}"
        raise UsageError(msg) from error
