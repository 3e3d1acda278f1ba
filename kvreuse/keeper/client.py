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
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from .. import _api, _select, _status, _version
from .._context import Context
from ..errors import (
    AttachRefusedError,
    DriverError,
    ForkedError,
    IncompatibleError,
    KeeperUnavailableError,
    KindMismatchError,
    KVReuseError,
    ProtocolError,
    RangeError,
    SizeMismatchError,
)
from ..handles import HandleKind, open_provider
from ..profile import Profile
from . import holders, processes, protocol

if TYPE_CHECKING:
    from ..groups import Group
    from ..handles import Region
    from ..manifest import Manifest, Rank
    from ..parts import Part

DEFAULT_TIMEOUT_S = 5.0
LEAVE_S = 1.0


# What a driver answers to memory that it can never use here: another device, a lost one, damage. Lack of fds or memory
# is not among them: that passes.
def _is_for_good(error: BaseException) -> bool:
    if isinstance(error, DriverError):
        return error.call == "cuMemImportFromShareableHandle"
    return isinstance(error, (IncompatibleError, KindMismatchError, SizeMismatchError))


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
    provider: str


def default_path() -> str:
    """Return where a keeper is looked for when no path is given: see `connect`."""
    if os.environ.get("KVREUSE_SOCKET"):
        return os.environ["KVREUSE_SOCKET"]
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(folder or "/run", "kvreuse", "keeper.sock")


def connect(path: str | os.PathLike[str] | None = None, timeout: float = DEFAULT_TIMEOUT_S) -> Keeper:
    """Connect to a keeper.

    Parameters
    ----------
    path : path, optional
        The keeper's socket; default: $KVREUSE_SOCKET, then $XDG_RUNTIME_DIR/kvreuse/keeper.sock, then
        /run/kvreuse/keeper.sock.
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
    RangeError
        The path is longer than a socket's can be (107 bytes).
    """
    return Keeper(os.fspath(path) if path is not None else default_path(), timeout)


def _unavailable(path: str, why: str) -> KeeperUnavailableError:
    return KeeperUnavailableError(
        f"no keeper answers on {path}: {why}; start one with `kvreuse keeper --socket {path}`",
        status=-17,
        name="KEEPER_UNAVAILABLE",
    )


