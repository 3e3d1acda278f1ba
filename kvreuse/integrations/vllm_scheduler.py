"""The scheduler's side of the vLLM connector: a reader of the group, which claims for requests and plans the copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core import kv_cache_utils

from ..errors import KVReuseError
from ..groups import Group, GroupClaim
from ..keeper.client import Keeper, connect
from ..manifest import Manifest, Rank
from . import vllm_manifest
from .vllm_messages import Attached, Load, Plan, Report
from .vllm_worker import DEFAULT_GROUP

logger = init_logger("vllm.kvreuse")


@dataclasses.dataclass
class _Request:
    request: Any
    stored: int = 0  # leading blocks that were given to a store
    last_store: int = 0
    first: int = 0  # block at which the claim begins
    claim: GroupClaim | None = None  # held under the request's id as tag
    loading: list[int] | None = None  # the engine's blocks that workers fill
    has_failed: bool = False


class SchedulerSide:
    """The scheduler's connector."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config = vllm_config
        self._extra = vllm_manifest.extra_config(vllm_config)
        self._block_tokens: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._reason = "the workers have not attached"
        self._keeper: Keeper | None = None
        self._group: Group | None = None
        self._ranks: list[Rank] = []
        self._hash_root = ""
        self._requests: dict[str, _Request] = {}
        self._loads: list[Load] = []
        self._held: list[tuple[str, int]] = []
        self._keys_of_store: dict[int, list[bytes]] = {}
        self._storing: set[bytes] = set()
        self._store = 0
        self._stored = 0
        self._told: set[str] = set()

    # ---- the group ----

    def open(self, attached: Mapping[tuple[int, int], Any]) -> None:
        """Open the group whose parts the workers have; with one worker that is off, all is off."""
        workers = [worker for _, worker in sorted(attached.items()) if isinstance(worker, Attached)]
        why = next((worker.reason for worker in workers if worker.reason), "")
        if not workers or why:
            self._turn_off(why or "no worker has attached")
            return
        assert workers[0].manifest is not None
        manifest = Manifest.from_dict(workers[0].manifest)
        dp = self._config.parallel_config.data_parallel_index
        name = self._extra.get("group", DEFAULT_GROUP)
        self._ranks = list(manifest.topology.ranks(dp))
        self._hash_root = manifest.hash_root
        try:
            self._keeper = connect(self._extra.get("socket"))
            self._group = self._keeper.group(name, manifest, dp)
            found = self._group.readiness()
        except (KVReuseError, OSError) as error:
            self._turn_off(str(error))
            return
        self._reason = ""
        for rank, worker in zip(self._ranks, workers, strict=True):
            logger.info("kvreuse: group %r, tp rank %d: %s", name, rank.tp, worker.outcome)
        logger.info("kvreuse: group %r is %s; manifest %s", name, found, manifest.to_dict())

    def _turn_off(self, reason: str) -> None:
        if self._reason != reason:
            logger.warning("kvreuse: nothing is loaded and nothing is stored: %s", reason)
        self._reason = reason

    def _trouble(self, what: str, error: KVReuseError) -> None:
        if (kind := f"{what} {type(error).__name__}") not in self._told:
            self._told.add(kind)
            logger.warning("kvreuse: %s: %s (told once)", what, error)

    def _is_off(self) -> bool:
        if not self._reason and self._hash_root:
            # vLLM makes its root after the connectors.
            if kv_cache_utils.NONE_HASH.hex() != self._hash_root:
                self._turn_off("the scheduler's block hashes have another root than the workers' manifest")
            self._hash_root = ""
        return bool(self._reason)

    # ---- a request ----

    def match(self, request: Any, computed: int) -> int:
        """Claim what can be loaded beyond `computed` tokens; return its tokens.

        May be asked many times: a claim under a held tag replaces it.
        """
        entry = self._requests.setdefault(request.request_id, _Request(request))
        first, last = computed // self._block_tokens, (request.num_tokens - 1) // self._block_tokens
        keys = [bytes(key) for key in request.block_hashes[first:last]]
        if self._is_off() or entry.has_failed or request.skip_reading_prefix_cache or not keys:
            self._release(request.request_id, entry)
            return 0
        assert self._group is not None
        try:
            claim: GroupClaim = self._group.claim(keys, tag=request.request_id)
        except KVReuseError as error:
            self._trouble("a claim", error)
            self._release(request.request_id, entry)
            return 0
        entry.claim, entry.first = claim, first
        if not len(claim):
            self._release(request.request_id, entry)
        return len(claim) * self._block_tokens

    def allocated(self, request: Any, blocks: list[int], tokens: int) -> None:
        """Plan the load of `tokens` tokens into the request's blocks; 0: none, and what was claimed is let go."""
        entry = self._requests.setdefault(request.request_id, _Request(request))
        # New blocks, all of which are to be stored: what is there already costs a look.
        entry.stored = 0
        if tokens == 0 or entry.claim is None:
            self._release(request.request_id, entry)
            return
        count, first = tokens // self._block_tokens, entry.first
        keys = [bytes(key) for key in request.block_hashes[first : first + count]]
        entry.loading = blocks[first : first + count]
        tickets = [entry.claim.ticket(rank) for rank in self._ranks]
        self._loads.append(Load(request.request_id, tickets, keys, entry.loading))

    def _release(self, request_id: str, entry: _Request) -> None:
        if entry.claim is not None and entry.loading is None:
            entry.claim = None
            self._release_tag(request_id)

    def _release_tag(self, tag: str) -> None:
        if self._group is not None:
            try:
                self._group.release(tag)
            except KVReuseError as error:
                self._trouble("a release", error)

    def finished(self, request: Any) -> bool:
        """Forget a request; True: a store still reads its blocks."""
        entry = self._requests.pop(request.request_id, None)
        if entry is None:
            return False
        if entry.loading is not None:
            # vLLM itself keeps the blocks until the load has ended. No store reads them: the request has not run since
            # they were allocated, and stores of before were waited for when it was preempted.
            return False
        self._release(request.request_id, entry)
        if entry.last_store <= self._stored:
            return False
        self._held.append((request.request_id, entry.last_store))
        return True

    # ---- a step ----

    def plan(self, output: Any) -> Plan:
        """Plan a step's copies: one order for all ranks."""
        plan = Plan(loads=self._loads, held=self._held)
        self._loads, self._held = [], []
        for request_id in output.preempted_req_ids or ():
            entry = self._requests.get(request_id)
            if entry is not None:
                plan.wait_for = max(plan.wait_for, entry.last_store)
        if not self._is_off():
            self._plan_stores(plan, output)
        return plan

    def _plan_stores(self, plan: Plan, output: Any) -> None:
        number = self._store + 1
        for request_id, tokens in output.num_scheduled_tokens.items():
            entry = self._requests.get(request_id)
            if entry is None:
                continue
            hashes = entry.request.block_hashes
            full = min((entry.request.num_computed_tokens + tokens) // self._block_tokens, len(hashes))
            if full <= entry.stored:
                continue
            (blocks,) = output.kv_connector_block_state.get_block_ids(request_id)
            chain = [bytes(key) for key in hashes[:full]]
            for key, block in zip(chain[entry.stored :], blocks[entry.stored : full], strict=True):
                if key not in self._storing:
                    self._storing.add(key)
                    plan.keys.append(key)
                    plan.blocks.append(block)
                    entry.last_store = number
            entry.stored = full
            plan.touch.append(chain)
        if plan.touch:
            plan.store = self._store = number
            self._keys_of_store[number] = plan.keys

    def update(self, output: Any) -> None:
        """Take in what the workers tell."""
        for entry in self._requests.values():
            if entry.loading and output.invalid_block_ids and not output.invalid_block_ids.isdisjoint(entry.loading):
                entry.has_failed = True  # not asked for again: it would fail again
        for request_id in output.finished_recving or ():
            loaded = self._requests.get(request_id)
            if loaded is not None:
                loaded.claim = loaded.loading = None
            self._release_tag(request_id)
        report = output.kv_connector_worker_meta
        if isinstance(report, Report):
            for number in range(self._stored + 1, report.stored + 1):
                self._storing.difference_update(self._keys_of_store.pop(number, ()))
            self._stored = max(self._stored, report.stored)
            if report.reason and not self._reason:
                self._turn_off(report.reason)

    def clear(self) -> bool:
        """Empty the cache. A store that is on its way does not become content after it."""
        if self._group is None or self._reason:
            return True
        try:
            found = self._group.clear()
        except KVReuseError as error:
            self._trouble("a clear", error)
            return False
        logger.info("kvreuse: emptied: %d block(s)", found.removed)
        return True

    def close(self) -> None:
        """Say goodbye; claims end with it."""
        self._reason = self._reason or "closed"
        group, self._group = self._group, None
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            try:
                if group is not None:
                    group.close()
                keeper.close()
            except KVReuseError as error:
                logger.warning("kvreuse: the scheduler's connection was not closed: %s", error)
