"""Block hash schemes of engines: keys that mean the same in every process. Never Python's `hash()`, which differs."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

from . import _status
from .errors import NotSupportedError, RangeError


@dataclasses.dataclass(frozen=True)
class HashScheme:
    """A way to make the keys of a chain of token blocks.

    Attributes
    ----------
    name : str
        Goes into the manifest as hash_scheme.
    """

    name: str
    _root: Callable[[str], bytes]
    _next: Callable[[bytes, Sequence[int], Any], bytes]

    def root(self, seed: str = "") -> bytes:
        """Make the root of all chains from a seed text; goes into the manifest as hash_root."""
        return self._root(seed)

    def block_keys(self, tokens: Sequence[int], block_tokens: int, root: bytes, extra: Any = None) -> list[bytes]:
        """Make the keys of the full blocks of a prompt.

        Parameters
        ----------
        tokens : sequence of int
            Token ids, 0 to 2^32 - 1. Tokens after the last full block give no key.
        block_tokens : int
            Tokens a block.
        root : bytes
            What `root` made.
        extra : None, str, int, bytes or a tuple of them, optional
            Extra keys (LoRA, media, salt) of every block.

        Returns
        -------
        list of bytes
            32 bytes each.

        Raises
        ------
        RangeError, TypeError
            A token or block_tokens is no integer in range.
        NotSupportedError
            The scheme has no extra keys.
        """
        size = _status.as_integer(block_tokens, "block_tokens", 1, 2**31 - 1)
        ids = [_status.as_integer(token, f"tokens[{i}]", 0, 2**32 - 1) for i, token in enumerate(tokens)]
        keys, parent = [], root
        for start in range(0, len(ids) - size + 1, size):
            parent = self._next(parent, ids[start : start + size], extra)
            keys.append(parent)
        return keys


def _unsupported(text: str) -> NotSupportedError:
    return NotSupportedError(text, status=-7, name="NOT_SUPPORTED")


def _cbor_head(major: int, value: int) -> bytes:
    """Canonical CBOR (RFC 8949, 4.2): the shortest head."""
    if value < 24:
        return bytes([major << 5 | value])
    for code, form, limit in ((24, ">B", 1 << 8), (25, ">H", 1 << 16), (26, ">I", 1 << 32), (27, ">Q", 1 << 64)):
        if value < limit:
            return bytes([major << 5 | code]) + struct.pack(form, value)
    raise RangeError(f"an integer of a key must fit 64 bits: got {value}", status=-6, name="RANGE")


def _cbor(value: Any) -> bytes:
    if value is None:
        return b"\xf6"
    if isinstance(value, bool):
        return b"\xf5" if value else b"\xf4"
    if isinstance(value, int):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        data = value.encode()
        return _cbor_head(3, len(data)) + data
    if isinstance(value, (tuple, list)):
        return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))
    raise TypeError(f"an extra key must be None, bool, int, bytes, str or a tuple of them, not {type(value).__name__}")


def _vllm_root(seed: str) -> bytes:
    return hashlib.sha256(_cbor(seed)).digest()


def _vllm_next(parent: bytes, tokens: Sequence[int], extra: Any) -> bytes:
    return hashlib.sha256(_cbor((parent, tuple(tokens), extra))).digest()


def _sglang_root(seed: str) -> bytes:
    if seed:
        raise _unsupported("sglang-sha256 chains start from nothing: they have no seed")
    return b""


def _sglang_next(parent: bytes, tokens: Sequence[int], extra: Any) -> bytes:
    if extra is not None:
        raise _unsupported("sglang-sha256 has no extra keys")
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


_SCHEMES = {
    # vLLM --prefix-caching-hash-algo sha256_cbor: sha256 over canonical CBOR of (parent, tokens, extra keys).
    "vllm-sha256-cbor": HashScheme("vllm-sha256-cbor", _vllm_root, _vllm_next),
    # SGLang: sha256 of the parent's 32 bytes (none for the first block) and the tokens as u32 little-endian.
    "sglang-sha256": HashScheme("sglang-sha256", _sglang_root, _sglang_next),
}


def get_scheme(name: str) -> HashScheme:
    """Return the scheme of this name.

    Raises
    ------
    NotSupportedError
        Unknown; the text lists the known ones.
    """
    try:
        return _SCHEMES[name]
    except KeyError:
        raise _unsupported(f"hash scheme {name!r} is unknown: expected {', '.join(_SCHEMES)}") from None
