"""The keeper: one thread, a selector, and the memory of all parts. Imports no numpy.

It never waits for a part's lock (K7): its handle of a part tries once, and what has to wait is tried again from the
loop. A POSIX lock is dropped when any fd of its inode is closed; the one thread holds a lock only within one backend
call, and closes the fds that it made for sending between calls.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import fcntl
import heapq
import itertools
import logging
import os
import resource
import secrets
import selectors
import signal
import socket
import stat
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from .. import _api, _status, _version
from .._select import backend as _backend
from ..errors import CorruptError, IncompatibleError, KVReuseError, ProfileError, ProtocolError, RangeError
from ..handles import (
    IMPORT_ALLOW_UNSEALED,
    REGION_ID_NBYTES,
    Access,
    Provider,
    Region,
    allocate_named,
    open_provider,
)
from ..manifest import Manifest, Rank, compare, describe
from ..profile import Profile
from . import accounting, processes, protocol
from .held import HeldFd, fd_of, read_only_fd_of, record_of
from .processes import Process
from .reclaim import Reclaim, Reclaimer

logger = logging.getLogger("kvreuse")

SOCKET_PATH_NBYTES = protocol.SOCKET_PATH_NBYTES
LOCK_SUFFIX = ".lock"
LABEL_NBYTES_MAX = 64
GROUP_NBYTES_MAX = 256
DONATED_MAX = 4096
RANKS_MAX = 4096
RECOVER_RETRY_S = 0.001
RECOVER_TRIES = 5000
CLEAR_RETRY_S = 0.001
ROOM_WAIT_S = 4.0  # how long an attach waits for memory that is being given back
EMPTIED_MAX = 32
EMPTY_GROUPS_MAX = 256
WAIT_MAX_S = 3600.0
ACCEPT_PAUSE_S = 0.1  # while no fd is free
REJECTED_S = 1.0  # how long a rejected peer may take to ask
BYTES_MAX = 1 << 61
WRITER_ROW = 0
KEEPER, WRITER, READER = 3, 2, 1
STALL_LOOKS = 4  # heartbeats, and looks at them, within stall_s
LAYOUT_SEALED, RETIRED = 1, 2
ROWS = 64
NO_PROOF = "this kernel gives no proof of a process's end (no SO_PEERPIDFD, and pidfd_open is refused)"


class StartError(Exception):
    """The keeper cannot start here; the text says why. `usage`: what was asked for can work nowhere."""

    def __init__(self, text: str, usage: bool = False) -> None:
        super().__init__(text)
        self.usage = usage


@dataclasses.dataclass(eq=False)
class Client:
    """One connection. `process` is None without proof of its end; `rejection` is all that it is told."""

    sock: socket.socket
    process: Process | None
    rejection: protocol.Failed | None = None
    hello: bool = False
    sessions: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False)
class Session:
    """One attach of one process: as the part's writer, or in another row as a reader. No `client` while it is cut off.

    `heartbeat` is the last one seen, `beat_at` when it had moved.
    """

    number: int
    part: Part
    process: Process
    attach_id: bytes
    client: Client | None
    offered: str
    reason: str
    row: int = WRITER_ROW
    nbytes: int = 0
    confirmed: str = ""
    ready_at: float = 0.0
    progress: tuple[int, int] = (0, 0)
    heartbeat: int = 0
    beat_at: float = 0.0
    is_stalled: bool = False


@dataclasses.dataclass(eq=False)
class Memory:
    """A part's memory but for its data, and the keeper's handle of its table."""

    table_region: Region
    claims_region: Region
    lock_region: Region
    table: int


@dataclasses.dataclass(eq=False)
class Part:
    """One rank's part. It has no `memory`, and is not sealed, before all of its data is there."""

    part_id: bytes
    group: Group
    rank: Rank
    index: int
    manifest: Manifest
    blocks: int
    nbytes: int
    donated: bool
    data: list[Region | HeldFd | None]
    provider: str = "host"
    memory: Memory | None = None
    writer: Session | None = None
    readers: dict[int, Session] = dataclasses.field(default_factory=dict)  # by row
    reclaim: Reclaim | None = None  # once it is retired
    must_clear: bool = False
    waiting_since: float = 0.0
    died_at: float = 0.0
    last_process: Process | None = None  # of the writer that is gone


@dataclasses.dataclass(eq=False)
class Group:
    """The parts of one data-parallel replica, under the first attach's manifest.

    Ranks of another pp may differ in block_bytes and segments: `by_pp` has what each pp came with.
    """

    name: str
    dp: int
    manifest: Manifest
    blocks: int
    provider: str = "host"
    by_pp: dict[int, Manifest] = dataclasses.field(default_factory=dict)
    parts: dict[int, Part] = dataclasses.field(default_factory=dict)
    emptied: dict[int, str] = dataclasses.field(default_factory=dict)
    refused: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)  # blocks asked, and why not


@dataclasses.dataclass(eq=False)
class Waiter:
    """A GetReadiness that is answered later."""

    client: Client
    request: protocol.GetReadiness


@dataclasses.dataclass(eq=False)
class Clearing:
    """A ClearGroup that is answered when all parts are empty, or when it is over time."""

    client: Client
    request: protocol.ClearGroup
    deadline: float
    left: list[Part]
    removed: int = 0


