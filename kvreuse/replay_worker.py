"""One rank's worker of `kvreuse replay`: a process that attaches, and does with each request what an engine would.

Started as `python -m kvreuse.replay_worker FD`, FD being its end of a socket pair. Messages are msgpack, each after its
length (uint32, little endian). The worker ends when that socket does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
GROUP = "replay"
_LENGTH = struct.Struct("<I")


class Channel:
    """One end of the socket pair between coordinator and worker."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        data = msgspec.msgpack.encode(message)
        self._sock.sendall(_LENGTH.pack(len(data)) + data)

    def recv(self) -> dict[str, Any] | None:
        """Receive one message; None at the end. Raises TimeoutError after the socket's timeout."""
        head = self._read(_LENGTH.size)
        data = self._read(_LENGTH.unpack(head)[0]) if head else b""
        return msgspec.msgpack.decode(data) if data else None

    def _read(self, nbytes: int) -> bytes:
        parts, left = [], nbytes
        while left:
            try:
                part = self._sock.recv(left)
            except ConnectionError:
                return b""
            if not part:
                return b""
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close this end."""
        self._sock.close()


def keys_of(ids: Ids) -> npt.NDArray[np.uint8]:
    """Make the keys of ids: their 8 bytes, shape (n, 8)."""
    return np.ascontiguousarray(ids, "<i8").view(np.uint8).reshape(-1, 8)


def id_of(key: bytes) -> int:
    """Return the id of a key."""
    return int.from_bytes(key, "little")


class Pattern:
    """The bytes that a block must have: a function of its id and rank, cheap to make and different in every word."""

    def __init__(self, rank: int, block_bytes: int) -> None:
        self._rank = rank
        self._nbytes = block_bytes
        words = np.arange(1, -(-block_bytes // 8) + 1, dtype=np.uint64)
        self._base = words * np.uint64(0x9E3779B97F4A7C15)
        self._work = np.empty_like(self._base)

    def of(self, block_id: int) -> npt.NDArray[np.uint8]:
        """Return block_bytes bytes, valid until the next call."""
        mix = (block_id * 0xBF58476D1CE4E5B9 + (self._rank + 1) * 0x94D049BB133111EB) & (2**64 - 1)
        mix ^= mix >> 31
        np.bitwise_xor(self._base, np.uint64(mix), out=self._work)
        return self._work.view(np.uint8)[: self._nbytes]


class Player:
    """Plays requests on one part. `part` is a kvreuse.Part, or anything with its methods."""

    def __init__(self, part: Any, pattern: Pattern, blocks: int, verify: str) -> None:
        self._part = part
        self._pattern = pattern
        self._blocks = blocks
        self._verify = verify

    def match(self, ids: Ids) -> int:
        """Count the leading ids that are present."""
        return int(self._part.match(keys_of(ids)))

    def play(self, ids: Ids, hits: int, stop: bool = False, again: bool = False) -> dict[str, Any]:
        """Play one request of which `hits` leading ids are present on every rank.

        With `stop`, half of the bytes to write are written and nothing after; what was reserved and claimed stays so.
        With `again`, blocks may be missing that the restart found damaged: they are stored like others.

        Returns
        -------
        dict
            verified, corrupt (blocks); bytes_written; stored, evicted (ids).
        """
        part = self._part
        done: dict[str, Any] = {"verified": 0, "corrupt": 0, "bytes_written": 0, "stored": [], "evicted": []}
        claim = part.claim(keys_of(ids[:hits]))
        try:
            if len(claim) != hits and not again:
                raise RuntimeError(f"matched {hits} blocks, but only {len(claim)} could be claimed")
            bad = self._check(claim, ids, done)
            if bad:
                count = len(claim)
                claim.release()
                self._rewrite(bad, done)
                claim = part.claim(keys_of(ids[:count]))
                if len(claim) != count:
                    raise RuntimeError(f"of {count} blocks {len(bad)} were rewritten, but only {len(claim)} were there")
            keep = ids[: self._blocks]
            reservation = part.reserve(keys_of(keep), evict=True)
            try:
                done["evicted"] = [id_of(key) for key in reservation.evicted]
                wanted = [int(i) for i in np.flatnonzero(reservation.slots >= 0)]
                if stop:
                    done["bytes_written"] += self._fill_half(reservation, keep, wanted)
                    self._held = (claim, reservation)
                    return done
                for i in wanted:
                    np.frombuffer(reservation.view(i), np.uint8)[:] = self._pattern.of(int(keep[i]))
                reservation.commit()
                done["bytes_written"] += len(wanted) * len(self._pattern.of(0))
                done["stored"] = [int(keep[i]) for i in wanted]
            finally:
                if not stop:
                    reservation.abort()
        finally:
            if not stop:
                claim.release()
        part.touch(keys_of(keep))
        return done

    def _check(self, claim: Any, ids: Ids, done: dict[str, Any]) -> dict[int, int]:
        """Compare the claimed blocks byte by byte; return {slot: id} of those that differ."""
        step = {"all": 1, "sample": 16, "off": 0}[self._verify]
        bad: dict[int, int] = {}
        for i in range(0, len(claim), step) if step else ():
            found = np.frombuffer(claim.view(i), np.uint8)
            done["verified"] += 1
            if not np.array_equal(found, self._pattern.of(int(ids[i]))):
                bad[int(claim.slots[i])] = int(ids[i])
        return bad

    def _rewrite(self, bad: dict[int, int], done: dict[str, Any]) -> None:
        """Store damaged blocks again, each in its own slot: no eviction, and no other hit than before."""
        done["corrupt"] += len(bad)
        ids = np.array(list(bad.values()), np.int64)
        with self._part.reserve(keys_of(ids), slots=np.array(list(bad), np.int64), duplicate=True) as reservation:
            for i, block_id in enumerate(ids):
                np.frombuffer(reservation.view(i), np.uint8)[:] = self._pattern.of(int(block_id))
            reservation.commit()
        done["bytes_written"] += len(bad) * len(self._pattern.of(0))

    def _fill_half(self, reservation: Any, keep: Ids, wanted: list[int]) -> int:
        block_bytes = len(self._pattern.of(0))
        half = left = len(wanted) * block_bytes // 2
        for i in wanted:
            count = min(left, block_bytes)
            if not count:
                break
            np.frombuffer(reservation.view(i), np.uint8)[:count] = self._pattern.of(int(keep[i]))[:count]
            left -= count
        return half


def serve(channel: Channel) -> None:
    """Do what the coordinator says until it closes the channel."""
    setup = channel.recv()
    if setup is None:
        return
    import kvreuse

    # Loading modules belongs to the start of the interpreter, not to the attach that follows the hello.
    import kvreuse.keeper.client
    import kvreuse.parts

    manifest = kvreuse.Manifest(
        model="replay",
        weights_id=setup["label"],
        dtype="uint8",
        block_tokens=512,
        block_bytes=setup["block_bytes"],
        layers=1,
        kv_heads=1,
        head_dim=1,
        layout="bytes",
        hash_scheme="trace-id",
        hash_root="0",
        topology=kvreuse.Topology(tp=setup["ranks"]),
    )
    channel.send({"hello": time.monotonic(), "backend": kvreuse.backend})
    if channel.recv() is None:  # go
        return
    with (
        kvreuse.connect(setup["socket"]) as keeper,
        keeper.attach(manifest, kvreuse.Rank(tp=setup["rank"]), blocks=setup["blocks"], group=GROUP) as part,
    ):
        channel.send(
            {
                "outcome": part.outcome.kind.value,
                "blocks": part.outcome.blocks,
                "reason": part.outcome.reason,
                "reuse": part.reuse.reason,
                "corrupt_total": part.stats().corrupt_total,
            }
        )
        player = Player(part, Pattern(setup["rank"], setup["block_bytes"]), setup["blocks"], setup["verify"])
        while (command := channel.recv()) is not None:
            if not _obey(command, channel, player, part):
                break


def _obey(command: dict[str, Any], channel: Channel, player: Player, part: Any) -> bool:
    what = command["do"]
    if what == "match":
        channel.send({"hits": player.match(np.frombuffer(command["ids"], np.int64))})
    elif what == "play":
        reply = player.play(np.frombuffer(command["ids"], np.int64), command["hits"], command["stop"], command["again"])
        if not command["stop"] and command["next"] is not None:
            reply["hits"] = player.match(np.frombuffer(command["next"], np.int64))
        channel.send(reply)
    elif what == "missing":
        present = {id_of(key) for key in part.keys()}  # noqa: SIM118
        channel.send({"missing": [i for i in command["ids"] if i not in present]})
    elif what == "finish":
        channel.send({"evictions": part.stats().evicted_total})
        return False
    return True


def main() -> int:
    """Run the worker of the command line's FD."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    import kvreuse

    try:
        serve(channel)
    except (BrokenPipeError, ConnectionResetError):
        return 1  # the coordinator ended the run
    except (kvreuse.KVReuseError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            channel.send({"error": f"{type(error).__name__}: {error}", "pid": os.getpid()})
        return 1
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
