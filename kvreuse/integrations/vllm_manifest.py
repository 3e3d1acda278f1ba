"""What vLLM's configuration says about the bytes of its KV cache: refusals, weights, manifest (R3).

Written against vLLM 0.32. What is not known to be right there is refused with the reason, before anything is stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import vllm
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec

from .. import _status
from ..errors import NotSupportedError
from ..manifest import Manifest, Rank, Topology
from ..memory import EngineBlocks, Memory

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
EXTRA_KEYS = ("socket", "group", "blocks", "weights_id", "attach_timeout")
DIGEST_THREADS = 4
READ_NBYTES = 1 << 22
KEY_NBYTES = 32


class Layout(NamedTuple):
    """An engine's blocks: where they are, the segments of the manifest, and words for the order of bytes in a block."""

    blocks: EngineBlocks
    segments: tuple[tuple[str, int], ...]
    dtype: str
    words: str


def unsupported(text: str) -> NotSupportedError:
    """Build the error of a configuration that the connector does not take."""
    return NotSupportedError(f"KVReuseConnector: {text}", status=-7, name="NOT_SUPPORTED")


def extra_config(vllm_config: Any) -> dict[str, Any]:
    """Read kv_connector_extra_config; an unknown key is an error that names it (P2)."""
    extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
    for key in extra:
        if key not in EXTRA_KEYS:
            raise _status.make_text(
                -6, f"kv_connector_extra_config has the unknown key {key!r}: expected {', '.join(EXTRA_KEYS)}"
            )
    return extra


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise NotSupportedError where the connector could not vouch for the tokens; the text says what to change."""
    for is_wrong, text in _refusals(vllm_config, kv_cache_config):
        if is_wrong:
            raise unsupported(text)


def _refusals(vllm_config: Any, kv_cache_config: Any) -> Iterator[tuple[bool, str]]:
    transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    yield (
        transfer.kv_load_failure_policy != "recompute",
        "a block that cannot be loaded must be recomputed: set kv_load_failure_policy='recompute' "
        f"(it is {transfer.kv_load_failure_policy!r}, which fails the request)",
    )
    yield transfer.kv_role != "kv_both", f"kv_role must be 'kv_both', not {transfer.kv_role!r}"
    yield model.runner_type != "generate", f"models of runner type {model.runner_type!r} are not supported"
    yield model.is_multimodal_model, "multimodal models are not supported: callers may name media as they like"
    yield vllm_config.lora_config is not None, "LoRA is not supported: an adapter's name does not identify its weights"
    yield vllm_config.speculative_config is not None, "speculative decoding is not supported"
    for axis in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        yield getattr(parallel, axis) != 1, f"{axis} must be 1: it is {getattr(parallel, axis)}"
    groups = kv_cache_config.kv_cache_groups
    yield len(groups) != 1, f"hybrid models are not supported: the model has {len(groups)} KV cache groups, not one"
    spec = groups[0].kv_cache_spec
    yield type(spec) is not FullAttentionSpec, f"{type(spec).__name__} is not supported: expected FullAttentionSpec"
    yield spec.non_causal, "non-causal attention is not supported"
    yield (
        int(spec.kv_quant_mode) != 0,
        f"kv_cache_dtype {cache.cache_dtype!r} is not supported: its scales are not kept",
    )
    hashed = kv_cache_config.hash_block_size or cache.hash_block_size or spec.block_size
    yield hashed != spec.block_size, f"a block has {spec.block_size} tokens, a block hash covers {hashed}"
    algorithm = cache.prefix_caching_hash_algo
    yield (
        algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None,
        f"block hashes of {algorithm} start from a random root in every process: set "
        "--prefix-caching-hash-algo sha256_cbor, or PYTHONHASHSEED to the same value at every start",
    )


def hash_root(vllm_config: Any) -> bytes:
    """Return the root of all block hashes of this configuration: vLLM's NONE_HASH."""
    function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    root = bytes(function(kv_cache_utils.resolve_none_hash_seed(function)))
    if len(root) > KEY_NBYTES:
        raise unsupported(f"block hashes of {len(root)} bytes are not supported: at most {KEY_NBYTES}")
    return root


def engine_layout(kv_caches: dict[str, Any], num_blocks: int, page_nbytes: int) -> Layout:
    """Describe vLLM's KV cache tensors, one segment a layer: tensor.data_ptr() + block * stride.

    Parameters
    ----------
    kv_caches : dict of str to torch.Tensor of shape (num_blocks, heads, tokens, content)
        By layer; layers that share their cache give the same memory, which is one segment.
    num_blocks : int
    page_nbytes : int
        Bytes of one block in one layer.
    """
    segments: dict[str, tuple[Memory, int, int]] = {}
    seen: set[int] = set()
    words: set[str] = set()
    dtypes: set[str] = set()
    for name, tensor in kv_caches.items():
        if tensor.device.type != "cpu":
            raise unsupported(f"only the CPU backend has been run: layer {name} is on {tensor.device}")
        if tensor.ndim != 4 or tensor.shape[0] != num_blocks:
            raise unsupported(
                f"layer {name} has a KV cache of shape {tuple(tensor.shape)}: expected {num_blocks} blocks first, then "
                "heads, tokens, content"
            )
        stride = tensor.stride(0) * tensor.element_size()
        if not tensor[0].is_contiguous() or tensor[0].nbytes != page_nbytes or stride < page_nbytes:
            raise unsupported(
                f"layer {name}: a block of its KV cache is not one run of {page_nbytes} bytes: strides "
                f"{tensor.stride()}, {tensor[0].nbytes} bytes"
            )
        words.add("x".join(map(str, tensor.shape[1:])))
        dtypes.add(str(tensor.dtype))
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        nbytes = (num_blocks - 1) * stride + page_nbytes
        segments[name] = (Memory.from_address(tensor.data_ptr(), nbytes, tensor), 0, stride)
    if len(dtypes) != 1:
        raise unsupported(f"layers with KV caches of several dtypes are not supported: {', '.join(sorted(dtypes))}")
    sizes = tuple((name, page_nbytes) for name in segments)
    return Layout(EngineBlocks(segments), sizes, dtypes.pop(), "heads x tokens x (k, v): " + ", ".join(sorted(words)))


