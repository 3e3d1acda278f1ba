"""Manifest, Topology, Rank (R3)."""

from __future__ import annotations

import hashlib
import pickle

import pytest

import kvreuse
from kvreuse.hashing import get_scheme
from kvreuse.manifest import compare, describe, incompatible, normalise_dtype

FIELDS = {
    "model": "m",
    "weights_id": "w1",
    "dtype": "bfloat16",
    "block_tokens": 16,
    "block_bytes": 4096,
    "layers": 2,
    "kv_heads": 1,
    "head_dim": 64,
    "layout": "LKHD",
    "hash_scheme": "sglang-sha256",
    "hash_root": "r",
}


def make(**changes):
    return kvreuse.Manifest(**{**FIELDS, **changes})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("torch.bfloat16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("half", "float16"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("int8", "int8"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_dtypes_have_one_form(given, name):
    assert normalise_dtype(given) == name
    assert make(dtype=given).dtype == name


@pytest.mark.parametrize("name", [name for name, value in FIELDS.items() if isinstance(value, int)])
@pytest.mark.parametrize(
    ("value", "error"), [(0, kvreuse.RangeError), (-1, kvreuse.RangeError), (2**63, kvreuse.RangeError),
                         (True, TypeError), (1.0, TypeError), (None, TypeError)]
)  # fmt: skip
def test_numbers_are_positive_integers(name, value, error):
    """H7"""
    with pytest.raises(error, match=name):
        make(**{name: value})


@pytest.mark.parametrize("name", ["model", "weights_id", "layout", "hash_scheme", "hash_root", "dtype"])
def test_texts_are_mandatory(name):
    """R3: weights_id, hash scheme and root are part of it."""
    with pytest.raises(kvreuse.RangeError, match=name):
        make(**{name: " "})
    with pytest.raises(TypeError, match=name):
        make(**{name: 5})
    fields = {key: value for key, value in FIELDS.items() if key != name}
    with pytest.raises(kvreuse.RangeError, match=name):
        kvreuse.Manifest.from_dict(fields)


def test_segments_sum_to_the_block():
    manifest = make(segments=[("layers.0", 1024), ("layers.1", 3072)])
    assert manifest.segments == (("layers.0", 1024), ("layers.1", 3072))
    with pytest.raises(kvreuse.RangeError, match="4095"):
        make(segments=[("layers.0", 4095)])
    with pytest.raises(kvreuse.RangeError, match="twice"):
        make(segments=[("a", 2048), ("a", 2048)])


def test_it_survives_pickle_and_dicts():
    manifest = make(extra={"lora": "x", "n": 3}, topology=kvreuse.Topology(tp=2), segments=[("a", 4096)])
    for other in (pickle.loads(pickle.dumps(manifest)), kvreuse.Manifest.from_dict(manifest.to_dict())):
        assert other == manifest
        assert hash(other) == hash(manifest)
        assert other.digest() == manifest.digest()
    assert len(manifest.digest()) == 32
    assert make().digest() != manifest.digest()
    with pytest.raises((AttributeError, TypeError)):
        manifest.model = "other"
    with pytest.raises(TypeError):
        manifest.extra["lora"] = "y"


def test_an_unknown_field_has_a_hint():
    with pytest.raises(kvreuse.RangeError, match="did you mean 'weights_id'"):
        kvreuse.Manifest.from_dict({**FIELDS, "weight_id": "x"})


def test_a_manifest_too_large_for_a_frame_is_refused():
    with pytest.raises(kvreuse.RangeError, match="32768"):
        make(extra={"x": "y" * 40000})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"topology": kvreuse.Topology(tp=2)}, "topology.tp"),
        ({"topology": kvreuse.Topology(dp=2)}, "topology.dp"),
        ({"extra": {"a": 1}}, "extra.a"),
        ({"block_bytes": 8192}, "block_bytes"),
        ({"segments": [("a", 4096)]}, "segments"),
    ],
)
def test_each_difference_is_named_alone(changes, name):
    """R3"""
    found = compare(make(), make(**changes))
    assert list(found) == [name]
    left, right = found[name]
    assert repr(left) in describe(found)
    assert repr(right) in describe(found)
    assert incompatible(found).fields == found
    assert compare(make(**changes), make(**changes)) == {}


def test_one_and_true_differ():
    assert list(compare(make(extra={"a": 1}), make(extra={"a": True}))) == ["extra.a"]


def test_ranks_of_other_pp_may_differ_in_bytes_alone():
    other = make(block_bytes=8192, segments=[("a", 8192)], layers=3)
    assert list(compare(make(), other, across_pp=True)) == ["layers"]


