"""vLLM's KV cache in a keeper's memory: after a crash or a restart vLLM finds its blocks again. See docs/vllm.md.

``kv_transfer_config`` names it: ``kv_connector="KVReuseConnector"``,
``kv_connector_module_path="kvreuse.integrations.vllm"``, ``kv_role="kv_both"``, ``kv_load_failure_policy="recompute"``,
and ``kv_connector_extra_config`` of {socket, group, blocks, weights_id, attach_timeout}, all of them optional. Keys are
vLLM's own block hashes. Needs ``kvreuse[vllm]``.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from . import vllm_manifest
from .vllm_messages import Attached, Plan, Report
from .vllm_scheduler import SchedulerSide
from .vllm_worker import WorkerSide


class KVReuseConnector(KVConnectorBase_V1):
    """The connector as vLLM makes it, once in the scheduler and once in each worker.

    Without a keeper, with a profile that does not enable reuse, or where the attach is refused, it loads nothing and
    stores nothing, and says so once; vLLM serves on.

    Raises
    ------
    NotSupportedError
        The configuration is one that it cannot vouch for; the text says what to change.
    RangeError
        An unknown key in kv_connector_extra_config.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        vllm_manifest.extra_config(vllm_config)
        vllm_manifest.refuse_unsupported(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config)

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler's side."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        """The worker's side."""
        assert self._worker is not None
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that was not stored is a miss later, no more."""
        return False

    def shutdown(self) -> None:
        """End the sessions; the blocks stay with the keeper."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # ---- the scheduler's ----

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take what the workers say of their attach."""
        self.scheduler.open(metadata)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Claim what is sealed on every rank; it is loaded between steps."""
        tokens = self.scheduler.match(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load into the request's blocks."""
        self.scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Plan a step."""
        return self.scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers tell."""
        self.scheduler.update(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; True while a store reads its blocks."""
        return self.scheduler.finished(request), None

    def reset_cache(self) -> bool | None:
        """Empty the cache on every rank."""
        return self.scheduler.clear()

    # ---- the worker's ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Attach to the part of this rank."""
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> Attached:
        """Tell the scheduler how the attach ended."""
        return self.worker.attached()

    def _plan(self) -> Plan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, Plan)
        return plan

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait for stores that read blocks which are free now."""
        assert isinstance(kv_connector_metadata, Plan)
        self.worker.before_forward(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the plan's loads; a step without a forward has time to wait for them."""
        self.worker.start_loads(self._plan(), is_idle=forward_context.attn_metadata is None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only when all of its blocks have been loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: all layers of a block are stored as one, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        """Start the plan's store; it goes on by itself."""
        self.worker.start_store(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """List what has ended since the last call."""
        return self.worker.finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """List blocks that could not be loaded; vLLM computes them."""
        return self.worker.failed_blocks()

    def build_connector_worker_meta(self) -> Report:
        """Tell the scheduler how far the stores are."""
        return self.worker.report()


__all__ = ["KVReuseConnector"]
