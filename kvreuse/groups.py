"""Groups: the parts of one data-parallel replica, and whether all of its ranks are there (R4)."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from .errors import WaitTimeoutError
from .manifest import Manifest, compare, describe, incompatible

if TYPE_CHECKING:
    from .keeper.client import Keeper
    from .keeper.protocol import ReadinessReply

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
        Slots of its part, 0 if it has none.
    died_at, ready_at : float
        CLOCK_MONOTONIC seconds of this host: when its last worker was found gone (its pidfd fired) or said goodbye, and
        when the present one had its part open; 0.0 if that did not happen.
    """

    ready: bool
    reason: str
    pid: int | None
    blocks: int
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
    """

    ready: bool
    reason: str
    ranks: dict[int, RankReadiness]

    def __bool__(self) -> bool:
        return self.ready

    def __str__(self) -> str:
        return "ready" if self.ready else f"not ready: {self.reason}"


class Group:
    """The parts of one data-parallel replica. Made by Keeper.group; holds nothing."""

    def __init__(self, keeper: Keeper, name: str, manifest: Manifest | None, dp: int) -> None:
        self._keeper = keeper
        self.name = name
        self.dp = dp
        self.manifest = manifest

    def __repr__(self) -> str:
        return f"<kvreuse.Group {self.name!r} dp {self.dp}>"

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
                rank.ready, rank.reason, rank.pid or None, rank.blocks, rank.died_at, rank.ready_at
            )
            for rank in reply.ranks
        }
        differences = self._differences(reply)
        if differences:
            return Readiness(False, f"the group has another manifest: {describe(differences)}", ranks), reply
        return Readiness(reply.ready, reply.reason, ranks), reply

    def _differences(self, reply: ReadinessReply) -> dict[str, tuple[object, object]]:
        if self.manifest is None or reply.manifest is None:
            return {}
        # Whose rank's manifest the group was made with is not known: only what is equal over all of its ranks counts.
        kept = Manifest.from_dict(reply.manifest)
        return compare(kept, self.manifest, across_pp=kept.topology.pp > 1)
