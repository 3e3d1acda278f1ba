"""What the scheduler's and the workers' connectors tell one another: a Plan a step, equal for all ranks; Reports."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclasses.dataclass
class Attached(KVConnectorHandshakeMetadata):
    """How a worker's attach ended, for the scheduler. `reason` says why it neither loads nor stores; "" if it does."""

    manifest: dict[str, Any] | None
    outcome: str
    reason: str


@dataclasses.dataclass
class Load:
    """Blocks to load for one request: keys[i] into the engine's block blocks[i]. One ticket a rank, by Rank.index."""

    request_id: str
    tickets: list[bytes]
    keys: list[bytes]
    blocks: list[int]


@dataclasses.dataclass
class Plan(KVConnectorMetadata):
    """What the workers have to do in one step.

    Attributes
    ----------
    loads : list of Load
    store : int
        Number of the store, from 1; 0: nothing to store.
    keys, blocks :
        What to store: the engine's block of each key.
    touch : list of list of bytes
        Chains to make recent when the store has ended.
    held : list of (request id, store number)
        Requests that are over, and whose blocks vLLM keeps until the store has ended.
    wait_for : int
        Blocks that stores up to this number read are free now: wait for them before anything is written.
    """

    loads: list[Load] = dataclasses.field(default_factory=list)
    store: int = 0
    keys: list[bytes] = dataclasses.field(default_factory=list)
    blocks: list[int] = dataclasses.field(default_factory=list)
    touch: list[list[bytes]] = dataclasses.field(default_factory=list)
    held: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    wait_for: int = 0


@dataclasses.dataclass
class Report(KVConnectorWorkerMetadata):
    """What a worker tells in every step.

    Attributes
    ----------
    stored : int
        All stores up to this number have ended.
    reason : str
        Why it neither loads nor stores any more; "" if it does.
    """

    stored: int
    reason: str = ""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        """Take both: what has ended on every rank."""
        assert isinstance(other, Report)
        return Report(min(self.stored, other.stored), self.reason or other.reason)
