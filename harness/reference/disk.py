"""The reference's results on disk, by content: the next run of the same sequences on the same weights reads them.

A file is named after everything its numbers depend on: the checkpoint's bytes, the dtype, the role, the tokens, the
edits, the versions of torch and transformers, the threads, and this package's own reference code. What is read back is
what was written, or it is computed again: a wrong reference would make a wrong verdict.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from harness.reference.entries import Entry, fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from harness.reference.entries import Asked

__all__ = ["DiskCache"]

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_PRINT = "fingerprint"
#: Reading back and checking runs at least at this many bytes per second: what is computed faster is not worth a file.
_WORTH = 200e6
#: So many entries are written between two looks at what the folder holds; other processes write into it too.
_LISTED_EVERY = 256
#: Share of the limit that stays when room is made, so that it is not made for each entry.
_LEFT = 0.9


class DiskCache:
    """A folder of entries, the least recently used of which go first once it is full.

    Several processes may use one folder. Nothing that goes wrong with it costs a run: what cannot be read is computed,
    what cannot be written is not kept, and a line in the log says so.

    Args:
        folder: made if it is not there.
        max_bytes: most that its entries take.

    Attributes:
        hits, misses, kept: entries read, looked for in vain, and written by this object.
    """

    def __init__(self, folder: Path, max_bytes: int = 4 << 30) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.hits = self.misses = self.kept = 0
        #: Bytes of the folder as far as this process knows, and its own entries since it last looked.
        self._held, self._unlisted = 0, _LISTED_EVERY

    def path(
        self, checkpoint: str, dtype: torch.dtype, role: str, asked: Asked, templates: Sequence[str], how: str
    ) -> Path:
        """Where the entry of all this lies, or would."""
        sha = hashlib.sha256()
        parts = (_of_checkpoint(checkpoint), str(dtype), role, tuple(templates), how, _surroundings())
        sha.update(repr(parts).encode())
        asked.update(sha)
        return self.folder / f"{sha.hexdigest()[:40]}{_SUFFIX}"

    def load(self, path: Path) -> Entry | None:
        """The entry, or None: it is not there, or not what was written, and then it is removed."""
        try:
            with safe_open(path, framework="pt") as file:
                said = (file.metadata() or {}).get(_PRINT)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            if fingerprint(tensors) != said:
                msg = "its bytes are not those that were written"
                raise ValueError(msg)  # noqa: TRY301 - told below, as every other defect
            entry = Entry.from_tensors(tensors)
            os.utime(path)
        except FileNotFoundError:
            self.misses += 1
            return None
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            logger.warning("reference cache: %s is computed again: %s", path.name, error)
            with suppress(OSError):
                path.unlink()
            self.misses += 1
            return None
        self.hits += 1
        return entry

    def save(self, path: Path, entry: Entry, seconds: float) -> None:
        """Keep an entry that took so long to compute, if reading it back is faster."""
        if seconds * _WORTH < entry.nbytes or entry.nbytes > self.max_bytes:
            return
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in entry.tensors().items()}
        partial = path.with_name(f".{path.stem}-{os.getpid()}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(entry.nbytes)
            save_file(tensors, partial, metadata={_PRINT: fingerprint(tensors)})
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            logger.warning("reference cache: %s could not be kept in %s: %s", path.name, self.folder, error)
            with suppress(OSError):
                partial.unlink()
            return
        self.kept += 1

    def _make_room(self, n_bytes: int) -> None:
        """Let the least recently used entries go where one more does not fit.

        The folder is listed only now and then: that takes longer than most entries take to compute.
        """
        self._held += n_bytes
        self._unlisted += 1
        if self._held <= self.max_bytes and self._unlisted < _LISTED_EVERY:
            return
        files = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with suppress(OSError):  # another process may have removed it
                stat = path.stat()
                files.append((stat.st_mtime_ns, stat.st_size, path))
        self._held, self._unlisted = sum(size for _, size, _ in files) + n_bytes, 0
        if self._held <= self.max_bytes:
            return
        for _, size, path in sorted(files):
            with suppress(OSError):
                path.unlink()
            self._held -= size
            if self._held <= self.max_bytes * _LEFT:
                return


@cache
def _of_checkpoint(folder: str) -> str:
    """SHA-256 of what a checkpoint computes with: its config and its weights."""
    sha = hashlib.sha256()
    for path in sorted([*Path(folder).glob("*.json"), *Path(folder).glob(f"*{_SUFFIX}")]):
        with path.open("rb") as stream:
            sha.update(f"{path.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return sha.hexdigest()


@cache
def _surroundings() -> tuple[str, ...]:
    """What else decides the last bits: versions, threads, instruction set, and the code that reads the values."""
    import torch
    import transformers

    code = hashlib.sha256()
    package = Path(__file__).parent
    names = ("conventions.py", "geometry.py", "interventions.py", "points.py")
    vocabulary = [package.parent / name for name in names]
    for path in [*sorted(package.glob("*.py")), *vocabulary]:
        code.update(path.read_bytes())
    return (
        torch.__version__,
        transformers.__version__,
        str(torch.get_num_threads()),
        torch.backends.cpu.get_cpu_capability(),
        code.hexdigest(),
    )
