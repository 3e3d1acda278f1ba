"""Manifest, Topology, Rank (R3)."""

from __future__ import annotations

import pickle

import pytest

import kvreuse
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
