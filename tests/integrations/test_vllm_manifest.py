"""What the connector takes of vLLM's configuration, and what it refuses."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

import kvreuse

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

PAGE_NBYTES = 2 * 32 * 64 * 4


@pytest.fixture
def module():
    from kvreuse.integrations import vllm_manifest

    return vllm_manifest


@pytest.fixture
def configs():
    """``configs(**changes)`` gives (vllm_config, kv_cache_config) as far as the refusals look at them."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    def make(**changes):
        spec = changes.pop("spec", None) or FullAttentionSpec(
            block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, **changes.pop("spec_fields", {})
        )
        groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])] * changes.pop("groups", 1)
        kv_cache_config = SimpleNamespace(
            kv_cache_groups=groups, num_blocks=8, hash_block_size=changes.pop("hash_block_size", 32)
        )
        fields = {
            "kv_load_failure_policy": "recompute",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {},
            "runner_type": "generate",
            "is_multimodal_model": False,
            "cache_dtype": "auto",
            "prefix_caching_hash_algo": "sha256",
            "pipeline_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "lora_config": None,
            "speculative_config": None,
        }
        assert not set(changes) - set(fields)
        every = SimpleNamespace(**{**fields, **changes})
        vllm_config = SimpleNamespace(
            kv_transfer_config=every,
            model_config=every,
            cache_config=every,
            parallel_config=every,
            lora_config=every.lora_config,
            speculative_config=every.speculative_config,
        )
        return vllm_config, kv_cache_config

    return make


def test_supported_configuration_is_taken(module, configs):
    """R3: the guard of the tests below."""
    module.refuse_unsupported(*configs())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy='recompute'"),
        ({"kv_role": "kv_producer"}, "kv_role must be 'kv_both'"),
        ({"runner_type": "pooling"}, "runner type 'pooling'"),
        ({"is_multimodal_model": True}, "multimodal"),
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size must be 1"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size must be 1"),
        ({"groups": 2}, "2 KV cache groups"),
        ({"groups": 0}, "0 KV cache groups"),
        ({"spec_fields": {"non_causal": True}}, "non-causal"),
        ({"spec_fields": {"kv_quant_mode": 1}}, "kv_cache_dtype"),
        ({"hash_block_size": 16}, "a block hash covers 16"),
    ],
)
def test_unsupported_configuration_is_refused(module, configs, changes, text):
    """R3: what the connector cannot vouch for is refused with the reason, before anything is stored."""
    with pytest.raises(kvreuse.NotSupportedError, match=text):
        module.refuse_unsupported(*configs(**changes))


def test_sliding_window_is_refused(module, configs):
    """R3: its blocks are freed while the request runs."""
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)
    with pytest.raises(kvreuse.NotSupportedError, match="SlidingWindowSpec is not supported"):
        module.refuse_unsupported(*configs(spec=spec))


def test_random_hash_root_is_refused(module, configs, monkeypatch):
    """R3: keys that are others in every process find nothing; the text says which setting helps."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(kvreuse.NotSupportedError, match="sha256_cbor, or PYTHONHASHSEED"):
        module.refuse_unsupported(*configs(prefix_caching_hash_algo="xxhash"))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    module.refuse_unsupported(*configs(prefix_caching_hash_algo="xxhash"))


def test_unknown_extra_key_is_named(module, configs):
    """P2: a typing error must not silently be a default."""
    vllm_config, _ = configs(kv_connector_extra_config={"sockt": "/x"})
    with pytest.raises(kvreuse.RangeError, match="'sockt'"):
        module.extra_config(vllm_config)


def test_hash_root_is_vllms(module, configs, monkeypatch):
    """R3: the root in the manifest is the one that vLLM's scheduler hashes from; our own scheme agrees."""
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils

    from kvreuse.hashing import get_scheme

    vllm_config, _ = configs(prefix_caching_hash_algo="sha256_cbor")
    for seed, text in (("7", "7"), (None, "vllm-none-hash")):
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        kv_cache_utils.init_none_hash(sha256_cbor)
        assert module.hash_root(vllm_config) == kv_cache_utils.NONE_HASH
        assert module.hash_root(vllm_config) == get_scheme("vllm-sha256-cbor").root(text)


