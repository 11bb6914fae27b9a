"""Memory lent from one process to another: found, kept after it was taken back, written to for oneself alone."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from harness.vllm.lending import ALIGNMENT, HERE, LENT, SENT, borrow, lend, where_lent
from harness.vllm.wire import decode_block, encode_block

PARTS = [torch.arange(6.0).view(2, 3), torch.full((1, 3), -1.0)]
HALVES = [part.to(torch.bfloat16)[:1] for part in PARTS]


def open_now() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def worker(pipe) -> None:
    """Lend two blocks; take them back when told to, and say what is then left open."""
    before = open_now()
    lent = lend(4096)
    pipe.send((lent.address, encode_block(HALVES, lent), encode_block(PARTS, lent)))
    pipe.recv()
    lent.forget()
    del lent
    pipe.send(open_now() - before)


@pytest.fixture
def lender():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=worker, args=(theirs,))
    process.start()
    try:
        assert ours.poll(60)
        yield ours
    finally:
        process.kill()
        process.join()


def test_blocks_are_read_where_the_worker_left_them(lender) -> None:
    address, halves, wholes = lender.recv()
    assert wholes["at"] == ALIGNMENT
    assert "data" not in wholes
    lent = borrow(address)
    assert torch.equal(decode_block(halves, lent), torch.cat(HALVES))
    rows = decode_block(wholes, lent)
    assert torch.equal(rows, torch.cat(PARTS))
    lender.send("take it back")
    assert lender.poll(60)
    assert lender.recv() == 0
    assert torch.equal(rows, torch.cat(PARTS))
    with pytest.raises(OSError, match="No such file"):
        borrow(address)


def test_what_was_borrowed_holds_no_descriptor(lender) -> None:
    address, halves, _ = lender.recv()
    before = open_now()
    kept = [decode_block(halves, borrow(address)) for _ in range(20)]
    assert open_now() == before
    assert all(torch.equal(one, torch.cat(HALVES)) for one in kept)


def test_what_is_written_to_it_stays_here(lender) -> None:
    address, halves, _ = lender.recv()
    here, there = (decode_block(halves, borrow(address)) for _ in range(2))
    here += 1
    assert torch.equal(here, torch.cat(HALVES) + 1)
    assert torch.equal(there, torch.cat(HALVES))
    assert torch.equal(decode_block(halves, borrow(address)), torch.cat(HALVES))


def test_how_rows_come_here_is_tried(lender) -> None:
    address, *_ = lender.recv()
    content = borrow(address).numpy().tobytes()
    assert where_lent([address], content) == LENT
    assert where_lent([address], content[:-1] + b"x") == SENT
    assert where_lent([(address[0], 1000, address[2])], content) == SENT
    assert where_lent([address, None], content) == SENT
    assert where_lent([(*address[:2], address[2] + 1)], content + b"x") == SENT
    read, write = os.pipe()  # as where this process' numbers are not those that the worker sees
    assert where_lent([(os.getpid(), read, len(content))], content) == SENT
    os.close(read)
    os.close(write)
    own = lend(len(content))
    try:
        own.put([content])
        assert where_lent([own.address], content) == HERE
        assert where_lent([own.address, address], content) == SENT
    finally:
        own.forget()


def test_sent_blocks_are_read_as_before() -> None:
    assert torch.equal(decode_block(encode_block(PARTS), None), torch.cat(PARTS))