class Keeper:
    """The service. `serve` runs until stopped; everything it holds is released then."""

    def __init__(self, path: str, profile: Profile, declared: bool, label: str) -> None:
        self.path = path
        self.profile = profile
        self.declared = declared
        self.label = label
        self.incarnation = secrets.randbits(62) | 1
        self._sessions_seen = itertools.count((secrets.randbits(38) << 24) | 1)
        self._provider: Provider = open_provider("host", profile)
        self._selector = selectors.DefaultSelector()
        self._clients: set[Client] = set()
        self._groups: dict[tuple[str, int], Group] = {}
        self._parts: dict[bytes, Part] = {}
        self._sessions: dict[int, Session] = {}
        self._watched: dict[Any, Process] = {}
        self._waiters: list[Waiter] = []
        self._reclaimer = Reclaimer()
        self._room_waiters: list[tuple[float, Client, protocol.Attach]] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._last_emptied: deque[dict[str, Any]] = deque(maxlen=EMPTIED_MAX)
        self._idle_since = time.monotonic()
        self._stopping = False
        self._listener, self._lock_fd = _listen(path)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._reclaimer.fd, selectors.EVENT_READ, self._reclaimed)
        if profile.retention.stall_s:
            self._look_for_stalls()

    # ---- loop ----

    def serve(self) -> None:
        """Serve until `stop`, or until idle for the profile's idle_exit_s."""
        idle_s = self.profile.retention.idle_exit_s
        while not self._stopping:
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                self._guard(heapq.heappop(self._timers)[2])
            waits = [self._timers[0][0] - now] if self._timers else []
            busy = bool(self._parts or self._clients or self._reclaimer.pending)
            if idle_s and not busy:
                if now - self._idle_since >= idle_s:
                    break
                waits.append(idle_s - (now - self._idle_since))
            for key, _ in self._selector.select(max(0.0, min(waits)) if waits else None):
                self._guard(key.data)
            if busy:
                self._idle_since = time.monotonic()

    def _guard(self, action: Callable[[], None]) -> None:
        """Carry out one event: a fault of it must not end the service."""
        try:
            action()
        except Exception:
            logger.exception("an event could not be handled")

    def stop(self) -> None:
        """End `serve`; may be called from a signal handler."""
        self._stopping = True

    def close(self) -> None:
        """Release everything."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        for part in list(self._parts.values()):
            self._guard(lambda part=part: self._retire(part, "the keeper stops"))  # type: ignore[misc]
        for client in list(self._clients):
            self._drop_client(client)
        for process in self._watched.values():
            process.close()
        self._selector.close()
        self._reclaimer.close()
        self._listener.close()
        # Last, and removed while it is held: who waits for it looks again whether it is still the file of that name.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path + LOCK_SUFFIX)
        os.close(self._lock_fd)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_numbers), action))

    # ---- connections ----

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # The listener stays readable: without a pause the loop would spin.
                self._selector.unregister(self._listener)
                self._later(ACCEPT_PAUSE_S, self._accept_again)
            return
        sock.setblocking(False)
        uid = processes.peer_uid(sock)
        process, rejection = None, None
        if uid in (os.geteuid(), *self.profile.security.allow_uids):
            with contextlib.suppress(OSError):
                process = processes.peer_process(sock)
        else:
            text = f"uid {uid} may not connect: this keeper serves uid {os.geteuid()} and [security] allow_uids"
            rejection = protocol.Failed(serial=0, status=-8, text=text, fields={})
        client = Client(sock, process, rejection)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._readable(client))
        if rejection:
            self._later(REJECTED_S, lambda: self._drop_client(client))

    def _accept_again(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _drop_client(self, client: Client) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        self._selector.unregister(client.sock)
        client.sock.close()
        self._waiters = [waiter for waiter in self._waiters if waiter.client is not client]
        for number in client.sessions:
            session = self._sessions.get(number)
            if session and session.client is client:
                session.client = None  # disconnected: not gone until its process is
        if client.process is not None:
            client.process.close()

    def _send(self, client: Client, message: Any, fds: list[int] | None = None) -> None:
        try:
            protocol.send(client.sock, message, fds or ())
        except OSError:
            # A peer that does not read, or is gone. Its sessions stay, and resume on a new connection.
            self._drop_client(client)

    def _readable(self, client: Client) -> None:
        if client not in self._clients:
            return
        if client.rejection is not None:
            # Its frame is taken, unread: closing a socket that has data in it would destroy the answer.
            with contextlib.suppress(OSError):
                client.sock.recv(1)
            self._send(client, client.rejection)
            self._drop_client(client)
            return
        try:
            got = protocol.recv_request(client.sock, protocol.FDS_MAX)
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._send(client, protocol.failed(getattr(error, "serial", 0), error))
            if not getattr(error, "usable", False):
                self._drop_client(client)  # not our protocol: nothing after it can be trusted
            return
        except OSError:
            self._drop_client(client)
            return
        if got is None:
            self._drop_client(client)
            return
        request, fds = got
        try:
            self._handle(client, request, fds)
        except (KVReuseError, TypeError) as error:
            self._send(client, protocol.failed(request.serial, error))
        except Exception:
            logger.exception("a request failed unexpectedly: %s", type(request).__name__)
            text = f"the keeper failed to carry out {type(request).__name__}; its log says why"
            self._send(client, protocol.Failed(serial=request.serial, status=-22, text=text, fields={}))
        finally:
            protocol.close_fds(fds)

    def _handle(self, client: Client, request: Any, fds: list[int]) -> None:
        wanted = 1 if isinstance(request, protocol.Donate) else 0
        if len(fds) != wanted:
            raise protocol.protocol_error(f"expected {wanted} fd(s), got {len(fds)}", wanted, len(fds))
        if isinstance(request, protocol.Hello):
            self._hello(client, request)
            return
        if not client.hello:
            raise protocol.protocol_error("the first frame must be Hello")
        self._reap()
        if isinstance(request, protocol.Attach):
            self._attach(client, request)
        elif isinstance(request, protocol.Donate):
            self._donate(client, request, fds[0])
        elif isinstance(request, protocol.Confirm):
            self._confirm(client, request)
        elif isinstance(request, protocol.Goodbye):
            self._goodbye(client, request)
        elif isinstance(request, protocol.Resume):
            self._resume(client, request)
        elif isinstance(request, protocol.GetStatus):
            self._status(client, request)
        elif isinstance(request, protocol.GetReadiness):
            self._readiness(client, request)
        elif isinstance(request, protocol.Open):
            self._open(client, request)
        elif isinstance(request, protocol.Progress):
            self._progress(client, request)
        elif isinstance(request, protocol.ClearGroup):
            self._clear_group(client, request)
        else:
            self._release(client, request)

    def _hello(self, client: Client, request: protocol.Hello) -> None:
        if request.abi != _api.ABI_VERSION:
            error = IncompatibleError(
                f"the worker has ABI version {request.abi}, the keeper {_api.ABI_VERSION}: install the same kvreuse",
                status=-15,
                name="INCOMPATIBLE",
                fields={"abi": (_api.ABI_VERSION, request.abi)},
            )
            self._send(client, protocol.failed(request.serial, error))
            self._drop_client(client)
            return
        client.hello = True
        profile = self.profile.to_dict() if self.declared else None
        self._send(
            client,
            protocol.Welcome(
                serial=request.serial,
                abi=_api.ABI_VERSION,
                incarnation=self.incarnation,
                label=self.label,
                profile=profile,
            ),
        )

    # ---- attach ----

    def _attach(self, client: Client, request: protocol.Attach) -> None:
        manifest, rank = Manifest.from_dict(request.manifest), Rank.from_dict(request.rank)
        index = rank.index(manifest.topology)
        _check_attach(request, manifest)
        if client.process is None:
            self._refuse(client, request, NO_PROOF, None)
            return
        known = self._session_by(client, request.attach_id)
        if known is not None:  # asked again: the first answer was lost
            self._adopt(client, known)
            self._answer(client, known, request.serial)
            return
        nbytes = accounting.part_nbytes(request.blocks, manifest.block_bytes)
        key = (request.group, rank.dp)
        group = self._groups.get(key)
        if group is not None:
            differences = _compare(group, manifest, rank, request, self.profile.group.capacity == "min")
            if differences:
                living = next((part.writer for part in group.parts.values() if part.writer), None)
                if living is not None and "provider" in differences:
                    raise IncompatibleError(
                        f"the group's memory is of another provider: {describe(differences)}",
                        status=-15,
                        name="INCOMPATIBLE",
                        fields=differences,
                    )
                if living is not None:
                    reason = f"the group has another manifest: {describe(differences)}"
                    if index not in group.parts and index < group.manifest.topology.size:
                        group.refused[index] = (request.blocks, protocol.clip(reason))
                    self._refuse(client, request, reason, living)
                    return
                refusal = self._room_refusal(nbytes, without=group)
                if refusal:
                    self._refuse(client, request, refusal, None)
                    return
                old, reason = group, f"the manifest changed: {describe(differences)}"
                self._retire_group(old, reason)
                group = self._groups[key] = Group(request.group, rank.dp, manifest, request.blocks, request.provider)
                if old.manifest.topology == manifest.topology:
                    group.emptied = dict(old.emptied)
                group.emptied[index] = reason
        if group is None:
            group = self._groups[key] = Group(request.group, rank.dp, manifest, request.blocks, request.provider)
        try:
            self._attach_in(client, request, group, manifest, rank, index, nbytes)
        finally:
            self._forget_if_empty(group)

    def _attach_in(
        self,
        client: Client,
        request: protocol.Attach,
        group: Group,
        manifest: Manifest,
        rank: Rank,
        index: int,
        nbytes: int,
    ) -> None:
        part = group.parts.get(index)
        if part is not None and part.writer is not None:
            self._refuse(client, request, "writer alive", part.writer)
            return
        if part is not None:
            damage = self._damage(part)
            if not damage and part.blocks != request.blocks:  # under [group] capacity = "min"
                damage = f"the blocks changed: {describe({'blocks': (part.blocks, request.blocks)})}"
            if damage:
                self._retire(part, damage)
                part = None
        offered, reason = "RESTORED", ""
        if part is None:
            refusal = self._room_refusal(nbytes)
            if refusal:
                self._refuse(client, request, refusal, None)
                return
            if not self._make_room(nbytes):
                self._wait_for_room(client, request)
                return
            offered, reason = "EMPTY", group.emptied.get(index, "new")
            part = Part(
                part_id=secrets.token_bytes(16),
                group=group,
                rank=rank,
                index=index,
                manifest=manifest,
                blocks=request.blocks,
                nbytes=nbytes,
                donated=request.donate > 0,
                data=[None] * max(1, request.donate),
                provider=request.provider,
            )
            if not part.donated:
                data = part.data[0] = self._allocate(part, request.blocks * manifest.block_bytes, "data0")
                try:
                    self._build(part)
                except BaseException:
                    data.close()
                    raise
            self._parts[part.part_id] = part
            group.parts[index] = part
            group.by_pp.setdefault(rank.pp, manifest)
        session = self._admit(client, part, request, offered, reason)
        group.refused.pop(index, None)
        try:
            if part.memory:
                _backend.table_admit(part.memory.table, WRITER_ROW, session.number, WRITER)
                self._set_capacity(group)
            self._answer(client, session, request.serial)
        except BaseException:
            # The peer is told of the error, and has no session then.
            self._end_session(session)
            if offered == "EMPTY" and part.part_id in self._parts:
                self._retire(part, "")
            raise
        group.emptied.pop(index, None)

    def _refuse(
        self, client: Client, request: protocol.Attach | protocol.Open, reason: str, holder: Session | None
    ) -> None:
        pid = holder.process.pid if holder else 0
        self._send(client, protocol.Refused(serial=request.serial, reason=protocol.clip(reason, 4096), pid=pid))

    def _damage(self, part: Part) -> str:
        """Open a waiting part anew, so that its superblock is checked again; say what is wrong."""
        assert part.memory is not None
        # With a lock memory of its own: a second fd of the part's would stay open as long as the part's table.
        probe = allocate_named(self._provider, 1, f"kvreuse:{self.label}:probe")
        try:
            _backend.table_close(self._open_table(part.memory.table_region, part.memory.claims_region, probe))
        except IncompatibleError as error:
            return f"incompatible: {error}"
        except CorruptError as error:  # not what only says that this keeper lacks fds or memory
            return f"corrupt: {error}"
        finally:
            probe.close()
        return ""

    def _open_table(self, table_region: Region, claims_region: Region, lock_region: Region) -> int:
        lock_fd = _backend.region_export(lock_region.handle)
        try:
            return int(_backend.table_open(table_region.handle, claims_region.handle, lock_fd, KEEPER, 0, -1, 0))
        except BaseException:
            os.close(lock_fd)
            raise

    def _room_refusal(self, nbytes: int, without: Group | None = None) -> str:
        """Say why one more part cannot be had even without waiting parts and group `without`; "" if it can."""
        limit, parts = self.profile.max_bytes(), self.profile.retention.max_parts
        if nbytes > limit:
            return f"the part needs {nbytes} bytes, [retention] max_bytes is {limit}"
        held = [part for part in self._parts.values() if part.writer is not None and part.group is not without]
        used = sum(part.nbytes for part in held)
        if used + nbytes <= limit and len(held) < parts:
            return ""
        return (
            f"the part needs {nbytes} bytes: {len(held)} part(s) with {used} bytes have workers, "
            f"[retention] allows {parts} part(s) and {limit} bytes"
        )

    def _make_room(self, nbytes: int) -> bool:
        """Drop waiting parts, oldest first, until one more of `nbytes` fits the profile.

        False: it fits only once memory that is being given back is (K4: that counts).
        """
        limit, parts = self.profile.max_bytes(), self.profile.retention.max_parts
        waiting = sorted((p for p in self._parts.values() if p.writer is None), key=lambda part: part.waiting_since)
        for oldest in waiting:
            if self._held_nbytes() + nbytes <= limit and len(self._parts) < parts:
                break
            self._retire(oldest, "dropped to make room for another part")
        return self._held_nbytes() + self._reclaimer.pending_nbytes() + nbytes <= limit

    def _held_nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts.values())

    def _wait_for_room(self, client: Client, request: protocol.Attach) -> None:
        """Try an attach again when memory was given back; refuse it if that takes too long."""
        for _, other, asked in self._room_waiters:
            if other is client and asked.attach_id == request.attach_id:
                return
        deadline = time.monotonic() + ROOM_WAIT_S
        self._room_waiters.append((deadline, client, request))
        self._later(ROOM_WAIT_S, self._try_room_waiters)

    def _reclaimed(self) -> None:
        self._reclaimer.collect()
        self._try_room_waiters()

    def _try_room_waiters(self) -> None:
        waiting, self._room_waiters = self._room_waiters, []
        now = time.monotonic()
        for deadline, client, request in waiting:
            if client not in self._clients:
                continue
            if now >= deadline:
                pending = self._reclaimer.pending_nbytes()
                reason = f"{pending} bytes of retired parts are still being given back: attach again"
                self._refuse(client, request, reason, None)
                continue
            try:
                self._attach(client, request)
            except (KVReuseError, TypeError) as error:
                self._send(client, protocol.failed(request.serial, error))
        again = {request.attach_id: deadline for deadline, _, request in waiting}
        # Whoever waits again keeps its deadline.
        self._room_waiters = [(again.get(r.attach_id, d), c, r) for d, c, r in self._room_waiters]

    def _allocate(self, part: Part, nbytes: int, what: str) -> Region:
        return allocate_named(self._provider, nbytes, f"kvreuse:{self.label}:{part.part_id.hex()[:8]}:{what}")

    def _build(self, part: Part) -> None:
        """Make the rest of a part's memory and its table, once all of its data is there; then its layout is sealed."""
        made: list[Region] = []
        table = 0
        try:
            made.append(self._allocate(part, _backend.table_layout(part.blocks, 0).claims_nbytes, "claims"))
            made.append(self._allocate(part, 1, "lock"))
            # The table's own region id is filled in below: the table's size depends on this text's.
            described = self._describe_memory(part, bytes(16), *made)
            layout = _backend.table_layout(part.blocks, len(described))
            made.append(self._allocate(part, layout.table_nbytes, "table"))
            claims_region, lock_region, table_region = made
            region_id = _backend.region_info(table_region.handle).region_id
            _backend.table_create(
                table_region.handle,
                claims_region.handle,
                part.part_id,
                part.blocks,
                part.manifest.block_bytes,
                len(part.data),
                self._describe_memory(part, region_id, claims_region, lock_region),
            )
            table = self._open_table(table_region, claims_region, lock_region)
            _backend.table_set_unready(table, 1)
            _backend.table_set_state(table, LAYOUT_SEALED)
        except BaseException:
            if table:
                _backend.table_close(table)
            for region in made:
                region.close()
            raise
        part.memory = Memory(table_region, claims_region, lock_region, table)

    def _describe_memory(self, part: Part, table_id: bytes, claims_region: Region, lock_region: Region) -> bytes:
        """All that a keeper needs to know the part again from its fds alone; kept in the part's manifest area."""
        return msgspec.msgpack.encode(
            {
                "version": 1,
                "label": self.label,
                "group": part.group.name,
                "dp": part.group.dp,
                "rank": part.rank.to_dict(),
                "manifest": part.manifest.to_dict(),
                "provider": part.provider,
                "donated": part.donated,
                "table_region_id": table_id,
                "claims": record_of(claims_region),
                "lock": record_of(lock_region),
                "data": [record_of(region) for region in part.data if region],
            }
        )

    def _admit(self, client: Client, part: Part, request: protocol.Attach, offered: str, reason: str) -> Session:
        assert client.process is not None
        process = self._watch(client.process)
        session = Session(next(self._sessions_seen), part, process, request.attach_id, client, offered, reason)
        session.nbytes, session.beat_at = part.nbytes, time.monotonic()
        part.writer = session
        if part.last_process is not None:
            part.last_process.close()
            part.last_process = None
        self._sessions[session.number] = session
        client.sessions.add(session.number)
        return session

    def _answer(self, client: Client, session: Session, serial: int) -> None:
        if session.part.memory:
            self._send_part(client, session, serial)
        else:
            self._ask_regions(client, session, serial)

    def _ask_regions(self, client: Client, session: Session, serial: int) -> None:
        part = session.part
        for region in part.data:  # of a donation whose connection was cut: it starts again
            if region is not None:
                region.close()
        part.data = [None] * len(part.data)
        part.nbytes = accounting.part_nbytes(part.blocks, part.manifest.block_bytes)
        sizes = [slots * part.manifest.block_bytes for slots in accounting.region_slots(part.blocks, len(part.data))]
        self._send(client, protocol.NeedRegions(serial=serial, session=session.number, nbytes=sizes))

    def _send_part(self, client: Client, session: Session, serial: int) -> None:
        part, memory = session.part, session.part.memory
        assert memory is not None
        is_reader = session.row != WRITER_ROW
        data = [region for region in part.data if region] if session.nbytes >= part.nbytes else []
        # The lock is used by its fd, never mapped: it has no record.
        records = [record_of(region) for region in (memory.table_region, memory.claims_region, *data)]
        fds: list[int] = []
        try:
            # S4: a reader writes nothing but its own row of the claims.
            fds.append(read_only_fd_of(memory.table_region) if is_reader else fd_of(memory.table_region))
            fds.append(fd_of(memory.claims_region))
            fds.append(fd_of(memory.lock_region))
            fds.extend(read_only_fd_of(region) if is_reader else fd_of(region) for region in data)
            size = protocol.FDS_MAX
            self._send(
                client,
                protocol.Attached(
                    serial=serial,
                    part_id=part.part_id,
                    session=session.number,
                    row=session.row,
                    offered=session.offered,
                    reason=protocol.clip(session.reason, 4096),
                    records=records[: size - 1],
                    blocks=part.blocks,
                    block_bytes=part.manifest.block_bytes,
                    lock_wait_ns=int(self.profile.table.lock_wait_s * 1e9),
                    reuse_enabled=self.profile.reuse.enabled,
                    reuse_reason=self.profile.reuse_reason(),
                    checksum=self.profile.checksum.when,
                    fd_count=len(fds),
                ),
                fds[:size],
            )
            for start in range(size, len(fds), size):
                more = protocol.MoreFds(serial=serial, records=records[start - 1 : start - 1 + size])
                self._send(client, more, fds[start : start + size])
        finally:
            protocol.close_fds(fds)

    def _donate(self, client: Client, request: protocol.Donate, fd: int) -> None:
        session = self._session_of(client, request.session)
        part = session.part
        if part.memory or not 0 <= request.index < len(part.data) or part.data[request.index] is not None:
            raise protocol.protocol_error(f"region {request.index} was not asked for")
        nbytes, physical_nbytes, region_id, _, _, _ = request.record
        if nbytes < 1 or physical_nbytes < nbytes or len(region_id) != REGION_ID_NBYTES:
            raise protocol.protocol_error(
                "a record has 1 byte or more, as much memory or more, and a region id of 16 bytes"
            )
        needed = accounting.region_slots(part.blocks, len(part.data))[request.index] * part.manifest.block_bytes
        if nbytes < needed:
            raise _status.make_text(-5, f"region {request.index} has {nbytes} bytes: the part needs {needed} there")
        extra = max(0, physical_nbytes - needed)
        used, limit = self._held_nbytes() + self._reclaimer.pending_nbytes(), self.profile.max_bytes()
        if used + extra > limit:
            raise _status.make_text(
                -10,
                f"region {request.index} has {extra} bytes more than the part needs: max_bytes is {limit}, {used} held",
            )
        region: Region | HeldFd
        if part.provider != "host":
            # Without CUDA nothing more can be known of it: the next worker's import checks it.
            region = HeldFd(fd, nbytes, physical_nbytes, region_id)
        else:
            region = self._import_data(request.index, fd, request.record)
        part.data[request.index] = region
        part.nbytes += extra
        if not all(part.data):
            self._send(client, protocol.Done(serial=request.serial, value=request.index))
            return
        self._build(part)
        assert part.memory is not None
        _backend.table_admit(part.memory.table, WRITER_ROW, session.number, WRITER)
        self._set_capacity(part.group)
        session.nbytes = part.nbytes
        self._send_part(client, session, request.serial)

    def _set_capacity(self, group: Group) -> None:
        """Under [group] capacity = "min" no rank holds more blocks than the smallest part has slots (C1)."""
        tables = [(part, part.memory.table) for part in group.parts.values() if part.memory]
        capacity = min((part.blocks for part, _ in tables), default=0)
        for part, table in tables:
            if min(capacity, part.blocks) != _backend.table_info(table).capacity:
                _backend.table_set_capacity(table, capacity)

    def _import_data(self, index: int, fd: int, record: protocol.Record) -> Region:
        nbytes, physical_nbytes, region_id, device, inode, _ = record
        flags = IMPORT_ALLOW_UNSEALED if self.profile.handles.file_fallback else 0
        info = _backend.region_import(fd, nbytes, physical_nbytes, region_id, device, inode, flags)
        region = Region("host", info.handle, {})
        if info.access != int(Access.READ_WRITE):
            region.close()
            raise _status.make_text(-8, f"region {index} was given for reading only: a writer needs to write it")
        return region

    def _confirm(self, client: Client, request: protocol.Confirm) -> None:
        session = self._writer_of(client, request.session)
        if session.part.memory is None:
            raise protocol.protocol_error("the part's layout is not sealed")
        if request.kind not in ("RESTORED", "EMPTY"):
            raise protocol.protocol_error("an outcome is RESTORED or EMPTY", "RESTORED or EMPTY", request.kind)
        if not session.confirmed:
            session.ready_at = time.monotonic()
            if session.offered == "RESTORED" and request.kind == "EMPTY":
                self._note_emptied(session.part, request.reason)
        session.confirmed = request.kind
        self._tell_readers(session.part)
        self._send(client, protocol.Done(serial=request.serial))
        self._tell_waiters()

    def _tell_readers(self, part: Part) -> None:
        """Say in the part's memory whether its rank is ready (R4): readers ask nobody when they match (K6)."""
        if part.memory is not None:
            session = part.writer
            is_live = session is not None and not self._writer_reason(session)
            _backend.table_set_unready(part.memory.table, int(not is_live))

    def _progress(self, client: Client, request: protocol.Progress) -> None:
        session = self._writer_of(client, request.session)
        if not 0 <= request.done <= request.total:
            raise _range_error(f"progress is from 0 to its total: got {request.done} of {request.total}")
        session.progress = (request.done, request.total)
        self._tell_readers(session.part)
        self._send(client, protocol.Done(serial=request.serial))
        self._tell_waiters()

    # ---- readers ----

    def _open(self, client: Client, request: protocol.Open) -> None:
        if len(request.attach_id) != 16:
            raise protocol.protocol_error("an attach id has 16 bytes", 16, len(request.attach_id), usable=True)
        if client.process is None:
            self._refuse(client, request, NO_PROOF, None)
            return
        session = self._session_by(client, request.attach_id)
        if session is not None:  # asked again: the first answer was lost
            self._adopt(client, session)
        else:
            group = self._groups.get((request.group, request.dp))
            part = group.parts.get(request.index) if group else None
            if part is None or part.memory is None:
                reason = self._rank_reason(group, request.index) if group else "the group does not exist"
                self._refuse(client, request, f"rank {request.index} has no part to read: {reason}", None)
                return
            if request.data and part.provider != "host":
                self._refuse(client, request, f"memory of provider {part.provider} cannot be read by the CPU", None)
                return
            free = next((row for row in range(WRITER_ROW + 1, ROWS) if row not in part.readers), None)
            if free is None:
                self._refuse(client, request, f"the part has {len(part.readers)} readers, which is all it can", None)
                return
            session = self._admit_reader(client, part, free, request)
        try:
            self._send_part(client, session, request.serial)
        except BaseException:
            self._end_session(session)
            raise

    def _admit_reader(self, client: Client, part: Part, row: int, request: protocol.Open) -> Session:
        assert client.process is not None
        assert part.memory is not None
        process = self._watch(client.process)
        session = Session(next(self._sessions_seen), part, process, request.attach_id, client, "", "", row)
        session.nbytes = part.nbytes
        if not request.data:
            session.nbytes -= part.blocks * part.manifest.block_bytes
        part.readers[row] = session
        self._sessions[session.number] = session
        client.sessions.add(session.number)
        _backend.table_admit(part.memory.table, row, session.number, READER)
        return session

    # ---- content ----

    def _clear_group(self, client: Client, request: protocol.ClearGroup) -> None:
        """Empty a group's parts (I4): one increment in each; its writer frees the slots. Tried until all are done."""
        group = self._groups.get((request.group, request.dp))
        if group is None:
            raise _status.make_text(-1, f"group {request.group!r} (dp {request.dp}) does not exist")
        if request.weights_id:
            if request.weights_id == group.manifest.weights_id:
                self._send(client, protocol.Cleared(serial=request.serial, removed=0, failed={}))
                return
            # First, so that no attach of the old weights is taken for one of this content.
            group.manifest = dataclasses.replace(group.manifest, weights_id=request.weights_id)
            group.by_pp = {
                pp: dataclasses.replace(kept, weights_id=request.weights_id) for pp, kept in group.by_pp.items()
            }
            for part in group.parts.values():
                part.manifest = dataclasses.replace(part.manifest, weights_id=request.weights_id)
        left = [part for part in group.parts.values() if part.memory]
        for part in left:
            part.must_clear = True
            self._tell_readers(part)
        deadline = time.monotonic() + self.profile.table.lock_wait_s
        self._go_on_clearing(Clearing(client, request, deadline, left))

    def _go_on_clearing(self, clearing: Clearing) -> None:
        for part in list(clearing.left):
            if part.memory is None or self._clear(part, clearing):
                clearing.left.remove(part)
        is_late = time.monotonic() >= clearing.deadline
        if clearing.client in self._clients and clearing.deadline and (is_late or not clearing.left):
            clearing.deadline = 0.0  # answered
            failed = [part.index for part in clearing.left[: protocol.PAGE_RANKS]]
            reason = f"its lock could not be had within {self.profile.table.lock_wait_s} s; it is tried on"
            self._send(
                clearing.client,
                protocol.Cleared(
                    serial=clearing.request.serial, removed=clearing.removed, failed=dict.fromkeys(failed, reason)
                ),
            )
        if clearing.left:
            self._later(CLEAR_RETRY_S, lambda: self._go_on_clearing(clearing))
        else:
            self._tell_waiters()

    def _clear(self, part: Part, clearing: Clearing) -> bool:
        assert part.memory is not None
        table = part.memory.table
        try:
            if part.must_clear and part.writer is not None:
                clearing.removed += _backend.table_expire(table)
            elif part.must_clear:
                clearing.removed += _backend.table_stats(table).sealed_count
                _backend.table_reset(table)
        except CorruptError as error:
            self._retire(part, f"corrupt: {error}")
            return True
        except KVReuseError:
            return False
        part.must_clear = False
        self._tell_readers(part)
        return True

    # ---- stalls ----

    def _look_for_stalls(self) -> None:
        """See whose heartbeat has not moved for stall_s: its rank is not ready meanwhile; nothing is fenced (R6)."""
        stall_s, now = self.profile.retention.stall_s, time.monotonic()
        for part in list(self._parts.values()):
            session = part.writer
            if session is None or part.memory is None:
                continue
            heartbeat = _backend.table_info(part.memory.table).heartbeat_ns
            if heartbeat != session.heartbeat:
                session.heartbeat, session.beat_at = heartbeat, now
            is_stalled = heartbeat != 0 and now - session.beat_at > stall_s
            if is_stalled == session.is_stalled:
                continue
            session.is_stalled = is_stalled
            self._tell_readers(part)
            if is_stalled and self.profile.retention.on_stall == "kill":
                logger.warning("worker pid %d is stalled: killed", session.process.pid)
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(session.process.pidfd, signal.SIGKILL)
            self._tell_waiters()
        self._later(stall_s / STALL_LOOKS, self._look_for_stalls)

    # ---- sessions ----

    def _session_by(self, client: Client, attach_id: bytes) -> Session | None:
        for session in self._sessions.values():
            if session.attach_id == attach_id and client.process and session.process.key == client.process.key:
                return session
        return None

    def _session_of(self, client: Client, number: int) -> Session:
        session = self._sessions.get(number)
        if session is None or client.process is None or session.process.key != client.process.key:
            raise _status.make_text(-18, f"session {number} is not open, or is another process's: attach again")
        return session

    def _writer_of(self, client: Client, number: int) -> Session:
        session = self._session_of(client, number)
        if session.part.writer is not session:
            raise _status.make_text(-18, f"session {number} is not the writer of its part: attach again")
        return session

    def _adopt(self, client: Client, session: Session) -> None:
        if session.client is not None:
            session.client.sessions.discard(session.number)
        session.client = client
        client.sessions.add(session.number)

    def _resume(self, client: Client, request: protocol.Resume) -> None:
        session = self._session_of(client, request.session)
        if session.attach_id != request.attach_id:
            raise _status.make_text(-18, f"session {request.session} has another attach id: attach again")
        self._adopt(client, session)
        self._send(client, protocol.Done(serial=request.serial))

    def _goodbye(self, client: Client, request: protocol.Goodbye) -> None:
        session = self._session_by(client, request.attach_id)
        if session is not None:
            self._end_session(session)
        self._send(client, protocol.Done(serial=request.serial, value=int(session is not None)))

    def _watch(self, process: Process) -> Process:
        """Return the keeper's own Process of the same process, with its pidfd in the loop."""
        known = self._watched.get(process.key)
        if known is None:
            known = self._watched[process.key] = process.copy()
            self._selector.register(known.pidfd, selectors.EVENT_READ, lambda: self._gone(known))
        return known

    def _gone(self, process: Process) -> None:
        """A pidfd fired: proof that the process is gone."""
        if self._watched.pop(process.key, None) is None:
            return
        self._selector.unregister(process.pidfd)
        for session in [item for item in self._sessions.values() if item.process is process]:
            self._end_session(session)
        process.close()

    def _reap(self) -> None:
        """Notice dead processes now: an answer and what readers find in a part's memory must not differ (R4, K6)."""
        for process in list(self._watched.values()):
            if process.gone():
                self._gone(process)

    def _end_session(self, session: Session) -> None:
        """A session is over for good: by goodbye, or by proof."""
        part = session.part
        if session.row != WRITER_ROW:
            self._forget_session(session)
            self._end_reader(session)
            return
        with contextlib.suppress(OSError):  # no fd is free: how it ended will not be told
            part.last_process = session.process.copy()
        self._forget_session(session)
        part.writer = None
        part.waiting_since = part.died_at = time.monotonic()
        if part.memory is None:
            self._retire(part, "")  # never sealed: nobody had it, so nothing was lost
            return
        _backend.table_drop(part.memory.table, WRITER_ROW, session.number)
        self._tell_readers(part)
        if not self.profile.reuse.enabled:
            self._retire(part, "")
            return
        self._recover(part, RECOVER_TRIES)
        self._later(self.profile.retention.ttl_s, lambda: self._expire(part))

    def _end_reader(self, session: Session) -> None:
        part = session.part
        del part.readers[session.row]
        if part.memory is not None:
            _backend.table_drop(part.memory.table, session.row, session.number)
        if part.reclaim is not None:
            part.reclaim.held.pop(session.number, None)
            self._reclaimed()

    def _forget_session(self, session: Session) -> None:
        del self._sessions[session.number]
        if session.client is not None:
            session.client.sessions.discard(session.number)
        if not any(item.process is session.process for item in self._sessions.values()):
            self._unwatch(session.process)

    def _unwatch(self, process: Process) -> None:
        if self._watched.pop(process.key, None) is not None:
            self._selector.unregister(process.pidfd)
            process.close()

    def _recover(self, part: Part, tries: int) -> None:
        """Free what a gone writer left unfinished. A reader may hold the lock: then later, or by a new writer."""
        if part.writer is not None or part.memory is None or self._parts.get(part.part_id) is not part:
            return
        try:
            _backend.table_recover(part.memory.table)
        except CorruptError as error:
            self._retire(part, f"corrupt: {error}")
        except KVReuseError:
            if tries:
                self._later(RECOVER_RETRY_S, lambda: self._recover(part, tries - 1))

    def _expire(self, part: Part) -> None:
        waited = time.monotonic() - part.waiting_since
        if self._parts.get(part.part_id) is part and part.writer is None and waited >= self.profile.retention.ttl_s:
            self._retire(part, "expired")

    # ---- giving memory back ----

    def _retire(self, part: Part, reason: str) -> None:
        """Free a part: RETIRED first, so that who maps it learns that it is over. The next attach is told `reason`.

        Its readers' sessions stay until they say goodbye, since they hold its memory.
        """
        del self._parts[part.part_id]
        part.group.parts.pop(part.index, None)
        if part.writer is not None:
            self._forget_session(part.writer)
            part.writer = None
        if part.last_process is not None:
            part.last_process.close()
            part.last_process = None
        regions = [region for region in part.data if region is not None]
        table = 0
        if part.memory is not None:
            memory, part.memory = part.memory, None
            with contextlib.suppress(KVReuseError):
                _backend.table_set_state(memory.table, RETIRED)
            table = memory.table
            regions += [memory.table_region, memory.claims_region, memory.lock_region]
        part.data = [None] * len(part.data)
        held = {session.number: session.nbytes for session in part.readers.values()}
        part.reclaim = Reclaim(part.part_id, part.nbytes, table, regions, held)
        self._reclaimer.add(part.reclaim)
        if reason:
            part.group.emptied[part.index] = reason
            self._note_emptied(part, reason)
        self._forget_if_empty(part.group)

    def _note_emptied(self, part: Part, reason: str) -> None:
        self._last_emptied.append(
            {
                "group": part.group.name,
                "dp": part.group.dp,
                "rank": part.rank.to_dict(),
                "reason": protocol.clip(reason),
            }
        )

    def _retire_group(self, group: Group, reason: str) -> None:
        for part in list(group.parts.values()):
            self._retire(part, reason)
        self._groups.pop((group.name, group.dp), None)

    def _forget_if_empty(self, group: Group) -> None:
        # A group whose parts were lost is remembered, so that the next attach of each rank says why; not without bound.
        if group.parts or self._groups.get((group.name, group.dp)) is not group:
            return
        if not group.emptied:
            del self._groups[group.name, group.dp]
        empty = [key for key, item in self._groups.items() if not item.parts]
        for key in empty[: max(0, len(empty) - EMPTY_GROUPS_MAX)]:
            del self._groups[key]

    def _release(self, client: Client, request: protocol.Release) -> None:
        if request.part_id:
            part = self._parts.get(request.part_id)
            if part is None:
                raise _status.make_text(-1, f"part {request.part_id.hex()} is not here")
            if part.writer is not None:
                pid = part.writer.process.pid
                raise _status.make_text(
                    -12, f"part {request.part_id.hex()[:8]} has a worker (pid {pid}): stop that first"
                )
            chosen = [part]
        else:
            chosen = [part for part in self._parts.values() if part.writer is None]
        for part in chosen:
            self._retire(part, protocol.clip(request.reason, 4096))
        self._send(client, protocol.Done(serial=request.serial, value=len(chosen)))

    # ---- telling ----

    def _rank_reason(self, group: Group, index: int) -> str:
        """Why a rank is not ready (R4); "" if it is."""
        part = group.parts.get(index)
        if part is None:
            if index in group.refused:
                return f"missing: its attach was refused: {group.refused[index][1]}"
            return f"missing: {group.emptied[index]}" if index in group.emptied else "missing"
        session = part.writer
        if session is not None:
            return self._writer_reason(session)
        # A pid of another pid namespace may be unknown here; how it ended the kernel tells from 6.15 on.
        process = part.last_process
        who, how = (f"pid {process.pid}", process.how_ended()) if process else ("pid unknown", "")
        return f"exited: its worker ({who}{how}) is gone and none has replaced it"

    def _writer_reason(self, session: Session) -> str:
        if session.part.memory is None:
            return "its layout is not sealed"
        if not session.confirmed:
            return "attaching"
        done, total = session.progress
        if done < total:
            return f"not done yet: {done} of {total}"
        if session.is_stalled:
            still = time.monotonic() - session.beat_at
            return f"stalled: its worker (pid {session.process.pid}) has not moved for {still:.1f} s"
        return "its content is being cleared" if session.part.must_clear else ""

    def _is_ready(self, group: Group | None) -> bool:
        if group is None or len(group.parts) < group.manifest.topology.size:
            return False
        return not any(self._rank_reason(group, index) for index in group.parts)

    def _describe_group(self, group: Group) -> dict[str, Any]:
        size = group.manifest.topology.size
        reasons = {} if self._is_ready(group) else {i: self._rank_reason(group, i) for i in range(size)}
        text = self._unready_text(group, reasons)
        return {"group": group.name, "dp": group.dp, "readiness": protocol.clip(text, 200) if text else "ready"}

    def _unready_text(self, group: Group, reasons: dict[int, str]) -> str:
        """Say it for all ranks; where parts of unequal size keep them apart, name the sizes."""
        bad = [f"rank {index}: {protocol.clip(reason)}" for index, reason in reasons.items() if reason]
        blocks = {index: part.blocks for index, part in group.parts.items()}
        blocks.update((index, asked) for index, (asked, _) in group.refused.items())
        if group.refused and len(set(blocks.values())) > 1:
            bad.insert(0, f"the ranks' blocks differ: {dict(sorted(blocks.items()))}")
        return protocol.clip("; ".join(bad), 4096)

    def _readiness(self, client: Client, request: protocol.GetReadiness) -> None:
        group = self._groups.get((request.group, request.dp))
        ready = self._is_ready(group)
        if not ready and request.wait_s > 0:
            waiter = Waiter(client, request)
            self._waiters.append(waiter)
            self._later(min(request.wait_s, WAIT_MAX_S), lambda: self._answer_waiter(waiter))
            return
        if group is None:
            reason = f"group {request.group!r} (dp {request.dp}) does not exist: no worker attached yet"
            self._send(
                client,
                protocol.ReadinessReply(
                    serial=request.serial,
                    ready=False,
                    reason=protocol.clip(reason),
                    manifest=None,
                    ranks=[],
                    next=-1,
                    capacity=0,
                ),
            )
            return
        size = group.manifest.topology.size
        reasons = {} if ready else {index: self._rank_reason(group, index) for index in range(size)}
        first = max(0, request.first)
        page = itertools.islice(group.manifest.topology.ranks(group.dp), first, first + protocol.PAGE_RANKS)
        ranks = [
            accounting.rank_state(group, index, rank, protocol.clip(reasons.get(index, "")))
            for index, rank in enumerate(page, first)
        ]
        self._send(
            client,
            protocol.ReadinessReply(
                serial=request.serial,
                ready=ready,
                reason=self._unready_text(group, reasons),
                manifest=group.manifest.to_dict() if first == 0 else None,
                ranks=ranks,
                next=first + len(ranks) if first + len(ranks) < size else -1,
                capacity=min((part.blocks for part in group.parts.values()), default=0),
            ),
        )

    def _answer_waiter(self, waiter: Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._readiness(waiter.client, msgspec.structs.replace(waiter.request, wait_s=0.0))

    def _tell_waiters(self) -> None:
        for waiter in list(self._waiters):
            if self._is_ready(self._groups.get((waiter.request.group, waiter.request.dp))):
                self._answer_waiter(waiter)

    def _status(self, client: Client, request: protocol.GetStatus) -> None:
        parts = list(self._parts.values())
        first = max(0, request.first)
        page: list[dict[str, Any]] = []
        room = protocol.PAGE_NBYTES
        for part in parts[first : first + protocol.PAGE_PARTS]:
            described = accounting.describe(part)
            room -= len(msgspec.msgpack.encode(described))
            if room < 0 and page:
                break
            page.append(described)
        end = first + len(page)
        pending = [
            {
                "part_id": item.part_id.hex(),
                "bytes": item.pending_nbytes,
                "pids": sorted({self._sessions[number].process.pid for number in item.held}),
            }
            for item in self._reclaimer.pending[:32]
        ]
        summary = {
            "version": _version.__version__,
            "pid": os.getpid(),
            "label": self.label,
            "incarnation": self.incarnation,
            "reuse": self.profile.reuse_reason() or "on",
            "parts": len(parts),
            **accounting.totals(parts),
            "groups": [self._describe_group(group) for group in itertools.islice(self._groups.values(), 32)],
            "pending_reclaim": self._reclaimer.pending_nbytes(),
            "retired": pending,
            "max_bytes": self.profile.max_bytes(),
            "clients": len(self._clients),
            **accounting.own_use(),
            "last_emptied": list(self._last_emptied)[-8:],
        }
        self._send(
            client,
            protocol.StatusPage(
                serial=request.serial,
                summary=summary,
                parts=page,
                next=end if end < len(parts) else -1,
            ),
        )


def _compare(
    group: Group, manifest: Manifest, rank: Rank, request: protocol.Attach, any_blocks: bool
) -> dict[str, tuple[Any, Any]]:
    """Name the fields in which an attach differs from its group, with both values (R3)."""
    kept = group.by_pp.get(rank.pp)
    differences = compare(kept or group.manifest, manifest, across_pp=kept is None and bool(group.by_pp))
    if group.blocks != request.blocks and not any_blocks:
        differences["blocks"] = (group.blocks, request.blocks)
    # The device's ordinal is each rank's own.
    if group.provider.partition(":")[0] != request.provider.partition(":")[0]:
        differences["provider"] = (group.provider, request.provider)
    return differences


def _check_attach(request: protocol.Attach, manifest: Manifest) -> None:
    kind, _, ordinal = request.provider.partition(":")
    if request.provider != "host" and not (kind == "cuda" and ordinal.isascii() and ordinal.isdigit()):
        raise _status.make_text(-7, f'provider {request.provider!r} is unknown: expected "host" or "cuda:N"')
    if request.provider != "host" and not request.donate:
        raise _status.make_text(-7, "device memory is made by the worker, which donates it: the keeper has no CUDA")
    if len(request.attach_id) != 16:
        raise protocol.protocol_error("an attach id has 16 bytes", 16, len(request.attach_id), usable=True)
    if not 1 <= len(request.group.encode()) <= GROUP_NBYTES_MAX:
        raise _range_error(f"a group's name has 1 to {GROUP_NBYTES_MAX} bytes: got {protocol.clip(request.group)!r}")
    if manifest.topology.size > RANKS_MAX:
        raise _range_error(f"a group has at most {RANKS_MAX} ranks: the topology has {manifest.topology.size}")
    if not 1 <= request.blocks <= 1 << 30:
        raise _range_error(f"blocks must be 1 to {1 << 30}: got {request.blocks}")
    if request.blocks * manifest.block_bytes > BYTES_MAX:
        raise _range_error(f"{request.blocks} blocks of {manifest.block_bytes} bytes are more than {BYTES_MAX} bytes")
    if not 0 <= request.donate <= min(DONATED_MAX, request.blocks):
        most = min(DONATED_MAX, request.blocks)
        raise _range_error(f"a part of {request.blocks} block(s) takes 1 to {most} regions: got {request.donate}")


def _range_error(text: str) -> RangeError:
    return RangeError(text, status=-6, name="RANGE")


# ---- the socket ----


def _listen(path: str) -> tuple[socket.socket, int]:
    """Bind the socket; return it, and the locked fd of a file beside it that keeps a second keeper away."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_NBYTES:
        raise StartError(f"the socket path has {size} bytes, at most {SOCKET_PATH_NBYTES} fit: {path}", usage=True)
    try:
        _check_folder(os.path.dirname(os.path.abspath(path)))
        lock_fd = _take_lock(path)
    except OSError as error:
        raise StartError(f"{path} cannot be used: {error.strerror}") from error
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        # We hold the lock, so no keeper lives here: what is left of one is stale.
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise StartError(f"{path} exists and is no socket: remove it, or use another path")
            os.unlink(path)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(128)
    except (StartError, OSError) as error:
        listener.close()
        with contextlib.suppress(OSError):
            os.unlink(path + LOCK_SUFFIX)
        os.close(lock_fd)
        if isinstance(error, StartError):
            raise
        raise StartError(f"{path} cannot be used: {error.strerror}") from error
    return listener, lock_fd


def _check_folder(folder: str) -> None:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.stat(folder)
    if found.st_mode & stat.S_IWOTH:
        raise StartError(
            f"{folder} is writable by everybody (mode {found.st_mode & 0o7777:o}): anybody could take the socket's "
            "place; use a directory of mode 0700"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise StartError(
            f"{folder} belongs to uid {found.st_uid}, who could take the socket's place; use a directory of your own"
        )


def _take_lock(path: str) -> int:
    """Lock the file beside the socket. One that its holder removed meanwhile protects nothing: look again."""
    for _ in range(100):
        fd = os.open(path + LOCK_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path + LOCK_SUFFIX)):
                return fd
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(fd)
            raise StartError(f"a keeper is running on {path}: stop it first, or use another path") from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise StartError(f"{path} is started and stopped by others all the time: use another path")


def serve(path: str, profile: Profile | None = None, label: str | None = None) -> None:
    """Run a keeper in this process until SIGTERM or SIGINT, or until idle for the profile's idle_exit_s.

    Parameters
    ----------
    path : str
        Where to listen: at most 107 bytes, in a directory that nobody else can write.
    profile : Profile, optional
        Without one, reuse is off.
    label : str, optional
        Stands in the names of the memory; default: random.

    Raises
    ------
    StartError
        It cannot listen there: a keeper runs there already, or the path or directory will not do.
    """
    label = label or secrets.token_hex(4)
    # A part takes 5 fds or more.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    keeper = Keeper(path, profile or Profile.off(), profile is not None, label)
    # A signal must wake the loop: select() is retried after a handler that returns.
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signals = (signal.SIGTERM, signal.SIGINT)
    try:
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        keeper._selector.register(wake_read, selectors.EVENT_READ, lambda: None)
        before = [signal.signal(number, lambda *_: keeper.stop()) for number in signals]
        try:
            _say(f"ready on {path} (pid {os.getpid()}, label {label})", 0)
            keeper.serve()
        finally:
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)
    finally:
        signal.set_wakeup_fd(-1)
        keeper.close()
        os.close(wake_read)
        os.close(wake_write)


def main(argv: list[str] | None = None) -> int:
    """Run a keeper. Exit status: 0 ended; 1 it could not start; 2 usage or a bad profile."""
    parser = argparse.ArgumentParser(prog="kvreuse keeper")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--profile")
    parser.add_argument("--label")
    arguments = parser.parse_args(argv)
    label = arguments.label
    if label is not None and not (
        1 <= len(label) <= LABEL_NBYTES_MAX and label.isascii() and all(c.isalnum() or c in "-_." for c in label)
    ):
        return _say(f"--label {label!r}: expected 1 to {LABEL_NBYTES_MAX} letters, digits, '-', '_' or '.'", 2)
    logging.basicConfig(stream=sys.stderr, format="kvreuse keeper: %(message)s")
    try:
        serve(arguments.socket, Profile.load(arguments.profile) if arguments.profile else None, label)
    except ProfileError as error:
        return _say(str(error), 2)
    except StartError as error:
        return _say(str(error), 2 if error.usage else 1)
    return 0


def _say(text: str, status: int) -> int:
    sys.stderr.write(f"kvreuse keeper: {text}\n")
    sys.stderr.flush()
    return status
