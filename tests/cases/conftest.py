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
    """Run a group case's code in an interpreter of its own, on each backend; it must print "ok" and nothing else."""

    def run(code, **options):
        done = run_python(HEAD + textwrap.dedent(code) + "\nprint('ok')\n", backend=backend_name, **options)
        assert (done.stdout, done.stderr) == ("ok\n", ""), done.stdout + done.stderr

    return run
