"""What cannot be played is refused with exit status 2, before anything is started."""

from __future__ import annotations

import sys

import pytest

from kvreuse import cli, replay

REFUSED = {
    ("--blocks", "0"): "--blocks must be 1 or more: got 0",
    ("--blocks", "-3"): "--blocks must be 1 or more: got -3",
    ("--block-bytes", "0"): "--block-bytes must be 1 or more: got 0",
    ("--block-bytes", "-1"): "--block-bytes must be 1 or more: got -1",
    ("--ranks", "0"): "--ranks must be 1 or more: got 0",
    ("--limit", "0"): "--limit must be 1 or more: got 0",
    ("--limit", "-1"): "--limit must be 1 or more: got -1",
    ("--blocks", "1.5"): "invalid int value",
    ("--verify", "some"): "invalid choice",
    ("--crash-rate", "1.5"): "--crash-rate must be from 0 to 1: got 1.5",
    ("--crash-rate", "-0.1"): "--crash-rate must be from 0 to 1: got -0.1",
    ("--crash-rate", "nan"): "--crash-rate must be from 0 to 1: got nan",
    ("--backends", "rust"): "--backends rust: expected core or fallback",
    ("--backends", "fallback,fallback,fallback"): "--backends names 3 backends for 2 ranks",
    ("--block-bytes", "4611686018427387904"): "are available; lower --ranks, --blocks or --block-bytes",
    # The data would fit; the table would not.
    ("--blocks", "1000000000", "--block-bytes", "1", "--ranks", "100"): "and their tables need 12900000000000 bytes",
    ("--kill", "worker@0"): "--kill worker@0: the requests played are 1 to 20",
    ("--kill", "worker@21"): "--kill worker@21: the requests played are 1 to 20",
    ("--kill", "worker@99999999999999999999"): "the requests played are 1 to 20",
    ("--kill", "worker@3:2"): "--kill worker@3:2: the ranks are 0 to 1",
    ("--kill", "worker@3", "--kill", "worker@3:0"): "--kill worker@3:0: named twice",
    ("--kill", "worker@3", "--kill", "worker@3"): "--kill worker@3: named twice",
    ("--kill", "worker"): "--kill worker: expected worker@K or worker@K:R",
    ("--kill", "worker@"): "--kill worker@: expected worker@K or worker@K:R",
    ("--kill", "worker@-1"): "--kill worker@-1: expected worker@K or worker@K:R",
    ("--kill", "worker@1:"): "--kill worker@1:: expected worker@K or worker@K:R",
    ("--kill", "engine@1"): "--kill engine@1: engine is unknown",
    ("--kill", "keeper@1"): "needs the vault, which this version does not have",
    ("--kill", "vault@1"): "needs the vault, which this version does not have",
    ("--plot", "curve.txt"): "the name must end in .png, .svg or .pdf",
    ("--plot", "/nowhere/curve.png"): "/nowhere is not a folder that can be written to",
    ("--unknown",): "unrecognized arguments",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_cannot_be_played_is_refused(run_refused, words):
    limit = () if "--limit" in words else ("--limit", "20")
    assert REFUSED[words] in run_refused("replay", *limit, *words)


def test_plot_without_matplotlib_is_refused(run_refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--plot needs matplotlib: pip install" in run_refused("replay", "--limit", "20", "--plot", "x.png")


def test_plot_over_a_folder_is_refused(run_refused, tmp_path):
    folder = tmp_path / "x.png"
    folder.mkdir()
    assert "is a folder" in run_refused("replay", "--limit", "20", "--plot", folder)


def test_core_that_is_not_installed_is_refused(run_refused, monkeypatch):
    monkeypatch.setattr(replay.importlib.util, "find_spec", lambda name: None)
    assert "the extension kvreuse._core is not installed" in run_refused("replay", "--backends", "core")


def test_temporary_directory_with_a_long_name_is_refused(run_refused, monkeypatch, tmp_path):
    """A socket's path has at most 107 bytes."""
    folder = tmp_path / ("x" * 107)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert "set TMPDIR to a shorter one" in run_refused("replay", "--limit", "20")
    assert list(folder.iterdir()) == []


def test_kills_are_drawn_from_the_seed_alone():
    kills = replay.random_kills(1000, 3, 0.1, 7)
    assert kills == replay.random_kills(1000, 3, 0.1, 7) != replay.random_kills(1000, 3, 0.1, 8)
    assert 50 < len(kills) < 200
    assert {kill.rank for kill in kills} == {0, 1, 2}
    assert replay.random_kills(1000, 3, 0.0, 7) == []
    assert len(replay.random_kills(100, 3, 1.0, 7)) == 100


@pytest.mark.parametrize("words", [["status"], ["status", "--json"], ["release", "--all"], ["release", "--part", "00"]])
def test_no_keeper_is_exit_status_3(capfd, tmp_path, words):
    path = str(tmp_path / "none.sock")
    assert cli.main([*words, "--socket", path]) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert f"no keeper answers on {path}" in err
    assert "Traceback" not in err
