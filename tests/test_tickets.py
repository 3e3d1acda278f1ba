"""A ticket crosses processes: what is damaged, cut short or of another version is an error, never another block."""

from __future__ import annotations

import numpy as np
import pytest

import kvreuse
from kvreuse import tickets

PART = bytes(range(16))
SLOTS, GENERATIONS = np.array([3, 0, 2**40], np.int64), np.array([1, 2**62, 7], np.int64)


def test_what_goes_in_comes_out():
    for slots, generations in ((SLOTS, GENERATIONS), (SLOTS[:0], GENERATIONS[:0])):
        part_id, got_slots, got_generations = tickets.unpack(tickets.pack(PART, slots, generations))
        assert part_id == PART
        assert got_slots.tolist() == slots.tolist()
        assert got_generations.tolist() == generations.tolist()
        assert got_slots.flags.c_contiguous
        assert got_slots.dtype == np.int64


def test_the_layout_is_the_documented_one():
    """H1: golden bytes."""
    ticket = tickets.pack(PART, SLOTS[:1], GENERATIONS[:1])
    assert ticket[:-4] == (
        b"KVRT" + bytes([1, 0, 0, 0, 1, 0, 0, 0]) + PART + (3).to_bytes(8, "little") + (1).to_bytes(8, "little")
    )
    assert len(ticket) == 28 + 16 + 4


def test_cut_at_every_byte():
    ticket = tickets.pack(PART, SLOTS, GENERATIONS)
    for size in range(len(ticket)):
        with pytest.raises(kvreuse.CorruptError):
            tickets.unpack(ticket[:size])
    with pytest.raises(kvreuse.CorruptError):
        tickets.unpack(ticket + b"\0")


def test_every_bit_flipped():
    ticket = tickets.pack(PART, SLOTS, GENERATIONS)
    for bit in range(8 * len(ticket)):
        changed = bytearray(ticket)
        changed[bit // 8] ^= 1 << bit % 8
        # The version is read before the checksum: nothing after it is then.
        error = kvreuse.IncompatibleError if bit // 8 in (4, 5) else kvreuse.CorruptError
        with pytest.raises(error):
            tickets.unpack(bytes(changed))


@pytest.mark.parametrize("wrong", [None, "text", 7, [1]])
def test_what_is_no_bytes(wrong):
    with pytest.raises(TypeError):
        tickets.unpack(wrong)
