"""Memory that a worker fills and the driver maps: captured rows reach another process without being sent.

The memory has no name (``memfd_create``), so nothing is left behind by whoever dies; the driver finds it under
``/proc/<pid>/fd``. Whether it can is tried and not assumed: a rank on another machine or in another container cannot.
"""

from __future__ import annotations

import ctypes
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Buffer

__all__ = ["ALIGNMENT", "HERE", "LENT", "SENT", "Lent", "borrow", "lend", "where_lent"]

#: Blocks begin at multiples of so many bytes: those of the widest dtype may follow those of the narrowest.
ALIGNMENT = 64
#: How captured rows reach the driver: as they are, in memory that was lent, or as bytes.
HERE, LENT, SENT = "here", "lent", "sent"
#: ``MADV_POPULATE_READ``, which Python has no name for.
_POPULATE_READ = 22


@dataclass
class Lent:
    """What one worker has lent: blocks one behind the other.

    Attributes:
        size: bytes, all told.
        taken: bytes that have been filled so far.
    """

    descriptor: int
    size: int
    taken: int = 0

    def put(self, parts: Iterable[Buffer]) -> int:
        """Write one behind the other, the first at the next multiple of :data:`ALIGNMENT`; where that is.

        Written and not mapped: fresh pages then cost half as much.
        """
        begin = self.taken = -(-self.taken // ALIGNMENT) * ALIGNMENT
        for part in parts:
            left = memoryview(part)
            while left:  # the system may take less than it is given
                written = os.pwrite(self.descriptor, left, self.taken)
                self.taken, left = self.taken + written, left[written:]
        return begin

    @property
    def address(self) -> tuple[int, int, int]:
        """Process, descriptor and bytes, by which :func:`borrow` finds it."""
        return os.getpid(), self.descriptor, self.size

    def forget(self) -> None:
        """Let go of it; whoever has mapped it keeps it."""
        os.close(self.descriptor)


def lend(size: int) -> Lent:
    """So many bytes (at least one) that another process of this machine can map.

    Raises:
        OSError: the system has none to give.
        AttributeError: it knows no such memory; Linux does.
    """
    descriptor = os.memfd_create("vllm-parity")
    try:
        os.ftruncate(descriptor, size)
    except BaseException:  # nobody else knows the descriptor
        os.close(descriptor)
        raise
    return Lent(descriptor, size)


def borrow(address: Sequence[int]) -> torch.Tensor:
    """Map what a worker has lent, (bytes,) uint8, to be read and, for oneself alone, written to.

    It is unmapped with its last view, and holds no descriptor.

    Raises:
        OSError: there is no such memory where this process is.
    """
    process, number, size = address
    path = Path("/proc", str(process), "fd", str(number))
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size < size:  # of another process that has the number here
        msg = f"{path} is not the memory of {size} bytes that was lent"
        raise OSError(msg)
    # Private: what is written to is copied first, page by page. A caller may change its rows, and nobody else sees it.
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    # Linux before 5.14 does not know it, and maps pages as they are met.
    _madvise(mapped.data_ptr(), size, _POPULATE_READ)
    return mapped


def _madvise(begin: int, size: int, advice: int) -> None:
    """``madvise``, of memory that Python has no object for."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_int(advice))


def where_lent(addresses: Sequence[Sequence[int] | None], content: bytes) -> str:
    """How this process reaches what workers hold, having had each lend just this content.

    Returns:
        :data:`HERE`: all of them are this process. :data:`LENT`: others, whose memory it can map. :data:`SENT`:
        neither.
    """
    try:
        if all(one is not None and borrow(one).numpy().tobytes() == content for one in addresses):
            own = {address[0] == os.getpid() for address in addresses if address is not None}
            return HERE if own == {True} else LENT if own == {False} else SENT
    except (OSError, RuntimeError):  # it cannot be mapped from here
        pass
    return SENT
