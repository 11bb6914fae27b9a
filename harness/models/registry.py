"""From the name a user types to a checkpoint folder on this machine."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from harness.errors import UsageError
from harness.models import smollm2
from harness.models.cache import cache_dir, materialise
from harness.models.checkpoint import has_tokenizer
from harness.models.tiny import TINY_MODELS, TinyModel

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ModelSource", "bundled", "resolve"]

#: One bare word is taken for a bundled name: the hub's own are all under an owner today.
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
#: What of a hub repository is fetched: never pickled weights, never code.
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
#: Below this similarity a suggestion misleads more than it helps.
_SIMILAR = 0.4


def __dir__() -> list[str]:
    """Only the public names."""
    return __all__


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model comes from. Cheap to make: nothing is built or fetched before `fetch`."""

    name: str  #: bundled name, hub id, or the local folder as it was given
    kind: Literal["bundled", "local", "hub"]
    description: str  #: one line for a list
    get: Callable[[], Path]  #: what `fetch` calls
    has_tokenizer: bool | None = None  #: None: not on this machine yet, so not known before `fetch`
    get_config: Callable[[], Path] | None = None  #: what `fetch_config` calls; None: `get`

    def fetch(self) -> Path:
        """Return the checkpoint's folder, building or downloading it first where that is needed.

        Raises:
            UsageError: it cannot be had; the message says why and what to do.
        """
        return self.get()

    def fetch_config(self) -> Path:
        """Return a folder with the model's config, downloading no weights for it.

        Raises:
            UsageError: it cannot be had; the message says why and what to do.
        """
        return (self.get_config or self.get)()


def bundled() -> list[ModelSource]:
    """Return the models that need no hub, real weights first."""
    return [
        ModelSource(
            name=smollm2.NAME,
            kind="bundled",
            description=smollm2.DESCRIPTION,
            get=lambda: materialise(smollm2.NAME, smollm2.RECIPE_VERSION, smollm2.build),
            has_tokenizer=True,
        ),
        *map(_tiny, TINY_MODELS),
    ]


def _tiny(model: TinyModel) -> ModelSource:
    return ModelSource(
        name=model.name,
        kind="bundled",
        description=model.description,
        get=lambda: materialise(model.name, model.recipe_version, model.build),
        has_tokenizer=False,
    )


def resolve(name_or_path: str | Path) -> ModelSource:
    """Return the source of a bundled name, a local folder, or a hub id `owner/name`, looked up in that order.

    Raises:
        UsageError: nothing by that name; or a hub id that is not in the local hub cache while the hub is
            switched off by HF_HUB_OFFLINE.
    """
    wanted = str(name_or_path)
    sources = {source.name: source for source in bundled()}
    if wanted in sources:
        return sources[wanted]
    folder = Path(wanted).expanduser()
    if wanted.strip() and folder.is_dir():
        found = folder.absolute()
        return ModelSource(
            name=wanted,
            kind="local",
            description=f"local folder {found}",
            get=lambda: found,
            has_tokenizer=has_tokenizer(found),
        )
    if _HUB_ID.fullmatch(wanted) and not isinstance(name_or_path, Path):
        return _hub(wanted)
    if isinstance(name_or_path, Path) or wanted.startswith((".", "~")) or folder.is_absolute():
        msg = f"model folder {wanted!r} does not exist; {_ways_out(list(sources))}"
    else:
        near = difflib.get_close_matches(wanted.lower(), sources, n=1, cutoff=_SIMILAR)
        hint = f"did you mean {near[0]!r}? " if near else ""
        msg = f"unknown model {wanted!r}: {hint}{_ways_out(list(sources))}"
    raise UsageError(msg)


def _ways_out(names: list[str]) -> str:
    return f"use a bundled name ({', '.join(names)}), a checkpoint's folder, or a Hugging Face id owner/name"


def _hub(repo: str) -> ModelSource:
    """Return the source of a hub id, checked against the local hub cache first: that needs no network."""
    from huggingface_hub import is_offline_mode, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(repo, allow_patterns=list(_HUB_PATTERNS), local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        if is_offline_mode():
            near = difflib.get_close_matches(repo.split("/")[1].lower(), [m.name for m in bundled()], n=1)
            hint = f", or use the bundled {near[0]!r}" if near else ""
            msg = (
                f"model {repo!r} is neither a folder nor in the local hub cache, and HF_HUB_OFFLINE is set; "
                f"unset it, fetch the model before{hint}"
            )
            raise UsageError(msg) from error
        return ModelSource(
            name=repo,
            kind="hub",
            description=f"Hugging Face {repo}",
            get=lambda: _fetched(repo, _download),
            get_config=lambda: _fetched(repo, _download_config),
        )
    return ModelSource(
        name=repo,
        kind="hub",
        description=f"Hugging Face {repo} (in the local cache)",
        get=lambda: cached,
        has_tokenizer=has_tokenizer(cached),
    )


def _download(repo: str) -> Path:
    """Fetch a hub repository's config, safetensors weights and tokenizer."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo, allow_patterns=list(_HUB_PATTERNS)))


def _download_config(repo: str) -> Path:
    """Fetch its config alone. Not into the hub's own cache: a snapshot without weights there looks like a whole one."""
    from huggingface_hub import hf_hub_download

    folder = cache_dir() / "configs" / repo.replace("/", "--")
    return Path(hf_hub_download(repo, "config.json", local_dir=folder)).parent


def _fetched(repo: str, download: Callable[[str], Path]) -> Path:
    try:
        return download(repo)
    except Exception as error:  # the client's errors span httpx, OSError and its own; each means: not had
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        msg = (
            f"model {repo!r} could not be fetched from the hub ({reason}); check the id and the network, "
            f"or use a bundled model ({', '.join(source.name for source in bundled())})"
        )
        raise UsageError(msg) from error