def test_ranks_are_numbered_without_dp():
    """R4: dp is no axis of readiness."""
    topology = kvreuse.Topology(tp=2, pp=3, cp=2, dp=4)
    assert topology.size == 12
    assert [rank.index(topology) for rank in topology.ranks(dp=1)] == list(range(12))
    with pytest.raises(kvreuse.RangeError, match="pp=3"):
        kvreuse.Rank(pp=3).index(topology)
    with pytest.raises(kvreuse.RangeError, match=r"rank\.tp"):
        kvreuse.Rank(tp=-1)
    with pytest.raises(TypeError):
        kvreuse.Rank(tp=True)


@pytest.mark.parametrize("dtype", ["", "bf 16", "16", "torch.", "float-16"])
def test_what_is_no_dtype_is_refused(dtype):
    with pytest.raises(kvreuse.RangeError, match="dtype"):
        make(dtype=dtype)


def test_a_root_in_bytes_is_kept_as_hex():
    assert make(hash_root=b"\x00\xff") == make(hash_root="00ff")
    # The root of a chain that starts from nothing has to survive the way to the keeper as well.
    none = make(hash_root=get_scheme("sglang-sha256").root())
    assert none.hash_root == "none"
    assert kvreuse.Manifest.from_dict(none.to_dict()) == none


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"segments": [("a",)]}, TypeError, r"segments\[0\]"),
        ({"segments": ["ab"]}, TypeError, r"segments\[0\]"),
        ({"segments": [("a", 4096.0)]}, TypeError, r"segments\[0\] nbytes"),
        ({"segments": [("a", 4096), ("b", 0)]}, kvreuse.RangeError, r"segments\[1\] nbytes"),
        ({"segments": []}, kvreuse.RangeError, "sum to 0"),
        ({"extra": [("a", 1)]}, TypeError, "extra"),
        ({"extra": {"a": 1.0}}, TypeError, r"extra\['a'\]"),
        ({"extra": {"a": 2**63}}, kvreuse.RangeError, r"extra\['a'\]"),
        ({"extra": {1: "a"}}, TypeError, "extra"),
        ({"topology": {"tp": 2}}, TypeError, "topology"),
    ],
)
def test_pieces_that_are_wrong_are_named(changes, error, word):
    """H7, R3"""
    with pytest.raises(error, match=word):
        make(**changes)


def test_only_dicts_of_known_fields_are_read():
    for cls in (kvreuse.Manifest, kvreuse.Topology, kvreuse.Rank):
        with pytest.raises(TypeError, match="list"):
            cls.from_dict([])
    for cls in (kvreuse.Topology, kvreuse.Rank):
        assert cls.from_dict(cls(tp=1, dp=1).to_dict()) == cls(tp=1, dp=1)
        with pytest.raises(kvreuse.RangeError, match="did you mean 'pp'"):
            cls.from_dict({"ppp": 1})
    with pytest.raises(kvreuse.RangeError, match="did you mean 'tp'"):
        kvreuse.Manifest.from_dict({**FIELDS, "topology": {"ttp": 1}})


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "dp"])
@pytest.mark.parametrize(("value", "error"), [(0, kvreuse.RangeError), (1.0, TypeError), (True, TypeError)])
def test_axes_are_sizes(axis, value, error):
    """H7"""
    with pytest.raises(error, match=rf"topology\.{axis}"):
        kvreuse.Topology(**{axis: value})


def test_extra_in_another_order_is_the_same_manifest():
    one, other = make(extra={"a": 1, "b": None}), make(extra={"b": None, "a": 1})
    assert one == other
    assert one.digest() == other.digest()
    assert compare(make(extra={"a": None}), make()) == {"extra.a": (None, "absent")}


def test_a_digest_is_the_same_everywhere():
    """R3: golden; SHA-256 of the JSON of to_dict with sorted keys and no spaces."""
    text = (
        '{"block_bytes":4096,"block_tokens":16,"dtype":"bfloat16","extra":{"n":3},"hash_root":"r",'
        '"hash_scheme":"sglang-sha256","head_dim":64,"kv_heads":1,"layers":2,"layout":"LKHD","model":"m",'
        '"segments":[["a",4096]],"topology":{"cp":1,"dp":1,"pp":1,"tp":2},"weights_id":"w1"}'
    )
    manifest = make(extra={"n": 3}, segments=[("a", 4096)], topology=kvreuse.Topology(tp=2))
    assert manifest.digest() == hashlib.sha256(text.encode()).digest()
