"""Reading traces: what is wrong is named by file and line, before anything is started."""

from __future__ import annotations

import json

import pytest

from kvreuse import replay_trace

GOOD = {"timestamp": 0, "input_length": 512, "output_length": 1.5, "hash_ids": [0, 2**63 - 1]}


def line(**changes) -> str:
    return json.dumps({key: value for key, value in {**GOOD, **changes}.items() if value is not ...})


BAD = {
    "not JSON": ("{hash_ids: [1]}", "not JSON"),
    "cut": (line()[:-1], "not JSON"),
    "NaN": (line().replace("1.5", "NaN"), "not JSON"),
    "nested": ("[" * 100000, "not JSON"),
    "a list": ("[1, 2]", "expected an object, got list"),
    "null": ("null", "expected an object, got NoneType"),
    "no hash_ids": (line(hash_ids=...), "lacks hash_ids"),
    "no timestamp": (line(timestamp=...), "lacks timestamp"),
    "no input_length": (line(input_length=...), "lacks input_length"),
    "no output_length": (line(output_length=...), "lacks output_length"),
    "text for a length": (line(input_length="512"), "input_length must be a number"),
    "bool for a length": (line(output_length=True), "output_length must be a number"),
    "negative timestamp": (line(timestamp=-1), "timestamp must be a number of 0 or more, got -1"),
    "hash_ids no list": (line(hash_ids=7), "hash_ids must be a list, got int"),
    "negative id": (line(hash_ids=[1, -2]), "hash_ids[1] must be an integer from 0 to 2^63 - 1, got -2"),
    "float id": (line(hash_ids=[1.0]), "hash_ids[0] must be an integer from 0 to 2^63 - 1, got 1.0"),
    "bool id": (line(hash_ids=[True]), "hash_ids[0] must be an integer from 0 to 2^63 - 1, got True"),
    "text id": (line(hash_ids=["1"]), "hash_ids[0] must be an integer"),
    "id too large": (
        line(hash_ids=[2**63]),
        "hash_ids[0] must be an integer from 0 to 2^63 - 1, got 9223372036854775808",
    ),
    "id far too large": (line(hash_ids=[2**70]), "hash_ids[0] must be an integer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_line_is_named_and_nothing_is_started(tmp_path, run_refused, name):
    """H7: no id is truncated or rounded; the blank line counts as a line, and is no request."""
    bad, what = BAD[name]
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{line()}\n\n{bad}\n{line()}\n")
    err = run_refused("replay", path)
    assert f"{path}:3: {what}" in err
    assert len(err.splitlines()) == 1


def test_invalid_utf8_is_named(tmp_path, run_refused):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"timestamp": "\xff"}\n')
    assert f"{path}:1: not JSON" in run_refused("replay", path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_trace_without_requests_is_refused(tmp_path, run_refused, content):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    assert "the trace has no request" in run_refused("replay", path)


def test_trace_that_cannot_be_read_is_refused(tmp_path, run_refused):
    assert "cannot be read: No such file" in run_refused("replay", tmp_path / "none.jsonl")
    assert "cannot be read: Is a directory" in run_refused("replay", tmp_path)


def test_lines_after_the_limit_are_not_looked_at(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"\n{line(hash_ids=[])}\n{line(extra=1)}\nrubbish\n")
    assert [ids.tolist() for ids in replay_trace.load(path, 2)] == [[], GOOD["hash_ids"]]


def test_generated_workload_is_deterministic_and_shares_prefixes():
    made = [ids.tolist() for ids in replay_trace.generate()]
    assert made == [ids.tolist() for ids in replay_trace.generate()]
    assert len(made) == replay_trace.GENERATED_REQUESTS
    assert made != [ids.tolist() for ids in replay_trace.generate(seed=1)]
    firsts = {ids[0] for ids in made}
    assert 1 < len(firsts) <= 8
