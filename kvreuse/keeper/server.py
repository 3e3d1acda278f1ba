"""The keeper: one thread, a selector, and the memory of all parts. Imports no numpy.

It never waits for a part's lock (K7): its handle of a part tries once, and what has to wait is tried again from the loop. A POSIX lock is
dropped when any fd of its inode is closed; the one thread holds a lock only within one backend call, and closes the fds that it made for
sending between calls.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import heapq
import itertools
import logging
import os
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
from ..errors import IncompatibleError, KVReuseError, ProtocolError, WaitTimeoutError
from ..handles import IMPORT_ALLOW_UNSEALED, Provider, Region, allocate_named, open_provider
from ..manifest import Manifest, Rank, compare, describe
from ..profile import Profile
from . import processes, protocol
from .processes import Process

logger = logging.getLogger("kvreuse")

SOCKET_PATH_NBYTES = 107  # sun_path holds 108 with the final NUL
LABEL_NBYTES_MAX = 64
GROUP_NBYTES_MAX = 256
DONATED_MAX = 4096
RECOVER_RETRY_S = 0.001
RECOVER_TRIES = 5000
EMPTIED_MAX = 32
ROWS = 64
KEEPER, WRITER = 3, 2
LAYOUT_SEALED, RETIRED = 1, 2


class StartError(Exception):
    """The keeper cannot start here; the text says why."""


@dataclasses.dataclass(eq=False)
class Client:
    """One connection."""

    sock: socket.socket
    process: Process
    hello: bool = False
    sessions: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False)
class Session:
    """One attach of one process. `client` is None while its connection is cut."""

    number: int
    part: Part
    process: Process
    attach_id: bytes
    row: int
    client: Client | None
    offered: str
    reason: str
    confirmed: str = ""
    blocks: int = 0
    serial: int = 0


@dataclasses.dataclass(eq=False)
class Part:
    """One rank's memory."""

    part_id: bytes
    group: Group
    rank: Rank
    index: int
    manifest: Manifest
    blocks: int
    nbytes: int
    table_region: Region
    claims_region: Region
    lock_region: Region
    data: list[Region | None]
    table: int = 0
    sealed: bool = False
    writer: Session | None = None
    waiting_since: float = 0.0
    died_at: float = 0.0
    last_pid: int = 0