class Keeper(Context):
    """A connection to the keeper; usable from any thread. If it is cut, the next call reconnects and resumes sessions.

    Attributes
    ----------
    path : str
        The keeper's socket.
    profile : Profile
        The keeper's.
    incarnation : int
        Of the keeper that answered last; another number is another keeper.
    """

    def __init__(self, path: str, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        self._sock: socket.socket | None = None
        self._pid = os.getpid()
        self.path = path
        self._timeout = timeout
        self._lock = threading.Lock()
        self._owner = 0  # ident of the thread that holds the lock
        self._serial = 0
        self._closed = False
        # Under the lock: attach ids of the sessions that are held, and of those whose goodbye did not reach the keeper.
        self._attached: dict[int, bytes] = {}
        self._leaving: set[bytes] = set()
        self._parts: weakref.WeakSet[Part] = weakref.WeakSet()
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self.incarnation = 0
        self.profile = Profile.off()
        size = len(os.fsencode(path))
        if size > protocol.SOCKET_PATH_NBYTES:
            raise RangeError(
                f"the socket path has {size} bytes, at most {protocol.SOCKET_PATH_NBYTES} fit: {path}",
                status=-6,
                name="RANGE",
            )
        deadline = time.monotonic() + timeout
        with self._locked(deadline):
            self._connect(deadline)

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
            if uid not in (os.geteuid(), 0):
                raise _status.make_text(
                    -8, f"the keeper on {self.path} runs as uid {uid}: expected uid {os.geteuid()} or 0"
                )
            self._sock = sock
            hello = protocol.Hello(
                serial=self._next(), abi=_api.ABI_VERSION, backend=_select.backend_name, version=_version.__version__
            )
            welcome, _ = self._exchange(hello, (), deadline)
            if welcome.abi != _api.ABI_VERSION:
                raise IncompatibleError(
                    f"the keeper has ABI version {welcome.abi}, this worker {_api.ABI_VERSION}: install one kvreuse",
                    status=-15,
                    name="INCOMPATIBLE",
                    fields={"abi": (_api.ABI_VERSION, welcome.abi)},
                )
            declared = welcome.profile
            self.profile = Profile.off() if declared is None else Profile.from_dict(declared, "the keeper's profile")
            self.incarnation = welcome.incarnation
            for session, attach_id in list(self._attached.items()):
                self._resume(session, attach_id, deadline)
            self._say_goodbyes(deadline)
        except BaseException:
            self._cut()
            sock.close()
            raise

    def _resume(self, session: int, attach_id: bytes, deadline: float) -> None:
        try:
            self._exchange(protocol.Resume(serial=self._next(), session=session, attach_id=attach_id), (), deadline)
        except KeeperUnavailableError:
            raise
        except KVReuseError:
            del self._attached[session]  # another keeper, or the part was retired: its part's calls say so

    def _say_goodbyes(self, deadline: float) -> None:
        for attach_id in list(self._leaving):
            try:
                self._exchange(protocol.Goodbye(serial=self._next(), attach_id=attach_id), (), deadline)
            except KVReuseError:
                if self._sock is None:
                    raise
            self._leaving.discard(attach_id)

    def _cut(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    def _exchange(self, message: Any, fds: Sequence[int], deadline: float) -> tuple[Any, list[int]]:
        """Send one request, and wait for its reply and the fds of it."""
        sock = self._sock
        assert sock is not None
        try:
            self._wait(sock, select.POLLOUT, deadline)
            # The keeper may have said why before it closed.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                protocol.send(sock, message, fds)
            while True:
                reply, received = self._receive(sock, deadline)
                if reply.serial in (message.serial, 0):
                    break
                protocol.close_fds(received)  # what is left of an attach that failed midway
        except OSError as error:
            self._cut()
            if isinstance(error, KVReuseError):
                raise
            raise _unavailable(self.path, error.strerror or str(error)) from error
        if isinstance(reply, protocol.Failed):
            protocol.close_fds(received)
            protocol.raise_failed(reply)
        return reply, received

    def _receive(self, sock: socket.socket, deadline: float) -> tuple[Any, list[int]]:
        self._wait(sock, select.POLLIN, deadline)
        try:
            got = protocol.recv_reply(sock, protocol.FDS_MAX)
        except ProtocolError as error:
            if not getattr(error, "usable", False):
                self._cut()
            raise
        if got is None:
            raise ConnectionResetError("the keeper closed the connection")
        return got

    def _wait(self, sock: socket.socket, event: int, deadline: float) -> None:
        if sock.fileno() < 0:  # at the interpreter's exit things are closed in any order
            raise ConnectionResetError("the connection was closed")
        poll = select.poll()
        poll.register(sock, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise _unavailable(self.path, f"it did not answer within {self._timeout} s")

    @contextlib.contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise _status.make_text(-23, "another thread's call to the keeper did not end in time: connect once more")
        self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = 0
            self._lock.release()

    def _request(
        self, make: Callable[[int], Any], fds: Sequence[int] = (), timeout: float | None = None
    ) -> tuple[Any, list[int]]:
        self._check()
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        with self._locked(deadline):
            return self._request_locked(make, fds, deadline)

    def _request_locked(self, make: Callable[[int], Any], fds: Sequence[int], deadline: float) -> tuple[Any, list[int]]:
        fresh = self._sock is None
        if fresh:
            self._connect(deadline)
        try:
            self._say_goodbyes(deadline)
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
            "host", or "cuda:N": the data is device memory, which this worker allocates (or gives as `regions`) and
            donates as fds; the keeper holds them without CUDA.
        regions : sequence of Region, optional
            Data memory of the caller's instead of the keeper's, ceil(blocks / len(regions)) slots in each. The part
            holds it on its own: they may be closed afterwards. Not used where a part is restored.
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
        IncompatibleError
            Another rank's worker, which is alive, has its memory of another provider.
        KeeperUnavailableError
            The keeper did not answer in time.
        """
        from ..parts import Part

        self._check()
        count = _status.as_integer(blocks, "blocks")
        attach_id = secrets.token_bytes(16)
        donated = list(regions or ())
        is_device = provider != "host"
        for region in donated:
            if region.kind is not HandleKind.POSIX_FD:
                # R1, K4: a fabric handle pins nothing, so nothing would be retained.
                raise _refused(
                    protocol.Refused(serial=0, reason=f"a region of kind {region.kind.name} cannot be retained", pid=0)
                )
            if region.provider.partition(":")[0] != provider.partition(":")[0]:
                raise _status.make_text(-15, f"a region of provider {region.provider} in a part of provider {provider}")
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
                donate=len(donated) or int(is_device),
            )

        with self._locked(deadline):
            fds: list[int] = []
            records: list[protocol.Record] = []
            own: list[Region] = []
            try:
                reply, fds = self._request_locked(request, (), deadline)
                if isinstance(reply, protocol.NeedRegions):
                    if is_device and not donated:
                        own.append(open_provider(provider).allocate(reply.nbytes[0]))
                    reply, fds = self._donate(reply, donated or own, deadline)
                if isinstance(reply, protocol.Refused):
                    raise _refused(reply)
                if not isinstance(reply, protocol.Attached):
                    raise protocol.protocol_error(f"expected an answer to Attach, got {type(reply).__name__}")
                records += reply.records
                self._receive_more(reply, fds, records, deadline)
            except BaseException as error:
                protocol.close_fds(fds)
                if not isinstance(error, AttachRefusedError):
                    self._leave(attach_id, deadline)
                raise
            finally:
                for region in own:  # the part imports it from the fd that the keeper holds
                    region.close()
            self._attached[reply.session] = attach_id
        attachment = self._attachment(reply, attach_id, fds, records, provider)
        try:
            part = Part._open(attachment, manifest, rank)
        except BaseException as error:
            with contextlib.suppress(KVReuseError):
                self._goodbye(attachment.part_id, attachment.session)
            if not (is_device and attachment.offered == "RESTORED" and _is_for_good(error)):
                raise
            # R2: the driver does not take the retained memory, and will not at the next try either: begin anew.
            reason = protocol.clip(f"restore failed: {error}", 2048)
        else:
            self._parts.add(part)
            return part
        self._release(protocol.Release(serial=0, part_id=attachment.part_id, reason=reason))
        # The keeper tells the reason with the new, empty part.
        left = max(0.0, deadline - time.monotonic())
        return self.attach(manifest, rank, blocks=blocks, group=group, provider=provider, regions=regions, timeout=left)

    def _donate(self, need: protocol.NeedRegions, regions: list[Region], deadline: float) -> tuple[Any, list[int]]:
        reply: Any = need
        fds: list[int] = []
        for index, (region, nbytes) in enumerate(zip(regions, need.nbytes, strict=True)):
            if region.nbytes < nbytes:
                raise _status.make_text(-5, f"region {index} has {region.nbytes} bytes: the part needs {nbytes} there")
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

    def _attachment(
        self, reply: protocol.Attached, attach_id: bytes, fds: list[int], records: list[protocol.Record], provider: str
    ) -> Attachment:
        return Attachment(
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
            records=records,
            blocks=reply.blocks,
            block_bytes=reply.block_bytes,
            lock_wait_ns=reply.lock_wait_ns,
            reuse_enabled=reply.reuse_enabled,
            reuse_reason=reply.reuse_reason,
            checksum=reply.checksum,
            provider=provider,
        )

    def _open(self, group: str, dp: int, index: int, data: bool) -> Attachment:
        """Open a session as a reader of a rank's part. Raises AttachRefusedError: there is none, or it is full."""
        self._check()
        attach_id = secrets.token_bytes(16)
        deadline = time.monotonic() + self._timeout
        with self._locked(deadline):
            fds: list[int] = []
            records: list[protocol.Record] = []
            try:
                reply, fds = self._request_locked(
                    lambda serial: protocol.Open(
                        serial=serial, attach_id=attach_id, group=group, dp=dp, index=index, data=data
                    ),
                    (),
                    deadline,
                )
                if isinstance(reply, protocol.Refused):
                    raise _refused(reply)
                if not isinstance(reply, protocol.Attached):
                    raise protocol.protocol_error(f"expected an answer to Open, got {type(reply).__name__}")
                records += reply.records
                self._receive_more(reply, fds, records, deadline, least=3)
            except BaseException as error:
                protocol.close_fds(fds)
                if not isinstance(error, AttachRefusedError):
                    self._leave(attach_id, deadline)
                raise
            self._attached[reply.session] = attach_id
        return self._attachment(reply, attach_id, fds, records, "")

    def _receive_more(
        self,
        reply: protocol.Attached,
        fds: list[int],
        records: list[protocol.Record],
        deadline: float,
        least: int = 4,
    ) -> None:
        sock = self._sock
        assert sock is not None
        while len(fds) < reply.fd_count:
            try:
                more, received = self._receive(sock, deadline)
            except OSError as error:
                self._cut()
                if isinstance(error, KVReuseError):
                    raise
                raise _unavailable(self.path, error.strerror or str(error)) from error
            fds += received
            if not isinstance(more, protocol.MoreFds):
                break
            records += more.records
        if not least <= len(fds) == reply.fd_count == len(records) + 1:
            raise protocol.protocol_error(
                f"expected {reply.fd_count} fds for the part and {reply.fd_count - 1} records, "
                f"got {len(fds)} and {len(records)}",
                reply.fd_count,
                len(fds),
            )

    def _leave(self, attach_id: bytes, deadline: float) -> None:
        """End the session of an attach, now or as soon as the keeper answers again."""
        self._leaving.add(attach_id)
        if self._sock is not None:
            with contextlib.suppress(KVReuseError):
                # At the end of its time an attach has a moment more for this.
                self._say_goodbyes(max(deadline, time.monotonic() + LEAVE_S))

    def _confirm(self, part_id: bytes, session: int, kind: str, blocks: int, reason: str) -> None:
        def request(serial: int) -> protocol.Confirm:
            return protocol.Confirm(
                serial=serial, session=session, kind=kind, blocks=blocks, reason=protocol.clip(reason, 2048)
            )

        self._request(request)

    def _goodbye(self, part_id: bytes, session: int) -> None:
        self._check()
        if self._owner == threading.get_ident():
            # A part's finalizer runs in the middle of a call: the next call says it.
            self._leaving.add(self._attached.pop(session, b""))
            self._leaving.discard(b"")
            return
        deadline = time.monotonic() + self._timeout
        with self._locked(deadline):
            attach_id = self._attached.pop(session, None)
            if attach_id is None:
                return
            self._leaving.add(attach_id)
            self._request_locked(lambda serial: protocol.Goodbye(serial=serial, attach_id=attach_id), (), deadline)
            self._leaving.discard(attach_id)

    def group(
        self, name: str = "default", manifest: Manifest | None = None, dp: int = 0, *, read_data: bool = False
    ) -> Group:
        """Name a group: the parts of one data-parallel replica.

        Parameters
        ----------
        name : str
        manifest : Manifest, optional
            What this caller expects; where the group has another one it is not ready, and nothing hits.
        dp : int
            The replica.
        read_data : bool
            Get the parts' data for reading, too: for `GroupClaim.view`.

        Returns
        -------
        Group
            Owned by the caller: close it, or let the Keeper's close do it.
        """
        from ..groups import Group

        group = Group(self, name, manifest, dp, read_data)
        self._groups.add(group)
        return group

    def status(self, scan: bool = False) -> dict[str, Any]:
        """Ask what the keeper holds.

        Parameters
        ----------
        scan : bool
            Look through /proc, too, for other processes that hold memory which the keeper made (K5): forked children,
            say. Takes some milliseconds in this process.

        Returns
        -------
        dict
            The summary's keys, and "parts": a list of dicts with part_id, group, rank, state, sizes in bytes, counts of
            slots, and sessions. With `scan` "unattributed_bytes", and "unreadable_processes": another user's, whose
            memory is not in it.
        """
        parts: list[dict[str, Any]] = []
        summary: dict[str, Any] = {}
        first = 0
        while first >= 0:
            page = self._status_page(first)
            summary = page.summary
            parts += page.parts
            first = page.next
        status = {**summary, "parts": parts}
        if scan:
            found = holders.scan(status["label"])
            known = {status["pid"], *(pid for item in status["retired"] for pid in item["pids"])}
            known.update(session["pid"] for part in parts for session in part["sessions"])
            status["unattributed_bytes"] = found.nbytes_beside(known)
            status["unreadable_processes"] = found.unreadable
        return status

    def _status_page(self, first: int) -> protocol.StatusPage:
        page, _ = self._request(lambda serial: protocol.GetStatus(serial=serial, first=first))
        assert isinstance(page, protocol.StatusPage)
        return page

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
        return self._release(protocol.Release(serial=0, part_id=part_id or b""))

    def _release(self, message: protocol.Release) -> int:
        done, _ = self._request(lambda serial: msgspec.structs.replace(message, serial=serial))
        return int(done.value)

    def _progress(self, session: int, done: int, total: int) -> None:
        self._request(lambda serial: protocol.Progress(serial=serial, session=session, done=done, total=total))

    def _clear_group(self, group: str, dp: int, weights_id: str = "") -> protocol.Cleared:
        # The keeper itself waits for the parts' locks, within the profile's bound.
        reply, _ = self._request(
            lambda serial: protocol.ClearGroup(serial=serial, group=group, dp=dp, weights_id=weights_id),
            timeout=self._timeout + self.profile.table.lock_wait_s,
        )
        assert isinstance(reply, protocol.Cleared)
        return reply

    def _readiness(self, group: str, dp: int, wait_s: float) -> protocol.ReadinessReply:
        """Ask for all pages of a group's readiness; the first waits up to wait_s seconds until it is ready."""
        if wait_s > 0:
            # On a connection of its own: others' calls on this one do not wait for it.
            with Keeper(self.path, self._timeout) as waiter:
                first = waiter._readiness_page(group, dp, wait_s, 0)
        else:
            first = self._readiness_page(group, dp, 0.0, 0)
        ranks, page = list(first.ranks), first
        while page.next >= 0:
            page = self._readiness_page(group, dp, 0.0, page.next)
            ranks += page.ranks
        return msgspec.structs.replace(first, ranks=ranks, next=-1)

    def _readiness_page(self, group: str, dp: int, wait_s: float, first: int) -> protocol.ReadinessReply:
        reply, _ = self._request(
            lambda serial: protocol.GetReadiness(serial=serial, group=group, dp=dp, wait_s=wait_s, first=first),
            timeout=self._timeout + wait_s,
        )
        assert isinstance(reply, protocol.ReadinessReply)
        return reply

    def close(self) -> None:
        """Close its parts, its groups and the connection; closing again does nothing.

        Raises
        ------
        BusyError
            A view of a part is still used; that part and the connection stay open.
        """
        if self._closed:
            return
        self._check()
        for group in list(self._groups):
            group.close()
        for part in list(self._parts):
            part.close()
        with self._locked(time.monotonic() + self._timeout):
            if self._leaving:
                with contextlib.suppress(KVReuseError):
                    self._request_locked(lambda serial: protocol.GetStatus(serial=serial, first=0), (), self._soon())
            self._closed = True
            self._cut()

    def _soon(self) -> float:
        return time.monotonic() + LEAVE_S

    def __enter__(self) -> Keeper:
        return self

    def __del__(self) -> None:
        sock = getattr(self, "_sock", None)
        if sock is not None and self._pid == os.getpid():
            sock.close()
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=2, source=self)


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


__all__ = ["Attachment", "Keeper", "connect", "default_path"]
