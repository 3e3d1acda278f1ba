"""Groups: the parts of one data-parallel replica, and whether all of its ranks are there (R4)."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .keeper.client import Keeper
    from .manifest import Manifest


@dataclasses.dataclass(frozen=True)
class RankReadiness:
    """One rank of a group: ready or why not; the pid of its worker, None if it has none."""

    ready: bool
    reason: str
    pid: int | None
    blocks: int


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
        """
        return self._ask(0.0)

    def wait_ready(self, timeout: float) -> Readiness:
        """Wait until the group is ready, at most `timeout` seconds.

        Returns
        -------
        Readiness
            As of the end of the wait: `ready` may be False.
        """
        deadline = time.monotonic() + timeout
        return self._ask(max(0.0, deadline - time.monotonic()))

    def _ask(self, wait_s: float) -> Readiness:
        reply = self._keeper._readiness(self.name, self.dp, wait_s)
        ranks = {
            rank["index"]: RankReadiness(rank["ready"], rank["reason"], rank["pid"] or None, rank["blocks"])
            for rank in reply.ranks
        }
        return Readiness(reply.ready, reply.reason, ranks)
