from __future__ import annotations

import contextlib
import json
import uuid

import pytest
from replay_peers import marked

from kvreuse import cli


@pytest.fixture
def trace(tmp_path):
    """``trace(requests)`` writes a trace of lists of ids and returns its path."""

    def write(requests):
        path = tmp_path / "trace.jsonl"
        lines = [
            json.dumps({"timestamp": i, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": list(ids)})
            for i, ids in enumerate(requests)
        ]
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


@pytest.fixture
def mark(monkeypatch, tmp_path):
    """Everything started in the test carries this mark, and makes its files in a directory that has to end up empty."""
    value = uuid.uuid4().hex
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("KVREUSE_TEST_MARK", value)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield value
    assert marked(value) == []
    assert list(folder.iterdir()) == []


@pytest.fixture
def run_replay(mark, no_leaks, capfd, monkeypatch):
    """``run_replay(*words)`` -> (exit status, object of --json or None, stderr), with no process, file or memory left.

    `after` is called with the number of requests played, while no worker is at work.
    """

    def run(*words, after=None):
        if after is not None:
            monkeypatch.setattr(cli, "_progress", lambda total: contextlib.nullcontext(after))
        capfd.readouterr()
        status = cli.main(["replay", "--json", *map(str, words)])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        lines = out.splitlines()
        assert len(lines) <= 1
        return status, json.loads(lines[0]) if lines else None, err

    return run


@pytest.fixture
def run_refused(capfd, monkeypatch):
    """``run_refused(*words)`` -> stderr of a command that must exit with 2 and start nothing."""

    def refuse(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)

    def run(*words):
        capfd.readouterr()
        try:
            status = cli.main([*map(str, words)])
        except SystemExit as end:  # argparse
            status = end.code
        out, err = capfd.readouterr()
        assert (status, out) == (2, "")
        assert "Traceback" not in err
        return err

    return run
