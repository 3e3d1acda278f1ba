"""Hash schemes against golden values (vLLM's were run on vLLM itself, SGLang's follow its description)."""

from __future__ import annotations

import numpy as np
import pytest

import kvreuse
from kvreuse import hashing
from kvreuse.hashing import get_scheme

VLLM = {
    "vllm-none-hash": (
        "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
        "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749",
        "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c",
    ),
    "0": (
        "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
        "d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c",
        "fedd9e4abebebbe6f6cf96b682f08d316063fe2f22a5c552192dd62904fcccac",
    ),
}
SGLANG = (
    "5d85718ec594b982c252d0279e5966ffca33a5eaf2a455038d3ab331fde70cea",
    "4681c0107c38f402cd1bc30b0b09a65202dba31f98269d9d7f63f5e0dea6901a",
)


@pytest.mark.parametrize("seed", VLLM)
def test_vllm_golden_values(seed):
    scheme = get_scheme("vllm-sha256-cbor")
    root = scheme.root(seed)
    keys = scheme.block_keys(range(32), 16, root)
    assert (root.hex(), *(key.hex() for key in keys)) == VLLM[seed]


def test_sglang_golden_values():
    scheme = get_scheme("sglang-sha256")
    assert tuple(key.hex() for key in scheme.block_keys(range(32), 16, scheme.root())) == SGLANG
    with pytest.raises(kvreuse.NotSupportedError, match="seed"):
        scheme.root("x")
    with pytest.raises(kvreuse.NotSupportedError, match="extra"):
        scheme.block_keys(range(16), 16, b"", extra=("a",))


def test_only_full_blocks_have_keys():
    scheme = get_scheme("sglang-sha256")
    assert scheme.block_keys(range(15), 16, b"") == []
    assert len(scheme.block_keys(range(47), 16, b"")) == 2
    assert scheme.block_keys([], 16, b"") == []


def test_a_chain_depends_on_its_beginning_and_extras():
    scheme = get_scheme("vllm-sha256-cbor")
    root = scheme.root("s")
    plain = scheme.block_keys(range(48), 16, root)
    other = scheme.block_keys([1, *range(1, 48)], 16, root)
    salted = scheme.block_keys(range(48), 16, root, extra=("salt", 1, None, b"x"))
    assert len({*plain, *other, *salted}) == 9


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, True, None, "1"])
def test_tokens_are_u32(token):
    """H7"""
    with pytest.raises((kvreuse.RangeError, TypeError), match=r"tokens\[1\]"):
        get_scheme("sglang-sha256").block_keys([0, token], 2, b"")


def test_unknown_scheme_lists_the_known():
    with pytest.raises(kvreuse.NotSupportedError, match="sglang-sha256"):
        get_scheme("md5")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        # RFC 8949, appendix A.
        (0, "00"), (23, "17"), (24, "1818"), (255, "18ff"), (256, "190100"), (1000, "1903e8"), (65536, "1a00010000"),
        (1000000000000, "1b000000e8d4a51000"), (2**64 - 1, "1bffffffffffffffff"), (-1, "20"), (-1000, "3903e7"),
        (-(2**64), "3bffffffffffffffff"), (False, "f4"), (True, "f5"), (None, "f6"), (b"", "40"),
        (b"\1\2\3\4", "4401020304"), ("", "60"), ("\u00fc", "62c3bc"), ((), "80"), ((1, (2, 3)), "8201820203"),
        (tuple(range(1, 26)), "98190102030405060708090a0b0c0d0e0f101112131415161718181819"),
    ],
)  # fmt: skip
def test_cbor_is_canonical(value, text):
    """C11: the bytes that are hashed are fixed, not only their equality within a process."""
    assert hashing._cbor(value).hex() == text


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        (1.5, TypeError),
        ({"a": 1}, TypeError),
        ((1, {2}), TypeError),
        (2**64, kvreuse.RangeError),
        (-(2**64) - 1, kvreuse.RangeError),
    ],
)
def test_extra_keys_are_plain_values(extra, error):
    """H7"""
    scheme = get_scheme("vllm-sha256-cbor")
    with pytest.raises(error):
        scheme.block_keys(range(16), 16, scheme.root(), extra=extra)


@pytest.mark.parametrize(
    ("block_tokens", "error"),
    [
        (0, kvreuse.RangeError),
        (-1, kvreuse.RangeError),
        (2**31, kvreuse.RangeError),
        (True, TypeError),
        (1.0, TypeError),
    ],
)
def test_block_tokens_is_a_positive_integer(block_tokens, error):
    """H7"""
    with pytest.raises(error, match="block_tokens"):
        get_scheme("sglang-sha256").block_keys([1], block_tokens, b"")


def test_numpy_tokens_are_the_same_tokens():
    """H7: whatever their width."""
    scheme = get_scheme("vllm-sha256-cbor")
    plain = scheme.block_keys(range(32), 16, scheme.root())
    for dtype in (np.int32, np.uint8, np.int64):
        assert scheme.block_keys(np.arange(32, dtype=dtype), 16, scheme.root()) == plain


def test_block_size_and_prefix_are_part_of_a_chain():
    scheme = get_scheme("sglang-sha256")
    keys = scheme.block_keys(range(64), 16, b"")
    assert scheme.block_keys(range(50), 16, b"") == keys[:3]
    assert not set(scheme.block_keys(range(64), 32, b"")) & set(keys)
    # A chain goes on from its last key.
    assert scheme.block_keys(range(32, 64), 16, keys[1]) == keys[2:]
