"""Slots that copies write into have an owner beside the caller: native/table_owners.c in Python.

They are not freed, nor sealed, before both have let go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from . import _ctypes_structs as c
from . import _fallback_part as part
from . import errors
from ._fallback_part import WRITING, Call, Table


def _why_not_reserved(table: Table, slot: int, generation: int) -> tuple[int, tuple[int, ...]] | None:
    """Say why a slot is not reserved under that generation, or given up: detail and values."""
    found, state = table.record_words[8 * slot + 4], table.state(slot)
    if found != generation:
        return c.KVR_DETAIL_GENERATION, (slot, generation, found)
    if state != WRITING:
        return c.KVR_DETAIL_SLOT_STATE, (slot, state, WRITING)
    if slot in table.given_up:
        return c.KVR_DETAIL_SLOT_GIVEN_UP, (slot,)
    return None


Stale = tuple[int, Exception] | None  # the entry, and what to raise


def check_owned(
    call: Call, table: Table, slots: Sequence[int], generations: Sequence[int], first: int = 0, last: int | None = None
) -> Stale:
    """See that the slots of entries first to last - 1 are reserved, and not given up. Needs no lock."""
    for i in range(first, len(slots) if last is None else min(last, len(slots))):
        why = _why_not_reserved(table, slots[i], generations[i]) if slots[i] >= 0 else None
        if why is not None:
            return i, call.error(c.KVR_ERROR_STALE_BLOCK, why[0], i, *why[1])
    return None


def own(call: Call, table: Table, owner: Any, slots: Sequence[int], generations: Sequence[int]) -> Stale:
    """Take the lock and make `owner` an owner of reserved slots (-1 is skipped), or say which one is not reserved."""
    call.take(table)
    for first in range(0, len(slots), part.HOLD_SLOTS):
        if first:
            call.breathe(table)
        stale = check_owned(call, table, slots, generations, first, first + part.HOLD_SLOTS)
        if stale is not None:
            return stale
    table.owners[owner] = frozenset(slot for slot in slots if slot >= 0)
    return None


def check_still(call: Call, table: Table, slots: Sequence[int], generations: Sequence[int], own_count: int) -> None:
    """Refuse slots that others write into, and such that a copy failed to fill. Needs no lock."""
    if not (table.owners or table.given_up or table.spoiled):
        return
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        others = table.owner_count(slot) - own_count
        if others > 0:
            raise call.error(c.KVR_ERROR_BUSY, c.KVR_DETAIL_SLOT_IN_FLIGHT, i, slot, others)
        if slot in table.given_up:
            raise call.error(c.KVR_ERROR_STALE_BLOCK, c.KVR_DETAIL_SLOT_GIVEN_UP, i, slot)
        if generations[i] and table.spoiled.get(slot) == generations[i]:
            raise call.error(c.KVR_ERROR_CORRUPT, c.KVR_DETAIL_SLOT_SPOILED, i, slot)


def disown(table: Table, owner: Any, slots: Sequence[int], generations: Sequence[int], is_spoiled: bool) -> None:
    """Stop being an owner; slots that were given up meanwhile are freed now, or by the writer's next call."""
    if is_spoiled:
        table.spoiled.update((slot, generations[i]) for i, slot in enumerate(slots) if slot >= 0)
    table.owners.pop(owner, None)
    if any(slot in table.given_up for slot in slots):
        # Taking the lock is what frees them.
        with contextlib.suppress(errors.KVReuseError):
            part.run("table_abort", table.handle, Call.take)


def unclaim(table: Table) -> None:
    """Give claims in `late` back now, or where the lock cannot be had, at the session's next call."""
    with contextlib.suppress(errors.KVReuseError):
        part.run("table_release", table.handle, _give_back)


def _give_back(call: Call, table: Table) -> None:
    call.take(table, check=False, repair=False)
    call.give_back(table)
