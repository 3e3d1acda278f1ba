"""A worker's connection to the keeper."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .. import _api, _select, _status, _version
from ..errors import AttachRefusedError, ForkedError, KeeperUnavailableError, KVReuseError, ProtocolError
from ..profile import Profile
from . import processes, protocol

if TYPE_CHECKING:
    from ..groups import Group
    from ..handles import Region
    from ..manifest import Manifest, Rank
    from ..parts import Part

DEFAULT_TIMEOUT_S = 5.0


@dataclasses.dataclass
class Attachment:
    """What the keeper gave for one attach. Part takes over the fds."""

    keeper: Keeper
    part_id: bytes
    session: int
    row: int
    attach_id: bytes
    offered: str
    reason: str
    table_fd: int
    claims_fd: int
    lock_fd: int
    data_fds: list[int]
    records: list[protocol.Record]
    blocks: int
    block_bytes: int
    lock_wait_ns: int
    reuse_enabled: bool
    reuse_reason: str
    checksum: str


def default_path() -> str:
    """Return where a keeper is looked for: $KVREUSE_SOCKET, $XDG_RUNTIME_DIR/kvreuse/keeper.sock, /run/kvreuse/keeper.sock."""
    if os.environ.get("KVREUSE_SOCKET"):
        return os.environ["KVREUSE_SOCKET"]
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(folder or "/run", "kvreuse", "keeper.sock")


def connect(path: str | os.PathLike[str] | None = None, timeout: float = DEFAULT_TIMEOUT_S) -> Keeper:
    """Connect to a keeper.

    Parameters
    ----------
    path : path, optional
        The keeper's socket; default: $KVREUSE_SOCKET, then $XDG_RUNTIME_DIR/kvreuse/keeper.sock, then /run/kvreuse/keeper.sock.
    timeout : float
        Bound of every wait for the keeper, seconds.

    Returns
    -------
    Keeper
        Owned by the caller: close it.

    Raises
    ------
    KeeperUnavailableError
        No keeper answers there.
    IncompatibleError
        The keeper has another ABI version.
    PermissionDeniedError
        The keeper is another user's, or does not serve this one.
    """
    return Keeper(os.fspath(path) if path is not None else default_path(), timeout)


def _unavailable(path: str, why: str) -> KeeperUnavailableError:
    return KeeperUnavailableError(
        f"no keeper answers on {path}: {why}; start one with `kvreuse keeper --socket {path}`",
        status=-17,
        name="KEEPER_UNAVAILABLE",
    )


class Keeper:
    """A connection to the keeper; usable from any thread. If it is cut, the next call reconnects and resumes its sessions."""

    def __init__(self, path: str, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        self.path = path
        self._timeout = timeout
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._serial = 0
        self._sock: socket.socket | None = None
        self._closed = False
        self._attached: dict[int, bytes] = {}
        self._parts: weakref.WeakSet[Part] = weakref.WeakSet()
        self.incarnation = 0
        self.profile = Profile.off()
        with self._lock:
            self._connect(time.monotonic() + timeout)

    def __repr__(self) -> str:
        return f"<kvreuse.Keeper {self.path}>"

    # ---- frames; all under self._lock ----

    def _connect(self, deadline: float) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                sock.connect(self.path)
            except (OSError, ValueError) as error:
                raise _unavailable(self.path, getattr(error, "strerror", None) or str(error)) from error
            sock.setblocking(False)
            uid = processes.peer_uid(sock)
            trusted = (os.geteuid(), 0)
            if uid not in trusted:
                raise _status.make_text(-8, f"the keeper on {self.path} runs as uid {uid}: expected uid {trusted[0]} or 0")
            self._sock = sock
            hello = protocol.Hello(
                serial=self._next(), abi=_api.ABI_VERSION, backend=_select.backend_name, version=_version.__version__
            )
            welcome, _ = self._exchange(hello, (), deadline)
            if welcome.abi != _api.ABI_VERSION:
                raise _status.make_text(
                    -15, f"the keeper has ABI version {welcome.abi}, this worker {_api.ABI_VERSION}: install the same kvreuse"
                )
        except BaseException:
            self._sock = None
            sock.close()
            raise
        self.incarnation = welcome.incarnation
        self.profile = Profile.off() if welcome.profile is None else Profile.from_dict(welcome.profile, "the keeper's profile")
        for session, attach_id in list(self._attached.items()):
            try:
                self._exchange(
                    protocol.Resume(serial=self._next(), session=session, attach_id=attach_id), (), deadline
                )
            except KeeperUnavailableError:
                raise
            except KVReuseError:
                del self._attached[session]  # another keeper, or the part was retired: its part's calls say so

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    def _exchange(self, message: Any, fds: Sequence[int], deadline: float) -> tuple[Any, list[int]]:
        """Send one request, and wait for its reply and the fds of it."""
        sock = self._sock
        assert sock is not None
        try:
            self._wait(sock, select.POLLOUT, deadline)
            protocol.send(sock, message, fds)
            while True:
                self._wait(sock, select.POLLIN, deadline)
                got = protocol.recv_reply(sock, protocol.FDS_MAX)
                if got is None:
                    raise ConnectionResetError("the keeper closed the connection")
                reply, received = got
                if reply.serial in (message.serial, 0):
                    break
                protocol.close_fds(received)  # the late answer of a request that timed out
        except OSError as error:
            self._sock = None
            sock.close()
            if isinstance(error, KVReuseError):
                raise
            raise _unavailable(self.path, error.strerror or str(error)) from error
        if isinstance(reply, protocol.Failed):
            protocol.close_fds(received)
            protocol.raise_failed(reply)
        return reply, received

    def _wait(self, sock: socket.socket, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(sock, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise _unavailable(self.path, f"it did not answer within {self._timeout} s")

    def _request(
        self, make: Callable[[int], Any], fds: Sequence[int] = (), timeout: float | None = None
    ) -> tuple[Any, list[int]]:
        self._check()
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        with self._lock:
            return self._request_locked(make, fds, deadline)

    def _request_locked(
        self, make: Callable[[int], Any], fds: Sequence[int], deadline: float
    ) -> tuple[Any, list[int]]:
        fresh = self._sock is None
        if fresh:
            self._connect(deadline)
        try:
            return self._exchange(make(self._next()), fds, deadline)
        except KeeperUnavailableError:
            if fresh or time.monotonic() >= deadline:
                raise
        # The connection was cut since the last call. Every request may be asked twice.
        self._connect(deadline)
        return self._exchange(make(self._next()), fds, deadline)

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ForkedError("the connection belongs to the parent process: connect anew", status=-26, name="FORKED")
        if self._closed:
            raise _status.make_text(-3, "the connection to the keeper is closed")

    # ---- calls ----

    def attach(
        self,
        manifest: Manifest,
        rank: Rank,
        *,
        blocks: int,
        group: str = "default",
        provider: str = "host",
        regions: Sequence[Region] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> Part:
        """Become the writer of a rank's part, and get back what the last writer stored if it is provably the same.

        Parameters
        ----------
        manifest : Manifest
            What must be equal for the bytes to mean the same.
        rank : Rank
            This worker's place; its dp belongs to the group's identity.
        blocks : int
            Slots of the part.
        group : str
            Name of the group.
        provider : str
            "host".
        regions : sequence of Region, optional
            Data memory of the caller's instead of the keeper's, ceil(blocks / len(regions)) slots in each. The part holds it on its
            own: they may be closed afterwards. Not used where a part is restored.
        timeout : float
            Bound of the whole attach, seconds.

        Returns
        -------
        Part
            Owned by the caller; `outcome` says what was restored, or why nothing was.

        Raises
        ------
        AttachRefusedError
            A living worker holds the part, or the profile's bounds are reached; nothing changed.
        RangeError
            The rank is outside of the topology.
        KeeperUnavailableError
            The keeper did not answer in time.
        """
        from ..parts import Part

        self._check()
        count = _status.as_integer(blocks, "blocks")
        attach_id = secrets.token_bytes(16)
        donated = list(regions or ())
        deadline = time.monotonic() + timeout

        def request(serial: int) -> protocol.Attach:
            return protocol.Attach(
                serial=serial,
                attach_id=attach_id,
                manifest=manifest.to_dict(),
                rank=rank.to_dict(),
                group=group,
                blocks=count,
                provider=provider,
                donate=len(donated),
            )

        with self._lock:
            reply, fds = self._request_locked(request, (), deadline)
            try:
                if isinstance(reply, protocol.NeedRegions):
                    self._attached[reply.session] = attach_id
                    protocol.close_fds(fds)
                    reply, fds = self._donate(reply, donated, deadline)
                if isinstance(reply, protocol.Refused):
                    raise _refused(reply)
                if not isinstance(reply, protocol.Attached):
                    raise protocol.protocol_error(f"expected an answer to Attach, got {type(reply).__name__}")
                self._attached[reply.session] = attach_id
                self._receive_more(reply, fds, deadline)
            except BaseException:
                protocol.close_fds(fds)
                session = getattr(reply, "session", 0)
                if session:
                    self._forget(session, deadline)
                raise
        attachment = Attachment(
            keeper=self,
            part_id=reply.part_id,
            session=reply.session,
            row=reply.row,
            attach_id=attach_id,
            offered=reply.offered,
            reason=reply.reason,
            table_fd=fds[0],
            claims_fd=fds[1],
            lock_fd=fds[2],
            data_fds=fds[3:],
            records=[tuple(record) for record in reply.records],
            blocks=reply.blocks,
            block_bytes=reply.block_bytes,
            lock_wait_ns=reply.lock_wait_ns,
            reuse_enabled=reply.reuse_enabled,
            reuse_reason=reply.reuse_reason,
            checksum=reply.checksum,
        )
        try:
            part = Part._open(attachment, manifest, rank)
        except BaseException:
            with contextlib.suppress(KVReuseError):
                self._goodbye(attachment.part_id, attachment.session)
            raise
        self._parts.add(part)
        return part

    def _donate(
        self, need: protocol.NeedRegions, regions: list[Region], deadline: float
    ) -> tuple[Any, list[int]]:
        for index, (region, nbytes) in enumerate(zip(regions, need.nbytes, strict=True)):
            if region.nbytes < nbytes:
                self._forget(need.session, deadline)
                raise _status.make_text(
                    -5, f"region {index} has {region.nbytes} bytes: the part needs {nbytes} there"
                )
        for index, region in enumerate(regions):
            with region.export() as shared:
                record = (
                    shared.nbytes,
                    shared.physical_nbytes,
                    shared.region_id,
                    shared.device,
                    shared.inode,
                    False,
                )
                message = protocol.Donate(serial=self._next(), session=need.session, index=index, record=record)
                reply, fds = self._exchange(message, [shared.fileno()], deadline)
        return reply, fds

    def _receive_more(self, reply: protocol.Attached, fds: list[int], deadline: float) -> None:
        sock = self._sock
        assert sock is not None
        while len(fds) < reply.fd_count:
            self._wait(sock, select.POLLIN, deadline)
            got = protocol.recv_reply(sock, protocol.FDS_MAX)
            if got is None or not isinstance(got[0], protocol.MoreFds):
                raise protocol.protocol_error(
                    f"expected {reply.fd_count} fds, got {len(fds)}", reply.fd_count, len(fds)
                )
            fds.extend(got[1])
        if len(fds) < 4 or len(reply.records) != len(fds) - 1:
            raise protocol.protocol_error(
                f"expected {len(reply.records) + 1} fds for the part, got {len(fds)}", len(reply.records) + 1, len(fds)
            )

    def _forget(self, session: int, deadline: float) -> None:
        self._attached.pop(session, None)
        with contextlib.suppress(KVReuseError):
            self._exchange(protocol.Goodbye(serial=self._next(), session=session), (), deadline)

    def _confirm(self, part_id: bytes, session: int, kind: str, blocks: int, reason: str) -> None:
        self._request(
            lambda serial: protocol.Confirm(serial=serial, session=session, kind=kind, blocks=blocks, reason=reason[:2048])
        )

    def _goodbye(self, part_id: bytes, session: int) -> None:
        if self._attached.pop(session, None) is not None:
            self._request(lambda serial: protocol.Goodbye(serial=serial, session=session))

    def group(self, name: str = "default", manifest: Manifest | None = None, dp: int = 0) -> Group:
        """Name a group: the parts of one data-parallel replica.

        Parameters
        ----------
        name : str
        manifest : Manifest, optional
            What this caller expects; readiness says where the group has another one.
        dp : int
            The replica.

        Returns
        -------
        Group
        """
        from ..groups import Group

        return Group(self, name, manifest, dp)

    def status(self) -> dict[str, Any]:
        """Ask what the keeper holds.

        Returns
        -------
        dict
            The summary's keys, and "parts": a list of dicts with part_id, group, rank, state, sizes in bytes, counts of slots, sessions.
        """
        parts: list[dict[str, Any]] = []
        summary: dict[str, Any] = {}
        first = 0
        while first >= 0:
            page, _ = self._request(lambda serial, first=first: protocol.GetStatus(serial=serial, first=first))
            summary = page.summary
            parts += page.parts
            first = page.next
        return {**summary, "parts": parts}

    def release(self, part_id: bytes | None = None) -> int:
        """Give back the memory of a part that has no worker; None: of all such parts.

        Returns
        -------
        int
            Parts released.

        Raises
        ------
        BusyError
            The part has a worker.
        InvalidHandleError
            No such part.
        """
        done, _ = self._request(lambda serial: protocol.Release(serial=serial, part_id=part_id or b""))
        return int(done.value)

    def _readiness(self, group: str, dp: int, wait_s: float) -> protocol.ReadinessReply:
        reply, _ = self._request(
            lambda serial: protocol.GetReadiness(serial=serial, group=group, dp=dp, wait_s=wait_s),
            timeout=self._timeout + wait_s,
        )
        return reply

    def close(self) -> None:
        """Close its parts and the connection; closing again does nothing.

        Raises
        ------
        BusyError
            A view of a part is still used; that part and the connection stay open.
        """
        if self._closed:
            return
        self._check()
        for part in list(self._parts):
            part.close()
        with self._lock:
            self._closed = True
            if self._sock is not None:
                self._sock.close()
                self._sock = None

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except KVReuseError as second:
            if error is None:
                raise
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"closing the keeper's connection failed too: {second}")

    def __del__(self) -> None:
        # Sessions of parts that live on resume nowhere: the process's end ends them.
        sock = getattr(self, "_sock", None)
        if sock is not None and self._pid == os.getpid():
            sock.close()


def _refused(reply: protocol.Refused) -> AttachRefusedError:
    from ..parts import Outcome, OutcomeKind

    who = f" (pid {reply.pid})" if reply.pid else ""
    return AttachRefusedError(
        f"the keeper refused the attach: {reply.reason}{who}",
        status=-16,
        name="ATTACH_REFUSED",
        outcome=Outcome(OutcomeKind.REFUSED, 0, reply.reason),
        pid=reply.pid or None,
    )


__all__ = ["Attachment", "Keeper", "ProtocolError", "connect", "default_path"]
