"""A Llama of random weights and its tokenizer, written to a folder: vLLM runs it with no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
BLOCK_TOKENS = 32  # CPU attention wants a multiple of 32


def environment(ranks: int = 1) -> dict[str, str]:
    """What vLLM needs here: no network, a small cache, a core for each rank."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in range(ranks)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }


def write(folder: Path, seed: int = 0, layers: int = LAYERS, heads: int = HEADS) -> str:
    """Write the model; another seed is other weights of the same shapes.

    Returns
    -------
    str
        The folder, for ``LLM(model=...)``.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=heads * HEAD_DIM,
        intermediate_size=2 * heads * HEAD_DIM,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.2,  # so large that the tokens it gives depend on the whole prompt
    )
    folder.mkdir(parents=True, exist_ok=True)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    _write_tokenizer(folder)
    return str(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def engine_arguments(model: str, **changes: Any) -> dict[str, Any]:
    """Arguments of ``LLM`` for a small engine; `changes` replace and add."""
    arguments = {
        "model": model,
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "max_model_len": 4096,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 2048,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    return {**arguments, **changes}
