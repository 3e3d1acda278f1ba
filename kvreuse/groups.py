"""Groups: the parts of a data-parallel replica, whether all of its ranks are there (R4), and what all have (R5)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import warnings
from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from . import _status, tickets
from ._api import TableStats
from ._context import Context
from .errors import (
    AttachRefusedError,
    BusyError,
    CorruptError,
    ForkedError,
    HandleClosedError,
    KeeperUnavailableError,
    KVReuseError,
    NotReadyError,
    RangeError,
    StaleEpochError,
    WaitTimeoutError,
)
from .manifest import Manifest, Rank, Topology, compare, describe, incompatible
from .parts import Keys, PackedKeys, pack_keys
from .readers import PartReader

if TYPE_CHECKING:
    from .keeper.client import Keeper
    from .keeper.protocol import ReadinessReply

Int64Array = npt.NDArray[np.int64]

# With a stall bound, the ranks are looked at so often within it.
_LOOKS = 4


@dataclasses.dataclass(frozen=True)
class RankReadiness:
    """One rank of a group.

    Attributes
    ----------
    ready : bool
    reason : str
        Why not.
    pid : int or None
        Of its worker, None if it has none.
    blocks : int
        Slots of its part; where its attach was refused, what it asked for; else 0.
    progress : tuple of int
        (done, total) as its worker told by Part.progress; (0, 0) if it did not.
    stalled : bool
        Its heartbeat has not moved for the profile's stall_s. Nothing is fenced by that.
    died_at, ready_at : float
        CLOCK_MONOTONIC seconds of this host: when its last worker was found gone (its pidfd fired) or said goodbye, and
        when the present one had its part open; 0.0 if that did not happen.
    """

    ready: bool
    reason: str
    pid: int | None
    blocks: int
    progress: tuple[int, int]
    stalled: bool
    died_at: float
    ready_at: float


@dataclasses.dataclass(frozen=True)
class Readiness:
    """Whether every rank of a group has exactly one live, sealed, compatible part, as of the call.

    Attributes
    ----------
    ready : bool
    reason : str
        Why not, all ranks in one text.
    ranks : dict of int to RankReadiness
        By Rank.index.
    blocks : int
        So many blocks can every rank hold: the smallest part's slots.
    """

    ready: bool
    reason: str
    ranks: dict[int, RankReadiness]
    blocks: int

    def __bool__(self) -> bool:
        return self.ready

    def __str__(self) -> str:
        return "ready" if self.ready else f"not ready: {self.reason}"


class GroupClaim(Context):
    """A right to read some blocks on every rank, which keeps them from being evicted. Made by Group.claim.

    Attributes
    ----------
    tag : hashable or None
        Under which the group holds it.
    missing : dict of int to str
        The ranks (by Rank.index) that could not be asked, and why; the claim is empty then.
    """

    def __init__(self, group: Group, count: int, entries: dict[int, _Entry], tag: Hashable, missing: dict[int, str]):
        self._group = group
        self._count = count
        self._entries = entries
        self._views: list[memoryview] = []
        self._done = False
        self._pid = os.getpid()
        self.tag = tag
        self.missing = missing

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<kvreuse.GroupClaim {self._count} blocks, tag {self.tag!r}>"

    def __enter__(self) -> GroupClaim:
        return self

    def _entry(self, rank: Rank | int) -> _Entry:
        if self._done:
            raise HandleClosedError("this GroupClaim was released", status=-3, name="HANDLE_CLOSED")
        index = self._group._index(rank)
        if index not in self._entries:
            raise RangeError(f"this GroupClaim has no blocks on rank {index}", status=-6, name="RANGE")
        return self._entries[index]

    def ticket(self, rank: Rank | int) -> bytes:
        """Make the bytes to send to that rank's worker, for Part.adopt: its part, and each block's slot and generation.

        Parameters
        ----------
        rank : Rank or int
            Or its Rank.index.

        Raises
        ------
        RangeError
            The claim is empty, or there is no such rank.
        HandleClosedError
            It was released.
        """
        entry = self._entry(rank)
        return tickets.pack(entry.reader.part_id, entry.slots, entry.generations)

    def view(self, rank: Rank | int, i: int) -> memoryview:
        """Give the read-only bytes of entry i on that rank; valid until release. For a group with `read_data`."""
        entry = self._entry(rank)
        i = _status.as_integer(i, "i")
        if not 0 <= i < self._count:
            raise RangeError(f"entry {i} is outside of this GroupClaim: it has {self._count}", status=-6, name="RANGE")
        view = entry.reader.view(int(entry.slots[i]))
        self._views.append(view)
        return view

    def release(self) -> None:
        """Give the claim back on all ranks; again does nothing. Views end."""
        self._group._drop_tag(self)
        self._end()

    def _end(self) -> None:
        if self._done or self._pid != os.getpid():
            return
        self._done = True
        for view in self._views:
            with contextlib.suppress(BufferError):
                view.release()
        self._views = []
        with self._group._lock:
            self._group._close_leaving()
        for entry in self._entries.values():
            # A part that is over has no claims; a lock that cannot be had leaves them to the session's end.
            with contextlib.suppress(KVReuseError):
                entry.reader.release(entry.slots)

    def close(self) -> None:
        self.release()

    def __del__(self) -> None:
        if not getattr(self, "_done", True) and self._pid == os.getpid():
            if self._count:
                warnings.warn(f"{self!r} was dropped without release()", ResourceWarning, stacklevel=2, source=self)
            self._end()


@dataclasses.dataclass
class _Entry:
    reader: PartReader
    slots: Int64Array
    generations: Int64Array


class _Moved(Exception):
    """What was known of the group does not hold any more: look again."""


class Group(Context):
    """The parts of one data-parallel replica, seen from any process (a scheduler's, say). Made by Keeper.group.

    It opens a reader's session of each part at the first call that needs one; from then on match, claim, release and
    touch need no round trip to the keeper (K6). Usable from any thread.
    """

    def __init__(self, keeper: Keeper, name: str, manifest: Manifest | None, dp: int, read_data: bool = False) -> None:
        self._keeper = keeper
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._read_data = read_data
        self._topology: Topology | None = manifest.topology if manifest else None
        self._readers: dict[int, PartReader] = {}
        self._leaving: list[PartReader] = []
        self._is_checked = False  # that the group's manifest is the expected one
        self._tags: dict[Hashable, GroupClaim] = {}
        self._closed = False
        self.name = name
        self.dp = dp
        self.manifest = manifest

    def __repr__(self) -> str:
        return f"<kvreuse.Group {self.name!r} dp {self.dp}>"

    def __enter__(self) -> Group:
        return self

    def readiness(self) -> Readiness:
        """Compute it now.

        Returns
        -------
        Readiness
            Not ready also where the group has another manifest than this Group was made with; the fields are named.

        Raises
        ------
        KeeperUnavailableError
            The keeper did not answer in time.
        """
        return self._ask(0.0)[0]

    def wait_ready(self, timeout: float, stall_timeout: float | None = None) -> Readiness:
        """Wait until the group is ready.

        Parameters
        ----------
        timeout : float
            Bound of the wait, seconds.
        stall_timeout : float, optional
            Give up earlier: when nothing has changed on any rank for so many seconds.

        Returns
        -------
        Readiness
            Its `ready` is True.

        Raises
        ------
        IncompatibleError
            The group is ready, with another manifest than this Group was made with.
        WaitTimeoutError
            Time ran out; the text names the ranks that are not ready and why, `readiness` has it all.
        KeeperUnavailableError
            The keeper did not answer in time.
        """
        started = changed = time.monotonic()
        found, reply = self._ask(0.0)
        while not found.ready:
            if reply.ready:
                raise incompatible(self._differences(reply))
            now = time.monotonic()
            left, bound = started + timeout - now, timeout
            if stall_timeout is not None and changed + stall_timeout - now < left:
                left, bound = changed + stall_timeout - now, stall_timeout
            if left <= 0:
                what = "did not get ready" if bound == timeout else "made no progress"
                raise WaitTimeoutError(
                    f"group {self.name!r} (dp {self.dp}) {what} within {bound} s: {found.reason}",
                    status=-23,
                    name="WAIT_TIMEOUT",
                    readiness=found,
                )
            before = found
            found, reply = self._ask(left if stall_timeout is None else min(left, stall_timeout / _LOOKS))
            if found != before:
                changed = time.monotonic()
        return found

    def _ask(self, wait_s: float) -> tuple[Readiness, ReadinessReply]:
        reply = self._keeper._readiness(self.name, self.dp, wait_s)
        ranks = {
            rank.index: RankReadiness(
                rank.ready,
                rank.reason,
                rank.pid or None,
                rank.blocks,
                rank.progress,
                rank.stalled,
                rank.died_at,
                rank.ready_at,
            )
            for rank in reply.ranks
        }
        differences = self._differences(reply)
        if differences:
            reason = f"the group has another manifest: {describe(differences)}"
            return Readiness(False, reason, ranks, reply.capacity), reply
        return Readiness(reply.ready, reply.reason, ranks, reply.capacity), reply

    def _differences(self, reply: ReadinessReply) -> dict[str, tuple[object, object]]:
        if self.manifest is None or reply.manifest is None:
            return {}
        # Whose rank's manifest the group was made with is not known: only what is equal over all of its ranks counts.
        kept = Manifest.from_dict(reply.manifest)
        return compare(kept, self.manifest, across_pp=kept.topology.pp > 1)

    # ---- what all ranks have ----

    def match(self, keys: Keys) -> int:
        """Count the leading keys that every rank has (R5). Advisory: reserves nothing and promises nothing (I1).

        Parameters
        ----------
        keys : sequence of bytes, or uint8 array of shape (n, key_size)
            Repeats are allowed and count each time.

        Returns
        -------
        int
            0 also where the group is not ready or a rank's lock was not had in time: `explain` says why.

        Raises
        ------
        KeeperUnavailableError
            A part has to be opened, and the keeper did not answer in time.
        """
        return self._prefix(pack_keys(keys), False)[0]

    def claim(self, keys: Keys, tag: Hashable = None) -> GroupClaim:
        """Claim the leading keys that every rank has: their blocks stay until the claim is released.

        Parameters
        ----------
        keys :
            As `match`.
        tag : hashable, optional
            The group holds the claim under it until `release(tag)`. A tag that is held already is replaced: the new
            claim is taken first, then the old one is released, so that asking many times changes nothing else.

        Returns
        -------
        GroupClaim
            May be empty; `missing` says which ranks could not be asked. Owned by the caller, with a tag by the group.

        Raises
        ------
        KeeperUnavailableError
            As `match`.
        RangeError
            A block has more claims of this session than can be counted (1048575).
        """
        with self._lock:
            count, entries, missing = self._prefix(pack_keys(keys), True)
            claim = GroupClaim(self, count, entries, tag, missing)
            if tag is not None:
                before = self._tags.pop(tag, None)
                self._tags[tag] = claim
                if before is not None:
                    before._end()
        return claim

    def release(self, tag: Hashable) -> bool:
        """Release the claim that is held under a tag.

        Returns
        -------
        bool
            Whether there was one.
        """
        with self._lock:
            claim = self._tags.pop(tag, None)
            if claim is not None:
                claim._end()
        return claim is not None

    def touch(self, keys: Keys) -> int:
        """Make present keys the most recent on every rank, from the last to the first.

        Returns
        -------
        int
            Keys that every rank has; 0 where a rank cannot be asked.
        """
        packed = pack_keys(keys)
        touched = packed.count
        with self._lock:
            for _ in range(2):
                if self._complete():
                    return 0
                try:
                    for reader in self._each():
                        touched = min(touched, reader.touch(packed))
                    return touched if self._readers else 0
                except StaleEpochError:
                    self._forget_stale()
                except (NotReadyError, WaitTimeoutError):
                    return 0
        return 0

    def explain(self, keys: Keys) -> Explanation:
        """Say what each rank has of the keys, and which ranks cannot be asked and why. For people: it may be slow.

        Returns
        -------
        Explanation
        """
        packed = pack_keys(keys)
        with self._lock:
            missing = self._complete()
            matched: dict[int, int] = {}
            for index, reader in sorted(self._readers.items()):
                try:
                    matched[index] = reader.match(packed)
                except (NotReadyError, WaitTimeoutError, StaleEpochError, CorruptError) as error:
                    missing[index] = str(error)
            if missing:
                with contextlib.suppress(KeeperUnavailableError):
                    found = self.readiness()
                    for index in missing:
                        state = found.ranks.get(index)
                        if state is not None and state.reason:
                            missing[index] = state.reason
        hits = 0 if missing or not matched else min(matched.values())
        return Explanation(hits, tuple(sorted(missing)), matched, missing)

    def clear(self) -> GroupClearResult:
        """Forget the content of all ranks, in one step each. Claimed blocks keep their memory until released.

        A reservation that was made before does not become content after it: its commit is StaleBlockError.

        Returns
        -------
        GroupClearResult
            Also says which ranks could not be emptied yet because their lock was held; the keeper goes on trying, and
            the group is not ready until it is done.

        Raises
        ------
        InvalidHandleError
            No such group.
        KeeperUnavailableError
            The keeper did not answer in time.
        """
        reply = self._keeper._clear_group(self.name, self.dp)
        return GroupClearResult(reply.removed, dict(reply.failed))

    def set_weights_id(self, weights_id: str) -> GroupClearResult:
        """Say that the model's weights are others now: all content is forgotten, and the group's manifest says so (I4).

        Setting an id back restores nothing; the present one changes nothing.

        Returns
        -------
        GroupClearResult
            As `clear`.

        Raises
        ------
        RangeError, TypeError
            The id is empty, or no str.
        InvalidHandleError, KeeperUnavailableError
            As `clear`.
        """
        if not isinstance(weights_id, str):
            raise TypeError(f"weights_id must be str, not {type(weights_id).__name__}")
        if not weights_id:
            raise RangeError("weights_id must not be empty", status=-6, name="RANGE")
        reply = self._keeper._clear_group(self.name, self.dp, weights_id)
        with self._lock:
            if self.manifest is not None:
                self.manifest = dataclasses.replace(self.manifest, weights_id=weights_id)
            self._is_checked = False
        return GroupClearResult(reply.removed, dict(reply.failed))

    def stats(self) -> dict[int, TableStats]:
        """Read the counts of each rank's part, by Rank.index; ranks without a part are left out."""
        with self._lock:
            self._complete()
            return {index: reader.stats() for index, reader in sorted(self._readers.items())}

    # ---- readers; all under self._lock ----

    def _index(self, rank: Rank | int) -> int:
        if isinstance(rank, Rank):
            if self._topology is None:
                raise RangeError("the group's topology is not known yet", status=-6, name="RANGE")
            return rank.index(self._topology)
        return _status.as_integer(rank, "rank")

    def _each(self) -> list[PartReader]:
        return [reader for _, reader in sorted(self._readers.items())]

    def _complete(self) -> dict[int, str]:
        """Open the parts that are not open; say which ranks cannot be, by index, and why."""
        if self._closed:
            raise HandleClosedError("the group is closed", status=-3, name="HANDLE_CLOSED")
        if self._pid != os.getpid():
            raise ForkedError("the group belongs to the parent process: connect anew", status=-26, name="FORKED")
        if self._is_checked and self._topology is not None and len(self._readers) == self._topology.size:
            return {}
        found, reply = self._ask(0.0)
        if reply.manifest is None:
            return {0: found.reason}
        topology = Manifest.from_dict(reply.manifest).topology
        if self._differences(reply):
            self._close_readers()
            return dict.fromkeys(range(topology.size), found.reason)
        if topology != self._topology:
            self._close_readers()
            self._topology = topology
        missing = {}
        for index in range(topology.size):
            if index in self._readers:
                continue
            try:
                self._readers[index] = PartReader(self._keeper._open(self.name, self.dp, index, self._read_data))
            except (AttachRefusedError, StaleEpochError, NotReadyError) as error:
                state = found.ranks.get(index)
                missing[index] = (state and state.reason) or str(error)
        self._is_checked = not missing
        return missing

    def _prefix(self, packed: PackedKeys, is_claim: bool) -> tuple[int, dict[int, _Entry], dict[int, str]]:
        """Count, and claim, what all ranks have: (count, entries by rank, missing ranks). Never two locks at once."""
        with self._lock:
            # Once more where a part was replaced since it was opened.
            for _ in range(2):
                missing = self._complete()
                if missing:
                    return 0, {}, missing
                try:
                    return self._walk(packed, is_claim)
                except _Moved:
                    self._forget_stale()
            return 0, {}, self._complete()

    def _walk(self, packed: PackedKeys, is_claim: bool) -> tuple[int, dict[int, _Entry], dict[int, str]]:
        count = packed.count
        entries: dict[int, _Entry] = {}
        missing: dict[int, str] = {}
        try:
            for index, reader in sorted(self._readers.items()):
                if not reader.reuse_enabled:
                    missing[index] = "reuse is off"
                elif is_claim:
                    slots, generations = reader.claim(packed.prefix(count))
                    entries[index] = _Entry(reader, slots, generations)
                    count = len(slots)
                else:
                    count = reader.match(packed.prefix(count))
                if missing or not count:
                    break
            # A weights change by another process: what was found may be of other weights than this group expects.
            if not missing and any(reader.content_epoch() != reader.epoch for reader in self._readers.values()):
                self._is_checked = False
                raise _Moved
        except StaleEpochError as error:
            self._give_back(entries, 0)
            raise _Moved from error
        except (NotReadyError, WaitTimeoutError, CorruptError) as error:
            missing[index] = str(error)
        except BaseException:
            self._give_back(entries, 0)
            raise
        if missing:
            count = 0
        self._give_back(entries, count)
        return count, entries if count else {}, missing

    @staticmethod
    def _give_back(entries: dict[int, _Entry], keep: int) -> None:
        """Keep the first entries of each rank, release the rest."""
        for entry in entries.values():
            with contextlib.suppress(KVReuseError):
                entry.reader.release(entry.slots[keep:])
            entry.slots, entry.generations = entry.slots[:keep], entry.generations[:keep]

    def _forget_stale(self) -> None:
        """Close the readers of parts that are over, and check the group's manifest again where content was emptied."""
        for index, reader in list(self._readers.items()):
            try:
                epoch = reader.content_epoch()
                reader.match(_NO_KEYS)
            except (NotReadyError, WaitTimeoutError):
                pass
            except KVReuseError:
                self._close_reader(index)
                continue
            reader.epoch = epoch
        self._is_checked = False

    def _close_reader(self, index: int) -> None:
        self._leaving.append(self._readers.pop(index))
        self._close_leaving()

    def _close_leaving(self) -> None:
        """Close readers of parts that are over; one whose views are used stays until they are not."""
        for reader in list(self._leaving):
            with contextlib.suppress(BusyError):
                reader.close()
                self._leaving.remove(reader)

    def _close_readers(self) -> None:
        for index in list(self._readers):
            self._close_reader(index)

    def _drop_tag(self, claim: GroupClaim) -> None:
        with self._lock:
            if claim.tag is not None and self._tags.get(claim.tag) is claim:
                del self._tags[claim.tag]

    def close(self) -> None:
        """Release all claims and close the sessions; closing again does nothing.

        Raises
        ------
        BusyError
            A view of a claim is still used.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            for claim in self._tags.values():
                claim._end()
            self._tags.clear()
            self._leaving += self._readers.values()
            self._readers = {}
            self._closed = True
            self._close_leaving()
            if self._leaving:
                raise BusyError(
                    "a view of a claim is still used, by a numpy array say: drop it, and close again",
                    status=-12,
                    name="BUSY",
                )

    def __del__(self) -> None:
        if (getattr(self, "_readers", None) or getattr(self, "_leaving", None)) and self._pid == os.getpid():
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=2, source=self)
            with contextlib.suppress(KVReuseError):
                self.close()


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What each rank has of some keys, as of the call.

    Attributes
    ----------
    hits : int
        What `match` would say.
    missing : tuple of int
        Ranks (by Rank.index) that could not be asked.
    matched : dict of int to int
        Leading keys that each other rank has.
    reasons : dict of int to str
        Why the missing ones are.
    """

    hits: int
    missing: tuple[int, ...]
    matched: dict[int, int]
    reasons: dict[int, str]

    def __str__(self) -> str:
        text = f"{self.hits} hit(s); " + ", ".join(f"rank {i}: {n}" for i, n in self.matched.items())
        return text + "".join(f"; rank {index} missing: {reason}" for index, reason in self.reasons.items())


@dataclasses.dataclass(frozen=True)
class GroupClearResult:
    """Blocks removed, over all ranks; and why some ranks (by Rank.index) could not be emptied yet."""

    removed: int
    failed: dict[int, str]


_NO_KEYS = pack_keys(())

__all__ = ["Explanation", "Group", "GroupClaim", "GroupClearResult", "RankReadiness", "Readiness"]