def build(vllm_config: Any, kv_cache_config: Any, layout: Layout) -> Manifest:
    """Make the manifest of a worker: what must be equal for its bytes to mean the same.

    A change in any field empties the cache, so what only may matter is in it too (vLLM's version, all of the model's
    configuration): better cold than wrong.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    algorithm = cache.prefix_caching_hash_algo
    extra: dict[str, Any] = {
        "revision": model.revision,
        "load_format": str(getattr(vllm_config.load_config.load_format, "value", vllm_config.load_config.load_format)),
        "model_config": model.compute_hash(),
        "model_dtype": str(model.dtype),
        "cache_dtype": cache.cache_dtype,
        "attention": _attention(vllm_config, kv_cache_config),
        "vllm": vllm.__version__,
        "machine": platform.machine(),
    }
    if not algorithm.endswith("_cbor"):  # these hash a pickle, which is Python's own
        extra["pickle"] = f"python {platform.python_version()}"
    return Manifest(
        model=model.model,
        weights_id=weights_id(vllm_config),
        dtype=layout.dtype,
        block_tokens=spec.block_size,
        block_bytes=sum(nbytes for _, nbytes in layout.segments),
        layers=len(layout.segments),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=spec.head_size,
        layout=f"{cache.kv_cache_layout} {layout.words}",
        hash_scheme=f"vllm-{algorithm.replace('_', '-')}",
        hash_root=hash_root(vllm_config).hex(),
        topology=Topology(
            tp=parallel.tensor_parallel_size, dp=max(parallel.data_parallel_size, parallel.data_parallel_index + 1)
        ),
        segments=layout.segments,
        extra=extra,
    )


def rank(vllm_config: Any, tp: int) -> Rank:
    """Name a worker's place."""
    return Rank(tp=tp, dp=vllm_config.parallel_config.data_parallel_index)


def _attention(vllm_config: Any, kv_cache_config: Any) -> str:
    """Name the backend of the layers and, on a CPU, the instruction set: it fixes the order of bytes in a block."""
    layers = vllm_config.compilation_config.static_forward_context
    found = set()
    for name in kv_cache_config.kv_cache_groups[0].layer_names:
        layer = layers[name]
        found.add(f"{layer.get_attn_backend().get_name()} {getattr(layer, 'isa', '')}".strip())
    return ", ".join(sorted(found))


# ---- weights ----


def weights_id(vllm_config: Any) -> str:
    """Identify the weights exactly: as declared, by the hub's commit, or by what is in the weight files.

    Raises
    ------
    NotSupportedError
        None of these is possible: names and shapes are no identity.
    """
    declared = extra_config(vllm_config).get("weights_id")
    if declared:
        return f"declared:{declared}"
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        raise unsupported("dummy weights have no identity: declare kv_connector_extra_config['weights_id']")
    folder = Path(getattr(model, "model_weights", "") or model.model)
    if folder.is_dir():
        commit = _hub_commit(folder)
        return f"commit:{commit}" if commit else f"sha256:{folder_digest(folder)}"
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit and re.fullmatch(r"[0-9a-f]{40}", commit):
        return f"commit:{commit}"
    raise unsupported(
        f"the weights of {model.model!r} cannot be identified: declare kv_connector_extra_config['weights_id'], "
        "or give the folder that they are in"
    )


def _hub_commit(folder: Path) -> str | None:
    """Return the commit of a folder of the hub's cache: .../models--NAME/snapshots/COMMIT."""
    found = folder.absolute()
    in_cache = found.parent.name == "snapshots" and found.parent.parent.name.startswith("models--")
    return found.name if in_cache and re.fullmatch(r"[0-9a-f]{40}", found.name) else None


def folder_digest(folder: Path) -> str:
    """Return the SHA-256, hex, of the names and contents of a folder's weight files.

    Digests of files are kept in $XDG_CACHE_HOME/kvreuse/weights.json by device, inode, size and times.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    if not files:
        raise unsupported(f"no weight files in {folder}: declare kv_connector_extra_config['weights_id']")
    cache = _DigestCache()
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        digests = list(pool.map(cache.digest, files))
    cache.save()
    whole = hashlib.sha256()
    for path, digest in zip(files, digests, strict=True):
        whole.update(json.dumps([str(path.relative_to(folder)), digest]).encode())
    return whole.hexdigest()


class _DigestCache:
    """Digests of files that did not change since; a cache that cannot be read or written is done without."""

    def __init__(self) -> None:
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        self.path = Path(root, "kvreuse", "weights.json")
        self._new: dict[str, str] = {}
        self._known: dict[str, str] = self._load()

    def _load(self) -> dict[str, str]:
        try:
            known = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def digest(self, path: Path) -> str:
        status = path.stat()
        key = ":".join(map(str, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)))
        found = self._known.get(key)
        if found is None:
            found = self._new[key] = _file_digest(path)
        return found

    def save(self) -> None:
        if not self._new:
            return
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({**self._load(), **self._new}))
            temporary.replace(self.path)
        except OSError:
            pass


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(READ_NBYTES):
            digest.update(data)
    return digest.hexdigest()
