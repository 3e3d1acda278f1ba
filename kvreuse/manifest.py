"""Manifest, Topology and Rank: what must be equal for cached bytes to mean the same (R3). Imports no numpy."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from . import _status
from .errors import IncompatibleError, RangeError

_DTYPES = {
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
# A manifest travels in one frame and is stored in the part.
MANIFEST_NBYTES_MAX = 32768


def _range_error(text: str) -> RangeError:
    return RangeError(text, status=-6, name="RANGE")


def _positive(value: Any, name: str, low: int = 1) -> int:
    number = _status.as_integer(value, name)
    if number < low:
        raise _range_error(f"{name} must be {low} or more: got {number}")
    return number


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    if not value.strip():
        raise _range_error(f"{name} must not be empty")
    return value


def normalise_dtype(value: Any) -> str:
    """Bring a dtype's name into one form: ``torch.bfloat16``, ``BF16`` and ``bfloat16`` are the same.

    Raises
    ------
    TypeError, RangeError
        No string; no name of a dtype.
    """
    name = _text(value, "dtype").strip().lower().removeprefix("torch.")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise _range_error(f"dtype {value!r} is no dtype's name: expected bfloat16, float16, float8_e4m3fn or the like")
    return _DTYPES.get(name, name)


def _known_fields(cls: type, data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise TypeError(f"a {cls.__name__} is made of a dict, not {type(data).__name__}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, 1)
            hint = f": did you mean {near[0]!r}?" if near else f": expected {', '.join(fields)}"
            raise _range_error(f"a {cls.__name__} has no field {key!r}{hint}")
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in data and not optional:
            raise _range_error(f"a {cls.__name__} needs the field {name!r}")
    return dict(data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Sizes of the parallel axes, in ranks.

    dp is part of a group's identity: each data-parallel replica is a group of its own; dp is no axis of readiness.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp", "dp"):
            object.__setattr__(self, axis, _positive(getattr(self, axis), f"topology.{axis}"))

    @property
    def size(self) -> int:
        """Ranks of one group: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    def ranks(self, dp: int = 0) -> Iterator[Rank]:
        """List the ranks of one group, in the order of `Rank.index`."""
        for pp in range(self.pp):
            for cp in range(self.cp):
                for tp in range(self.tp):
                    yield Rank(tp=tp, pp=pp, cp=cp, dp=dp)

    def check(self, rank: Rank) -> None:
        """Raise RangeError, naming the axis, if the rank is outside."""
        for axis in ("tp", "pp", "cp", "dp"):
            size, found = getattr(self, axis), getattr(rank, axis)
            if found >= size:
                raise _range_error(f"rank {axis}={found} is outside of the topology: {axis} has ranks 0 to {size - 1}")

    def to_dict(self) -> dict[str, int]:
        """Give the fields as a dict of plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Topology:
        """Read what `to_dict` gave; unknown fields are RangeError."""
        return cls(**_known_fields(cls, data))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """A worker's place on each parallel axis, from 0."""

    tp: int = 0
    pp: int = 0
    cp: int = 0
    dp: int = 0

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp", "dp"):
            object.__setattr__(self, axis, _positive(getattr(self, axis), f"rank.{axis}", 0))

    def index(self, topology: Topology) -> int:
        """Return the place in the group, 0 to topology.size - 1: tp runs fastest, then cp, then pp; without dp."""
        topology.check(self)
        return (self.pp * topology.cp + self.cp) * topology.tp + self.tp

    def to_dict(self) -> dict[str, int]:
        """Give the fields as a dict of plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rank:
        """Read what `to_dict` gave; unknown fields are RangeError."""
        return cls(**_known_fields(cls, data))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What must be equal for cached bytes to mean the same.

    Attributes
    ----------
    model, weights_id : str
        The model's name, and what identifies its weights exactly (a commit, a digest); never a name or shapes alone.
    dtype : str
        Of the KV cache; normalised.
    block_tokens : int
        Tokens a block.
    block_bytes : int
        Bytes that a slot holds on this rank.
    layers, kv_heads, head_dim : int
        The model's totals. No arithmetic is checked between them and block_bytes.
    layout : str
        Order of the axes in a block.
    hash_scheme, hash_root : str
        How keys are made, and from which root. A root given as bytes is kept as hex, one of no bytes (sglang-sha256 has
        it) as "none".
    topology : Topology
    segments : tuple of (str, int) or None
        Names and bytes of a block's pieces in slot order; they sum to block_bytes.
    extra : mapping of str to str, int, bool or None
        More that must be equal.
    """

    model: str
    weights_id: str
    dtype: str
    block_tokens: int
    block_bytes: int
    layers: int
    kv_heads: int
    head_dim: int
    layout: str
    hash_scheme: str
    hash_root: str
    topology: Topology = dataclasses.field(default_factory=Topology)
    segments: tuple[tuple[str, int], ...] | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("model", "weights_id", "layout", "hash_scheme"):
            _text(getattr(self, name), name)
        root = self.hash_root
        if isinstance(root, (bytes, bytearray)):
            root = bytes(root).hex() or "none"
        put(self, "hash_root", _text(root, "hash_root"))
        put(self, "dtype", normalise_dtype(self.dtype))
        for name in ("block_tokens", "block_bytes", "layers", "kv_heads", "head_dim"):
            put(self, name, _positive(getattr(self, name), name))
        if not isinstance(self.topology, Topology):
            raise TypeError(f"topology must be a Topology, not {type(self.topology).__name__}")
        put(self, "segments", self._checked_segments())
        put(self, "extra", MappingProxyType(self._checked_extra()))
        size = len(self._canonical())
        if size > MANIFEST_NBYTES_MAX:
            raise _range_error(f"the manifest has {size} bytes: at most {MANIFEST_NBYTES_MAX} are possible")

    def _checked_segments(self) -> tuple[tuple[str, int], ...] | None:
        if self.segments is None:
            return None
        found: list[tuple[str, int]] = []
        for i, item in enumerate(self.segments):
            if not isinstance(item, (tuple, list)) or len(item) != 2:
                raise TypeError(f"segments[{i}] must be (name, nbytes): got {item!r}")
            name, nbytes = item
            found.append((_text(name, f"segments[{i}] name"), _positive(nbytes, f"segments[{i}] nbytes")))
        names = [name for name, _ in found]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise _range_error(f"segment {twice!r} is named twice")
        total = sum(nbytes for _, nbytes in found)
        if total != self.block_bytes:
            raise _range_error(f"the segments sum to {total} bytes, block_bytes is {self.block_bytes}")
        return tuple(found)

    def _checked_extra(self) -> dict[str, Any]:
        if not isinstance(self.extra, Mapping):
            raise TypeError(f"extra must be a dict, not {type(self.extra).__name__}")
        for key, value in self.extra.items():
            _text(key, "a key of extra")
            if not (value is None or isinstance(value, (str, bool, int))):
                raise TypeError(f"extra[{key!r}] must be str, int, bool or None, not {type(value).__name__}")
            if isinstance(value, int):
                _status.as_integer(int(value), f"extra[{key!r}]")
        return dict(sorted(self.extra.items()))

    def __hash__(self) -> int:
        return hash(self._canonical())

    def __reduce__(self) -> Any:
        return (Manifest.from_dict, (self.to_dict(),))

    def _canonical(self) -> bytes:
        return msgspec.json.encode(self.to_dict(), order="sorted")

    def digest(self) -> bytes:
        """Return 32 bytes: SHA-256 of the JSON of `to_dict` with sorted keys."""
        return hashlib.sha256(self._canonical()).digest()

    def to_dict(self) -> dict[str, Any]:
        """Give the fields as a dict of plain values."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data["topology"] = self.topology.to_dict()
        data["segments"] = None if self.segments is None else [list(item) for item in self.segments]
        data["extra"] = dict(self.extra)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        """Read what `to_dict` gave; unknown and missing fields are RangeError."""
        fields = _known_fields(cls, data)
        if isinstance(fields.get("topology"), Mapping):
            fields["topology"] = Topology.from_dict(fields["topology"])
        return cls(**fields)


def compare(expected: Manifest, found: Manifest, *, across_pp: bool = False) -> dict[str, tuple[Any, Any]]:
    """Compare two manifests field by field on normalised values.

    Parameters
    ----------
    expected, found : Manifest
    across_pp : bool
        The two are of ranks with different pp: block_bytes and segments may differ.

    Returns
    -------
    dict of str to (expected value, found value)
        Empty if they are equal. The topology's axes and the keys of extra are fields of their own.
    """
    differences: dict[str, tuple[Any, Any]] = {}
    a, b = _flat(expected), _flat(found)
    for name in [*a, *(name for name in b if name not in a)]:
        if across_pp and name in ("block_bytes", "segments"):
            continue
        left, right = a.get(name, "absent"), b.get(name, "absent")
        # True == 1 in Python, but not in a manifest.
        if left != right or type(left) is not type(right):
            differences[name] = (left, right)
    return differences


def _flat(manifest: Manifest) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in manifest.to_dict().items():
        if name in ("topology", "extra"):
            flat.update({f"{name}.{key}": item for key, item in value.items()})
        else:
            flat[name] = value
    return flat


def describe(differences: Mapping[str, tuple[Any, Any]]) -> str:
    """Say each differing field with both values: ``block_tokens: 16 kept, 32 asked``."""
    return "; ".join(f"{name}: {left!r} kept, {right!r} asked" for name, (left, right) in differences.items())


def incompatible(differences: Mapping[str, tuple[Any, Any]]) -> IncompatibleError:
    """Build the error that names each differing field with both values."""
    return IncompatibleError(
        f"the manifests differ: {describe(differences)}", status=-15, name="INCOMPATIBLE", fields=dict(differences)
    )
