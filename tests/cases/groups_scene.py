"""Processes that are told what to do line by line: workers, schedulers, and what else the group cases need.

Runs in an interpreter of its own (`run_python`), so that KVREUSE_BACKEND chooses the backend of everything in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

from restart_scene import PROFILE, attach, check, content, fill, manifest

__all__ = ["PROFILE", "attach", "check", "content", "fill", "manifest"]  # of the other scene

HERE = os.path.dirname(os.path.abspath(__file__))
KEYS = [bytes([i]) * 32 for i in range(8)]
TIMEOUT_S = 30.0
_LOOP = """
import json, os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import kvreuse, groups_scene as scene
names = {"kvreuse": kvreuse, "scene": scene, "os": os, "sys": sys, "signal": signal, "time": time, "KEYS": scene.KEYS,
         "threading": threading, "path": sys.argv[2]}
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    names["out"] = None
    try:
        exec(json.loads(line), names)
        answer = {"out": names["out"]}
    except Exception as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    answers.write(json.dumps(answer) + "\\n")
    answers.flush()
"""


class AgentError(Exception):
    """What an agent's code raised: `name` of the type, and its text."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Agent:
    """A process that executes lines of code as told; ``agent("out = 1 + 1") == 2``. Killed at the end."""

    def __init__(self, path: str, *code: str, prefix=(), env=None) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", _LOOP, HERE, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        for line in code:
            self(line)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, code: str) -> None:
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout: float = TIMEOUT_S):
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        assert poll.poll(timeout * 1000), "the agent did not answer in time"
        line = self.process.stdout.readline()
        assert line, "the agent is gone"
        answer = json.loads(line)
        if "error" in answer:
            raise AgentError(answer["error"], answer["text"])
        return answer["out"]

    def __call__(self, code: str, timeout: float = TIMEOUT_S):
        self.send(code)
        return self.answer(timeout)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        self.process.stdin.close()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def until(condition, timeout: float = 10.0):
    """Wait until `condition()` is true; return what it gave."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)
    return found


def wait_status(keeper, condition, timeout: float = 10.0):
    """Wait until status fulfils a condition; return the status."""

    def look():
        status = keeper.status()
        return status if condition(status) else None

    return until(look, timeout)
