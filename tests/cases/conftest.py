from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

HERE = str(Path(__file__).resolve().parent)
HEAD = f"""
import os, signal, subprocess, sys, threading, time
sys.path.insert(0, {HERE!r})
import kvreuse, kvreuse.testing
import groups_scene as scene
from groups_scene import KEYS, Agent, AgentError
"""


@pytest.fixture
def stage(run_python, backend_name):
    """Run a group case's code in an interpreter of its own, on each backend.

    It must print "ok"; `said` is what must be in its only line of stderr, where there is to be one.
    """

    def run(code, said="", **options):
        done = run_python(HEAD + textwrap.dedent(code) + "\nprint('ok')\n", backend=backend_name, **options)
        assert done.stdout == "ok\n", done.stdout + done.stderr
        assert done.stderr.count("\n") == bool(said), done.stderr
        assert said in done.stderr

    return run
