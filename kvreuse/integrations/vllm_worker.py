"""The worker's side of the vLLM connector: it is the writer of its rank's part, and copies blocks in and out.

Loads run between steps: vLLM schedules a request only when its blocks are all there, so no layer ever waits for one,
and a block that could not be loaded is known before its request runs. Stores run on while the next steps run; vLLM
frees blocks that a store reads only when it has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from ..copies import Operation
from ..errors import AttachRefusedError, KVReuseError, NoSpaceError, StaleEpochError
from ..keeper.client import Keeper, connect
from ..parts import Part
from . import vllm_manifest
from .vllm_messages import Attached, Load, Plan, Report

# Of vLLM's family, so that its log shows it.
logger = init_logger("vllm.kvreuse")

DEFAULT_GROUP = "vllm"
# A worker that was killed a moment ago may still be being torn down, and its orphaned ranks take a while to end.
ATTACH_TIMEOUT_S = 60.0
ATTACH_PAUSE_S = 0.2
COPY_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
# A step without a forward waits so long for a copy, instead of spinning.
IDLE_WAIT_S = 0.02


@dataclasses.dataclass
class _Loading:
    load: Load
    operation: Operation
    count: int  # blocks of it that the operation loads; the others have failed
    is_second: bool = False


@dataclasses.dataclass
class _Storing:
    number: int
    operation: Operation | None
    touch: list[list[bytes]]


class WorkerSide:
    """One worker's connector."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config = vllm_config
        self._cache_config = kv_cache_config
        self._extra = vllm_manifest.extra_config(vllm_config)
        self._reason = "not attached"
        self._keeper: Keeper | None = None
        self._part: Part | None = None
        self._layout: vllm_manifest.Layout | None = None
        self._manifest: dict[str, Any] | None = None
        self._rank = 0
        self._loading: dict[str, _Loading] = {}
        self._storing: deque[_Storing] = deque()
        self._held: dict[str, int] = {}
        self._recved: set[str] = set()
        self._failed: set[int] = set()
        self._stored = 0
        self._is_idle = False
        self._told: set[str] = set()

    # ---- the part ----

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Attach as the writer of this rank's part."""
        spec = self._cache_config.kv_cache_groups[0].kv_cache_spec
        self._layout = vllm_manifest.engine_layout(kv_caches, self._cache_config.num_blocks, spec.page_size_bytes)
        manifest = vllm_manifest.build(self._config, self._cache_config, self._layout)
        rank = vllm_manifest.rank(self._config, get_tensor_model_parallel_rank())
        self._rank = rank.index(manifest.topology)
        self._manifest = manifest.to_dict()
        blocks = int(self._extra.get("blocks") or self._cache_config.num_blocks)
        group = self._extra.get("group", DEFAULT_GROUP)
        try:
            self._keeper = connect(self._extra.get("socket"))
            if not self._keeper.profile.reuse.enabled:
                self._turn_off(self._keeper.profile.reuse_reason())
                return
            deadline = time.monotonic() + float(self._extra.get("attach_timeout", ATTACH_TIMEOUT_S))
            while True:
                try:
                    self._part = self._keeper.attach(manifest, rank, blocks=blocks, group=group)
                    break
                except AttachRefusedError as error:
                    if error.pid is None or time.monotonic() > deadline:
                        raise
                    time.sleep(ATTACH_PAUSE_S)
        except (KVReuseError, OSError) as error:
            self._turn_off(str(error))
            return
        self._reason = ""
        _watch_weights(self)
        logger.info("kvreuse: rank %d of group %r: %s", self._rank, group, self._part.outcome)

    def attached(self) -> Attached:
        """Say how it ended."""
        outcome = "" if self._part is None else str(self._part.outcome)
        return Attached(self._manifest, outcome, self._reason)

    def weights_changed(self) -> None:
        """Empty the part, and stay off: the manifest names the weights that were loaded first (I4)."""
        if self._reason:
            return
        self._turn_off("the weights were updated at run time: restart vLLM to use the cache again")
        assert self._part is not None
        self._part.clear()

    def _turn_off(self, reason: str) -> None:
        self._reason = reason
        logger.warning("kvreuse: rank %d neither loads nor stores: %s", self._rank, reason)

    def _trouble(self, what: str, error: KVReuseError) -> None:
        if isinstance(error, StaleEpochError):
            self._turn_off(str(error))
        elif (kind := f"{what} {type(error).__name__}") not in self._told:
            self._told.add(kind)
            logger.warning("kvreuse: rank %d: %s: %s (told once)", self._rank, what, error)

    # ---- a step ----

    def before_forward(self, plan: Plan) -> None:
        """Wait for stores whose blocks are going to be written."""
        self._wait_stores(plan.wait_for)

    def start_loads(self, plan: Plan, is_idle: bool) -> None:
        """Start what the plan has to load."""
        self._is_idle = is_idle
        for load in plan.loads:
            self._start_load(load)

    def _start_load(self, load: Load) -> None:
        if self._part is None or self._reason:
            self._fail(load, 0)
            return
        assert self._layout is not None
        try:
            with self._part.adopt(load.tickets[self._rank]) as claim:
                count = min(len(claim), len(load.blocks))
                operation = self._part.load(claim, self._layout.blocks, load.blocks[:count])
        except KVReuseError as error:
            self._trouble("a load", error)
            self._fail(load, 0)
            return
        self._loading[load.request_id] = _Loading(load, operation, count)

    def _fail(self, load: Load, count: int) -> None:
        """End a load of which the first `count` blocks are there."""
        self._failed.update(load.blocks[count:])
        self._recved.add(load.request_id)

    def start_store(self, plan: Plan) -> None:
        """Start what the plan has to store; the forward has ended."""
        self._held.update(plan.held)
        if not plan.store:
            return
        operation = None
        if self._part is not None and not self._reason and plan.keys:
            try:
                operation = self._store(plan.keys, plan.blocks)
            except KVReuseError as error:
                self._trouble("a store", error)
        self._storing.append(_Storing(plan.store, operation, plan.touch))

    def _store(self, keys: list[bytes], blocks: list[int]) -> Operation | None:
        assert self._part is not None
        assert self._layout is not None
        try:
            return self._part.store(keys, self._layout.blocks, blocks, evict=True)
        except NoSpaceError as error:
            # The rest of the part is claimed, or it is smaller than this batch: heads of chains first.
            count = int(error.free + error.evictable)
            if not 0 < count < len(keys):
                raise
            return self._part.store(keys[:count], self._layout.blocks, blocks[:count], evict=True)

    def finished(self) -> tuple[set[str], set[str]]:
        """List requests whose blocks no store reads any more, and requests whose load has ended, each once."""
        if self._is_idle:
            self._wait_a_moment()
        self._end_loads()
        self._end_stores()
        sent = {request_id for request_id, number in self._held.items() if number <= self._stored}
        for request_id in sent:
            del self._held[request_id]
        recved, self._recved = self._recved, set()
        return sent, recved

    def failed_blocks(self) -> set[int]:
        """List the engine's blocks that could not be loaded, each once."""
        failed, self._failed = self._failed, set()
        return failed

    def report(self) -> Report:
        """Tell the scheduler how far it is."""
        return Report(self._stored, self._reason)

    def _wait_a_moment(self) -> None:
        waited = next(iter(self._loading.values()), None)
        operation = waited.operation if waited else self._storing[0].operation if self._storing else None
        if operation is not None:
            with contextlib.suppress(TimeoutError):
                operation.wait(IDLE_WAIT_S)

    def _end_loads(self) -> None:
        for loading in list(self._loading.values()):
            if not loading.operation.poll().is_final:
                continue
            del self._loading[loading.load.request_id]
            error = loading.operation.error
            if error is None:
                self._fail(loading.load, loading.count)
            else:
                self._trouble("a load", error)
                self._load_again(loading)

    def _load_again(self, loading: _Loading) -> None:
        """Take out what is damaged, and load what comes before it, once."""
        load = loading.load
        if self._part is None or self._reason or loading.is_second:
            self._fail(load, 0)
            return
        assert self._layout is not None
        try:
            self._part.verify(load.keys)
            with self._part.claim(load.keys) as claim:
                count = len(claim)
                operation = self._part.load(claim, self._layout.blocks, load.blocks[:count])
        except KVReuseError as error:
            self._trouble("a load", error)
            self._fail(load, 0)
            return
        self._loading[load.request_id] = _Loading(load, operation, count, is_second=True)

    def _end_stores(self) -> None:
        while self._storing:
            storing = self._storing[0]
            if storing.operation is not None and not storing.operation.poll().is_final:
                return
            self._storing.popleft()
            self._stored = storing.number
            if storing.operation is None or self._part is None or self._reason:
                continue
            if storing.operation.error is not None:
                self._trouble("a store", storing.operation.error)
            try:
                for keys in storing.touch:
                    self._part.touch(keys)
            except KVReuseError as error:
                self._trouble("a touch", error)

    def _wait_stores(self, number: int) -> None:
        """Wait until no store up to `number` reads the engine's blocks. An error here ends the worker, rightly."""
        for storing in self._storing:
            if storing.number <= number and storing.operation is not None:
                storing.operation.wait(COPY_TIMEOUT_S)

    def close(self) -> None:
        """Wait a moment for copies, and say goodbye: the blocks stay for the next worker (O6)."""
        self._reason = self._reason or "closed"
        operations = [loading.operation for loading in self._loading.values()]
        operations += [storing.operation for storing in self._storing if storing.operation is not None]
        _wait_all(operations, CLOSE_TIMEOUT_S)
        self._loading.clear()
        self._storing.clear()
        keeper, self._keeper, self._part = self._keeper, None, None
        if keeper is not None:
            try:
                keeper.close()
            except KVReuseError as error:
                logger.warning("kvreuse: rank %d was not closed: %s", self._rank, error)


def _wait_all(operations: Iterable[Operation], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for operation in operations:
        with contextlib.suppress(TimeoutError):
            operation.wait(max(0.0, deadline - time.monotonic()))


# ---- weights at run time ----

_WEIGHT_CALLS = ("reload_weights", "start_weight_update", "update_weights")
_watching: weakref.WeakSet[WorkerSide] = weakref.WeakSet()
_watched: set[str] = set()


def _watch_weights(side: WorkerSide) -> None:
    """Let `side` know before a call of vLLM's worker changes the weights: vLLM tells connectors nothing of it."""
    _watching.add(side)
    for name in _WEIGHT_CALLS:
        original = getattr(Worker, name, None)
        if original is not None and name not in _watched:
            _watched.add(name)
            setattr(Worker, name, _told_of(original))


def _told_of(original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        for side in list(_watching):
            side.weights_changed()
        return original(*args, **kwargs)

    return call