@dataclasses.dataclass(eq=False)
class Group:
    """The parts of one data-parallel replica; its manifest is the first attach's."""

    name: str
    dp: int
    manifest: Manifest
    pp: int
    blocks: int
    parts: dict[int, Part] = dataclasses.field(default_factory=dict)
    emptied: dict[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Waiter:
    """A GetReadiness that is answered later."""

    client: Client
    request: protocol.GetReadiness


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
        self._watched: dict[tuple[int, int], Process] = {}
        self._waiters: list[Waiter] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._last_emptied: deque[dict[str, Any]] = deque(maxlen=EMPTIED_MAX)
        self._idle_since = time.monotonic()
        self._stopping = False
        self._listener, self._lock_fd = _listen(path)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    # ---- loop ----

    def serve(self) -> None:
        """Serve until `stop`, or until idle for the profile's idle_exit_s."""
        idle = self.profile.retention.idle_exit_s
        while not self._stopping:
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            if self._parts or self._clients:
                self._idle_since = now
            elif idle and now - self._idle_since >= idle:
                break
            waits = [self._timers[0][0] - now] if self._timers else []
            waits += [idle - (now - self._idle_since)] if idle and not (self._parts or self._clients) else []
            for key, _ in self._selector.select(max(0.0, min(waits)) if waits else None):
                key.data()

    def stop(self) -> None:
        """End `serve`; may be called from a signal handler."""
        self._stopping = True

    def close(self) -> None:
        """Release everything."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        for part in list(self._parts.values()):
            self._retire(part, "the keeper stops")
        for client in list(self._clients):
            self._drop_client(client)
        for process in self._watched.values():
            process.close()
        self._listener.close()
        os.close(self._lock_fd)
        self._selector.close()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_numbers), action))

    # ---- connections ----

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        uid = processes.peer_uid(sock)
        if uid not in (os.geteuid(), *self.profile.security.allow_uids):
            text = f"uid {uid} may not connect: this keeper serves uid {os.geteuid()} and [security] allow_uids"
            with contextlib.suppress(OSError):
                protocol.send(sock, protocol.Failed(serial=0, status=-8, text=text, fields={}))
            sock.close()
            return
        try:
            process = processes.peer_process(sock)
        except OSError as error:
            text = f"this kernel gives no proof of a worker's end ({error.strerror}): attach would not be safe"
            with contextlib.suppress(OSError):
                protocol.send(sock, protocol.Failed(serial=0, status=-7, text=text, fields={}))
            sock.close()
            return
        client = Client(sock, process)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._readable(client))

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
        try:
            got = protocol.recv_request(client.sock, protocol.FDS_MAX)
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._send(client, protocol.failed(0, error))
            if error.expected is None or not isinstance(error.got, int) or not isinstance(error.expected, int):
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
        elif not client.hello:
            raise protocol.protocol_error("the first frame must be Hello")
        elif isinstance(request, protocol.Attach):
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
        _check_attach(request)
        for session in self._sessions.values():
            if session.attach_id == request.attach_id and session.process.key == client.process.key:
                self._adopt(client, session)
                self._answer_attach(client, session, request.serial)  # asked again: the first answer was lost
                return
        self._reap_dead_writers()
        key = (request.group, rank.dp)
        group = self._groups.get(key)
        reason = "new"
        if group is not None:
            differences = compare(group.manifest, manifest, across_pp=group.pp != rank.pp)
            kept = group.parts.get(index)
            if kept is not None:
                differences = {**compare(kept.manifest, manifest), **differences}
            if group.blocks != request.blocks:
                differences["blocks"] = (group.blocks, request.blocks)
            if differences:
                living = next((part.writer for part in group.parts.values() if part.writer), None)
                if living is not None:
                    self._refuse(client, request, f"the group has another manifest: {describe(differences)}", living)
                    return
                reason = f"the manifest changed: {describe(differences)}"
                self._retire_group(group, reason)
                group = None
        if group is None:
            group = self._groups[key] = Group(request.group, rank.dp, manifest, rank.pp, request.blocks)
        try:
            self._attach_in(client, request, group, manifest, rank, index, reason)
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
        reason: str,
    ) -> None:
        part = group.parts.get(index)
        if part is not None and part.writer is not None:
            self._refuse(client, request, "writer alive", part.writer)
            return
        if part is not None and not part.sealed:
            self._retire(part, "its layout was never sealed")
            part = None
        if part is not None:
            damage = self._damage(part)
            if damage:
                self._retire(part, damage)
                part, reason = None, damage
        if part is None:
            reason = group.emptied.pop(index, reason) if reason == "new" else reason
            refusal = self._make_room(_part_nbytes(request.blocks, manifest.block_bytes))
            if refusal:
                self._refuse(client, request, refusal, None)
                return
            part = self._create(group, manifest, rank, index, request)
            offered = "EMPTY"
        else:
            offered, reason = "RESTORED", ""
        session = self._admit(client, part, request, offered, reason)
        if part.sealed:
            self._answer_attach(client, session, request.serial)
        else:
            spr = -(-request.blocks // request.donate)
            sizes = [
                (min(request.blocks, (i + 1) * spr) - min(request.blocks, i * spr)) * manifest.block_bytes
                for i in range(request.donate)
            ]
            self._send(client, protocol.NeedRegions(serial=request.serial, session=session.number, nbytes=sizes))

    def _refuse(self, client: Client, request: protocol.Attach, reason: str, holder: Session | None) -> None:
        pid = holder.process.pid if holder else 0
        self._send(client, protocol.Refused(serial=request.serial, reason=reason, pid=pid, fields={}))

    def _damage(self, part: Part) -> str:
        """Open a waiting part anew, so that its superblock is checked again; say what is wrong."""
        try:
            _backend.table_close(self._open_table(part))
        except KVReuseError as error:
            kind = "incompatible" if isinstance(error, IncompatibleError) else "corrupt"
            return f"{kind}: {error}"
        return ""

    def _open_table(self, part: Part) -> int:
        lock_fd = _backend.region_export(part.lock_region.handle)
        try:
            return _backend.table_open(part.table_region.handle, part.claims_region.handle, lock_fd, KEEPER, 0, -1, 0)
        except BaseException:
            os.close(lock_fd)
            raise

    def _make_room(self, nbytes: int) -> str:
        """Drop waiting parts, oldest first, until one more of `nbytes` fits the profile; say why it cannot."""
        limit, parts = self.profile.max_bytes(), self.profile.retention.max_parts
        if nbytes > limit:
            return f"the part needs {nbytes} bytes, [retention] max_bytes is {limit}"
        while True:
            used = sum(part.nbytes for part in self._parts.values())
            if used + nbytes <= limit and len(self._parts) < parts:
                return ""
            waiting = [part for part in self._parts.values() if part.writer is None]
            if not waiting:
                return (
                    f"the part needs {nbytes} bytes: {len(self._parts)} parts with {used} bytes have workers, "
                    f"[retention] allows {parts} parts and {limit} bytes"
                )
            oldest = min(waiting, key=lambda part: part.waiting_since)
            self._retire(oldest, "dropped to make room for another part")

    def _create(
        self, group: Group, manifest: Manifest, rank: Rank, index: int, request: protocol.Attach
    ) -> Part:
        part_id = secrets.token_bytes(16)
        regions = max(1, request.donate)
        described = msgspec.msgpack.encode(
            {
                "group": group.name,
                "dp": group.dp,
                "rank": rank.to_dict(),
                "manifest": manifest.to_dict(),
                "provider": request.provider,
                "donated": request.donate,
                "label": self.label,
            }
        )
        layout = _backend.table_layout(request.blocks, len(described))
        made: list[Region] = []

        def allocate(nbytes: int, what: str) -> Region:
            name = f"kvreuse:{self.label}:{part_id.hex()[:8]}:{what}"
            made.append(allocate_named(self._provider, nbytes, name))
            return made[-1]

        table = 0
        try:
            table_region = allocate(layout.table_nbytes, "table")
            claims_region = allocate(layout.claims_nbytes, "claims")
            lock_region = allocate(1, "lock")
            data: list[Region | None] = [None] * regions
            if not request.donate:
                data[0] = allocate(request.blocks * manifest.block_bytes, "data0")
            _backend.table_create(
                table_region.handle,
                claims_region.handle,
                part_id,
                request.blocks,
                manifest.block_bytes,
                regions,
                described,
            )
            part = Part(
                part_id,
                group,
                rank,
                index,
                manifest,
                request.blocks,
                _part_nbytes(request.blocks, manifest.block_bytes),
                table_region,
                claims_region,
                lock_region,
                data,
            )
            table = part.table = self._open_table(part)
            if not request.donate:
                self._seal(part)
        except BaseException:
            if table:
                _backend.table_close(table)
            for region in made:
                region.close()
            raise
        self._parts[part_id] = part
        group.parts[index] = part
        return part

    def _seal(self, part: Part) -> None:
        _backend.table_set_state(part.table, LAYOUT_SEALED)
        part.sealed = True

    def _admit(
        self, client: Client, part: Part, request: protocol.Attach, offered: str, reason: str
    ) -> Session:
        process = self._watch(client.process)
        number = next(self._sessions_seen)
        _backend.table_admit(part.table, 0, number, WRITER)
        session = Session(number, part, process, request.attach_id, 0, client, offered, reason)
        part.writer = session
        part.last_pid = process.pid
        self._sessions[number] = session
        client.sessions.add(number)
        return session

    def _answer_attach(self, client: Client, session: Session, serial: int) -> None:
        part = session.part
        regions = [part.table_region, part.claims_region, part.lock_region, *(r for r in part.data if r)]
        records = []
        for region in regions:
            info = _backend.region_info(region.handle)
            unsealed = region.observe().seals in (None, 0)
            records.append(
                (info.nbytes, info.physical_nbytes, info.region_id, info.device, info.inode, unsealed)
            )
        del records[2]  # the lock is used by its fd, never mapped
        fds: list[int] = []
        try:
            fds.extend(_backend.region_export(region.handle) for region in regions)
            first = fds[: protocol.FDS_MAX]
            self._send(
                client,
                protocol.Attached(
                    serial=serial,
                    part_id=part.part_id,
                    session=session.number,
                    row=session.row,
                    offered=session.offered,
                    reason=session.reason,
                    records=records,
                    blocks=part.blocks,
                    block_bytes=part.manifest.block_bytes,
                    lock_wait_ns=int(self.profile.table.lock_wait_s * 1e9),
                    reuse_enabled=self.profile.reuse.enabled,
                    reuse_reason=self.profile.reuse_reason(),
                    checksum=self.profile.checksum.when,
                    fd_count=len(fds),
                ),
                first,
            )
            for start in range(len(first), len(fds), protocol.FDS_MAX):
                self._send(client, protocol.MoreFds(serial=serial), fds[start : start + protocol.FDS_MAX])
        finally:
            protocol.close_fds(fds)

    def _donate(self, client: Client, request: protocol.Donate, fd: int) -> None:
        session = self._session_of(client, request.session)
        part = session.part
        if part.sealed or not 0 <= request.index < len(part.data) or part.data[request.index] is not None:
            raise protocol.protocol_error(f"region {request.index} was not asked for")
        nbytes, physical_nbytes, region_id, device, inode, _ = request.record
        flags = IMPORT_ALLOW_UNSEALED if self.profile.handles.file_fallback else 0
        info = _backend.region_import(fd, nbytes, physical_nbytes, region_id, device, inode, flags)
        part.data[request.index] = Region("host", info.handle, {})
        if all(part.data):
            self._seal(part)
            self._answer_attach(client, session, request.serial)
        else:
            self._send(client, protocol.Done(serial=request.serial, value=request.index))

    def _confirm(self, client: Client, request: protocol.Confirm) -> None:
        session = self._session_of(client, request.session)
        if not session.part.sealed:
            raise protocol.protocol_error("the part's layout is not sealed")
        session.confirmed, session.blocks = request.kind, request.blocks
        if request.kind == "EMPTY" and request.reason not in ("new", ""):
            self._note_emptied(session.part, request.reason)
        self._send(client, protocol.Done(serial=request.serial))
        self._tell_waiters()

    # ---- sessions ----

    def _session_of(self, client: Client, number: int) -> Session:
        session = self._sessions.get(number)
        if session is None or session.process.key != client.process.key:
            raise _status.make_text(-18, f"session {number} is not open, or is another process's: attach again")
        return session

    def _adopt(self, client: Client, session: Session) -> None:
        session.client = client
        client.sessions.add(session.number)

    def _resume(self, client: Client, request: protocol.Resume) -> None:
        session = self._session_of(client, request.session)
        if session.attach_id != request.attach_id:
            raise _status.make_text(-18, f"session {request.session} has another attach id: attach again")
        self._adopt(client, session)
        self._send(client, protocol.Done(serial=request.serial))

    def _goodbye(self, client: Client, request: protocol.Goodbye) -> None:
        session = self._session_of(client, request.session)
        session.part.died_at = time.monotonic()
        self._end_session(session)
        self._send(client, protocol.Done(serial=request.serial))
        self._tell_waiters()

    def _watch(self, process: Process) -> Process:
        """Return the keeper's own Process of the same process, with its pidfd in the loop."""
        known = self._watched.get(process.key)
        if known is None:
            known = self._watched[process.key] = Process(process.pid, os.dup(process.pidfd))
            self._selector.register(known.pidfd, selectors.EVENT_READ, lambda: self._gone(known))
        return known

    def _gone(self, process: Process) -> None:
        """A pidfd fired: proof that the process is gone."""
        now = time.monotonic()
        if self._watched.pop(process.key, None) is None:
            return
        self._selector.unregister(process.pidfd)
        for session in [item for item in self._sessions.values() if item.process is process]:
            session.part.died_at = now
            self._end_session(session)
        process.close()
        self._tell_waiters()

    def _reap_dead_writers(self) -> None:
        """Notice at once what the loop would notice next."""
        for process in list(self._watched.values()):
            if process.gone():
                self._gone(process)

    def _end_session(self, session: Session) -> None:
        part = session.part
        del self._sessions[session.number]
        if session.client is not None:
            session.client.sessions.discard(session.number)
        part.writer = None
        part.waiting_since = time.monotonic()
        _backend.table_drop(part.table, session.row, session.number)
        if not any(item.process is session.process for item in self._sessions.values()):
            self._unwatch(session.process)
        if not part.sealed or not self.profile.reuse.enabled:
            self._retire(part, "" if part.sealed else "its layout was never sealed")
            return
        self._recover(part, RECOVER_TRIES)
        self._later(self.profile.retention.ttl_s, lambda: self._expire(part))

    def _unwatch(self, process: Process) -> None:
        if self._watched.pop(process.key, None) is not None:
            self._selector.unregister(process.pidfd)
            process.close()

    def _recover(self, part: Part, tries: int) -> None:
        """Free what a gone writer left unfinished; a reader may hold the lock, so try again later. A new writer's restore does the same."""
        if part.writer is not None or self._parts.get(part.part_id) is not part:
            return
        try:
            _backend.table_recover(part.table)
        except WaitTimeoutError:
            if tries:
                self._later(RECOVER_RETRY_S, lambda: self._recover(part, tries - 1))
        except KVReuseError as error:
            self._retire(part, f"corrupt: {error}")

    def _expire(self, part: Part) -> None:
        ttl = self.profile.retention.ttl_s
        if self._parts.get(part.part_id) is part and part.writer is None:
            if time.monotonic() - part.waiting_since >= ttl:
                self._retire(part, "expired")

    # ---- giving memory back ----

    def _retire(self, part: Part, reason: str) -> None:
        """Free a part: RETIRED first, so that who still maps it learns that it is over, then close."""
        del self._parts[part.part_id]
        part.group.parts.pop(part.index, None)
        if part.writer is not None:
            session = part.writer
            part.writer = None
            del self._sessions[session.number]
            if session.client is not None:
                session.client.sessions.discard(session.number)
            if not any(item.process is session.process for item in self._sessions.values()):
                self._unwatch(session.process)
        with contextlib.suppress(KVReuseError):
            _backend.table_set_state(part.table, RETIRED)
        _backend.table_close(part.table)
        for region in (part.table_region, part.claims_region, part.lock_region, *part.data):
            if region is not None:
                region.close()
        if reason and part.sealed:
            part.group.emptied[part.index] = reason
            self._note_emptied(part, reason)
        self._forget_if_empty(part.group)

    def _note_emptied(self, part: Part, reason: str) -> None:
        self._last_emptied.append(
            {"group": part.group.name, "dp": part.group.dp, "rank": part.rank.to_dict(), "reason": reason}
        )

    def _retire_group(self, group: Group, reason: str) -> None:
        for part in list(group.parts.values()):
            self._retire(part, reason)
        self._groups.pop((group.name, group.dp), None)

    def _forget_if_empty(self, group: Group) -> None:
        # A group whose parts were lost is remembered, so that the next attach of each rank says why.
        if not group.parts and not group.emptied and self._groups.get((group.name, group.dp)) is group:
            del self._groups[group.name, group.dp]

    def _release(self, client: Client, request: protocol.Release) -> None:
        if request.part_id:
            part = self._parts.get(request.part_id)
            if part is None:
                raise _status.make_text(-1, f"part {request.part_id.hex()} is not here")
            if part.writer is not None:
                pid = part.writer.process.pid
                raise _status.make_text(-12, f"part {request.part_id.hex()[:8]} has a worker (pid {pid}): stop that first")
            chosen = [part]
        else:
            chosen = [part for part in self._parts.values() if part.writer is None]
        for part in chosen:
            self._retire(part, "released by an operator")
        self._send(client, protocol.Done(serial=request.serial, value=len(chosen)))

    # ---- telling ----

    def _ranks(self, name: str, dp: int) -> tuple[bool, str, list[dict[str, Any]]]:
        group = self._groups.get((name, dp))
        if group is None:
            return False, f"group {name!r} (dp {dp}) does not exist: no worker attached yet", []
        ranks = []
        for rank in group.manifest.topology.ranks(dp):
            index = rank.index(group.manifest.topology)
            part = group.parts.get(index)
            session = part.writer if part else None
            if part is None:
                reason = f"missing: {group.emptied[index]}" if index in group.emptied else "missing"
            elif session is None:
                reason = f"exited: its worker (pid {part.last_pid}) is gone and none has replaced it"
            elif session.process.gone():
                reason = f"exited: its worker (pid {session.process.pid}) is gone"
            elif not part.sealed:
                reason = "its layout is not sealed"
            elif not session.confirmed:
                reason = "attaching"
            else:
                reason = ""
            ranks.append(
                {
                    "index": index,
                    "rank": rank.to_dict(),
                    "ready": not reason,
                    "reason": reason,
                    "pid": session.process.pid if session else 0,
                    "blocks": part.blocks if part else 0,
                    "died_at": part.died_at if part else 0.0,
                }
            )
        bad = {rank["index"]: rank["reason"] for rank in ranks if not rank["ready"]}
        return not bad, "; ".join(f"rank {index}: {reason}" for index, reason in bad.items()), ranks

    def _readiness(self, client: Client, request: protocol.GetReadiness) -> None:
        ready, reason, ranks = self._ranks(request.group, request.dp)
        if ready or request.wait_s <= 0:
            self._send(
                client,
                protocol.ReadinessReply(serial=request.serial, ready=ready, reason=reason, ranks=ranks),
            )
            return
        waiter = Waiter(client, request)
        self._waiters.append(waiter)
        self._later(min(request.wait_s, 3600.0), lambda: self._answer_waiter(waiter))

    def _answer_waiter(self, waiter: Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._readiness(waiter.client, msgspec.structs.replace(waiter.request, wait_s=0.0))

    def _tell_waiters(self) -> None:
        for waiter in list(self._waiters):
            if self._ranks(waiter.request.group, waiter.request.dp)[0]:
                self._answer_waiter(waiter)

    def _status(self, client: Client, request: protocol.GetStatus) -> None:
        parts = list(self._parts.values())
        page = parts[max(0, request.first) : max(0, request.first) + protocol.PAGE_PARTS]
        end = max(0, request.first) + len(page)
        summary = {
            "version": _version.__version__,
            "pid": os.getpid(),
            "label": self.label,
            "incarnation": self.incarnation,
            "reuse": self.profile.reuse_reason() or "on",
            "parts": len(parts),
            "bytes": sum(part.nbytes for part in parts),
            "waiting_bytes": sum(part.nbytes for part in parts if part.writer is None),
            "max_bytes": self.profile.max_bytes(),
            "clients": len(self._clients),
            "last_emptied": list(self._last_emptied)[-8:],
        }
        self._send(
            client,
            protocol.StatusPage(
                serial=request.serial,
                summary=summary,
                parts=[self._describe(part) for part in page],
                next=end if end < len(parts) else -1,
            ),
        )

    def _describe(self, part: Part) -> dict[str, Any]:
        stats = _backend.table_stats(part.table)
        session = part.writer
        sessions = []
        if session is not None:
            sessions.append(
                {
                    "role": "writer",
                    "session": session.number,
                    "pid": session.process.pid,
                    "start_time": session.process.start_time,
                    "connected": session.client is not None,
                    "outcome": session.confirmed,
                }
            )
        return {
            "part_id": part.part_id.hex(),
            "group": part.group.name,
            "dp": part.group.dp,
            "rank": part.rank.to_dict(),
            "state": "CREATING" if not part.sealed else "LIVE" if session else "WAITING",
            "blocks": part.blocks,
            "block_bytes": part.manifest.block_bytes,
            "bytes": part.nbytes,
            "sealed": stats.sealed_count,
            "free": stats.free_count,
            "claimed": stats.claimed_count,
            "evicted_total": stats.evicted_total,
            "sessions": sessions,
        }


def _part_nbytes(blocks: int, block_bytes: int) -> int:
    layout = _backend.table_layout(blocks, 0)
    # The claims are sparse: one row is what a part with one writer uses.
    return blocks * block_bytes + layout.table_nbytes + layout.row_nbytes


def _check_attach(request: protocol.Attach) -> None:
    if request.provider != "host":
        raise _status.make_text(-7, f"provider {request.provider!r} is not in this version: use host")
    if len(request.attach_id) != 16:
        raise protocol.protocol_error("an attach id has 16 bytes", 16, len(request.attach_id))
    if not 1 <= len(request.group.encode()) <= GROUP_NBYTES_MAX:
        raise _status.make_text(-6, f"a group's name has 1 to {GROUP_NBYTES_MAX} bytes: got {request.group!r}")
    if not 1 <= request.blocks <= 1 << 30:
        raise _status.make_text(-6, f"blocks must be 1 to {1 << 30}: got {request.blocks}")
    if not 0 <= request.donate <= min(DONATED_MAX, request.blocks):
        raise _status.make_text(-6, f"a part of {request.blocks} blocks takes 1 to {DONATED_MAX} regions")


# ---- the socket ----


def _listen(path: str) -> tuple[socket.socket, int]:
    """Bind the socket; return it, and the locked fd of a file beside it that keeps a second keeper away."""
    if len(os.fsencode(path)) > SOCKET_PATH_NBYTES:
        raise StartError(f"the socket path has {len(os.fsencode(path))} bytes, at most {SOCKET_PATH_NBYTES} fit: {path}")
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        mode = os.stat(folder).st_mode
        if mode & stat.S_IWOTH:
            raise StartError(
                f"{folder} is writable by everybody (mode {mode & 0o7777:o}): anybody could take the socket's place; "
                "use a directory of mode 0700"
            )
        lock_fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StartError(f"{path} cannot be used: {error.strerror}") from error
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"a keeper is running on {path}: stop it first, or use another path") from None
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
    except StartError:
        listener.close()
        os.close(lock_fd)
        raise
    except OSError as error:
        listener.close()
        os.close(lock_fd)
        raise StartError(f"{path} cannot be used: {error.strerror}") from error
    return listener, lock_fd


def main(argv: list[str] | None = None) -> int:
    """Run a keeper. Exit status: 0 ended; 1 it could not start; 2 usage or a bad profile."""
    parser = argparse.ArgumentParser(prog="kvreuse keeper")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--profile")
    parser.add_argument("--label", default=secrets.token_hex(4))
    arguments = parser.parse_args(argv)
    label = arguments.label
    if not 1 <= len(label) <= LABEL_NBYTES_MAX or not all(c.isalnum() or c in "-_." for c in label):
        return _say(f"--label {label!r}: expected 1 to {LABEL_NBYTES_MAX} letters, digits, '-', '_' or '.'", 2)
    try:
        profile = Profile.load(arguments.profile) if arguments.profile else Profile.off()
    except KVReuseError as error:
        return _say(str(error), 2)
    logging.basicConfig(stream=sys.stderr, format="kvreuse keeper: %(message)s")
    try:
        keeper = Keeper(arguments.socket, profile, bool(arguments.profile), label)
    except StartError as error:
        return _say(str(error), 1)
    # A signal must wake the loop: select() is retried after a handler that returns.
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    keeper._selector.register(wake_read, selectors.EVENT_READ, lambda: None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: keeper.stop())
    _say(f"ready on {arguments.socket} (pid {os.getpid()}, label {label})", 0)
    try:
        keeper.serve()
    finally:
        keeper.close()
    return 0


def _say(text: str, status: int) -> int:
    print(f"kvreuse keeper: {text}", file=sys.stderr, flush=True)
    return status