def test_layout_finds_every_block(module):
    """H7: block i of a layer lies at data_ptr + i * stride, also where that is not page-aligned and strided."""
    import torch

    raw = torch.arange(64 + 2 * 8 * PAGE_NBYTES, dtype=torch.int64).to(torch.uint8)
    caches = {}
    for layer in range(2):  # blocks of the two layers take turns
        flat = raw[64 + layer * PAGE_NBYTES :].as_strided((8, PAGE_NBYTES), (2 * PAGE_NBYTES, 1))
        caches[f"layer.{layer}"] = flat.view(torch.float32).view(8, 2, 32, 64)
    caches["shared"] = caches["layer.0"]
    layout = module.engine_layout(caches, 8, PAGE_NBYTES)
    assert layout.segments == (("layer.0", PAGE_NBYTES), ("layer.1", PAGE_NBYTES))
    assert layout.dtype == "torch.float32"
    words, memories = layout.blocks.words([(name, 0, nbytes) for name, nbytes in layout.segments])
    assert [memory.address for memory in memories] == [raw.data_ptr() + 64, raw.data_ptr() + 64 + PAGE_NBYTES]
    assert words[5:7] == [0, 2 * PAGE_NBYTES]
    block = np.frombuffer(memoryview(raw.numpy()), np.uint8)[64 + 5 * 2 * PAGE_NBYTES :][:PAGE_NBYTES]
    assert block.tobytes() == caches["layer.0"][5].numpy().tobytes()


@pytest.mark.parametrize("kind", ["few", "transposed", "dtypes", "page"])
def test_other_layout_is_refused(module, kind):
    """R3: a tensor that is not what this version gives is no memory to copy from."""
    import torch

    cache = torch.zeros(8, 2, 32, 64)
    page, caches = PAGE_NBYTES, {"a": cache}
    if kind == "few":
        caches = {"a": cache[:4]}
    elif kind == "transposed":
        caches = {"a": cache.transpose(1, 2)}
    elif kind == "dtypes":
        caches = {"a": cache, "b": torch.zeros(8, 2, 32, 128, dtype=torch.bfloat16)}
    else:
        page //= 2
    with pytest.raises(kvreuse.NotSupportedError):
        module.engine_layout(caches, 8, page)


# ---- weights ----


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A folder with two weight files; what is known of files is kept in tmp_path too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"a" * 1000)
    (folder / "b.safetensors").write_bytes(b"b" * 1000)
    (folder / "config.json").write_text("{}")
    return folder


def test_weights_digest_is_of_the_contents(module, weights):
    """I4: other contents, other names or one file more are other weights; a copy is the same ones."""
    import shutil

    first = module.folder_digest(weights)
    assert module.folder_digest(weights) == first
    assert module.folder_digest(shutil.copytree(weights, weights.parent / "copy")) == first
    (weights / "config.json").write_text("{ }")
    assert module.folder_digest(weights) == first
    (weights / "b.safetensors").write_bytes(b"b" * 999 + b"c")
    second = module.folder_digest(weights)
    (weights / "b.safetensors").rename(weights / "c.safetensors")
    third = module.folder_digest(weights)
    (weights / "d.bin").write_bytes(b"")
    assert len({first, second, third, module.folder_digest(weights)}) == 4


def test_weights_are_read_once(module, weights, monkeypatch):
    """I4: a restart reads no weights again; a file that was written to is read, whatever its name and size."""
    read = []
    digest = module._file_digest
    monkeypatch.setattr(module, "_file_digest", lambda path: read.append(path.name) or digest(path))
    first = module.folder_digest(weights)
    assert sorted(read) == ["a.safetensors", "b.safetensors"]
    assert module.folder_digest(weights) == first
    assert len(read) == 2
    status = (weights / "a.safetensors").stat()
    (weights / "a.safetensors").write_bytes(b"x" * 1000)
    os.utime(weights / "a.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert module.folder_digest(weights) != first
    assert read[2:] == ["a.safetensors"]


@pytest.mark.parametrize("content", [b"", b"no JSON", b"[]"])
def test_damaged_digest_file_is_done_without(module, weights, content):
    """I4: the file only saves time."""
    first = module.folder_digest(weights)
    (weights.parent / "cache" / "kvreuse" / "weights.json").write_bytes(content)
    assert module.folder_digest(weights) == first


def test_weights_id_is_never_a_name(module, weights):
    """I4: declared, or the hub's commit, or the contents; dummy and unknown weights are refused."""

    def config(model, load_format="auto", commit=None, **extra):
        return SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
            load_config=SimpleNamespace(load_format=load_format),
            model_config=SimpleNamespace(
                model=str(model), model_weights="", hf_config=SimpleNamespace(_commit_hash=commit)
            ),
        )

    commit = "0123456789abcdef0123456789abcdef01234567"
    assert module.weights_id(config(weights)) == f"sha256:{module.folder_digest(weights)}"
    assert module.weights_id(config(weights, weights_id="v7")) == "declared:v7"
    assert module.weights_id(config("org/name", commit=commit)) == f"commit:{commit}"
    snapshot = weights.parent / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    assert module.weights_id(config(snapshot)) == f"commit:{commit}"
    for refused in (config("org/name"), config("org/name", commit="main"), config(weights, "dummy")):
        with pytest.raises(kvreuse.NotSupportedError, match="weights_id"):
            module.weights_id(refused)
    with pytest.raises(kvreuse.NotSupportedError, match="no weight files"):
        module.weights_id(config(weights.parent / "cache"))
