"""A vLLM in processes of its own, which a test starts, asks and kills."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_model

START_S = 180.0
ANSWER_S = 120.0
END_S = 30.0


class Engine:
    """Started by the constructor; `kill` or `close` ends it."""

    def __init__(self, folder: Path, model: str, ranks: int = 1, **changes: Any) -> None:
        if ranks > 1:
            changes |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
        arguments = tiny_model.engine_arguments(model, **changes)
        self.log_path = folder / f"vllm-{len(list(folder.glob('vllm-*')))}.log"
        read_fd, write_fd = os.pipe()
        environ = {**os.environ, **tiny_model.environment(ranks), "ANSWERS": str(write_fd)}
        # One for all engines of a run, and none of this machine's.
        environ["XDG_CACHE_HOME"] = str(folder.parent / "cache")
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("serve.py")), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environ,
                pass_fds=(write_fd,),
                start_new_session=True,
            )
        os.close(write_fd)
        self._answers = os.fdopen(read_fd, "rb", buffering=0)
        self._rest = b""
        try:
            self.start_s: float = self.answer(START_S)["started"]
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- orders ----

    def order(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout: float = ANSWER_S) -> dict[str, Any]:
        """Read one answer; EOFError: vLLM has ended."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError(f"vLLM gave no answer within {timeout} s:\n{self.log()[-4000:]}")
            data = os.read(self._answers.fileno(), 65536)
            if not data:
                raise EOFError(f"vLLM has ended:\n{self.log()[-4000:]}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def answers(self, timeout: float = ANSWER_S) -> Iterator[dict[str, Any]]:
        """Read answers up to the end of an order."""
        while "end" not in (found := self.answer(timeout)):
            yield found

    def call(self, do: str, **arguments: Any) -> bool:
        """Give an order that has one answer."""
        self.order(do, **arguments)
        return bool(self.answer()["end"])

    def serve(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        aborts: dict[int, int] | None = None,
        at_once: int = 8,
        wait: bool = True,
    ) -> dict[int, dict[str, Any]]:
        """Serve prompts; give what is known of each that was done."""
        self.order("serve", prompts=prompts, max_tokens=max_tokens, aborts=aborts or {}, at_once=at_once)
        return {found["done"]: found for found in self.answers() if "done" in found} if wait else {}

    # ---- processes ----

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def says(self) -> str:
        """What the connector wrote to vLLM's log."""
        return "\n".join(line for line in self.log().splitlines() if "kvreuse:" in line)

    def worker_pid(self, rank: int) -> int:
        """Find a worker of tensor parallel ranks."""
        (pid,) = set(re.findall(rf"\(Worker_TP{rank} pid=(\d+)\)", self.log()))
        return int(pid)

    def _session(self) -> list[int]:
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    stat = Path("/proc", name, "stat").read_text()
                    fields = stat.rpartition(")")[2].split()
                    if int(fields[3]) == self.process.pid and fields[0] != "Z":
                        found.append(int(name))
        return found

    def kill(self) -> None:
        """SIGKILL all of its processes, as far as possible at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._wait_gone()

    def close(self) -> None:
        """Let it end by itself; what is left after a while is killed."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self._wait_gone()

    def _wait_gone(self) -> None:
        deadline = time.monotonic() + END_S
        while pids := self._session():
            for pid in pids if time.monotonic() > deadline - END_S / 2 or self.process.poll() is not None else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes of vLLM did not end: {pids}")
            self.process.poll()
            time.sleep(0.05)
        self.process.wait()
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self._answers.close()


def transfer(socket: str, **extra: Any) -> dict[str, Any]:
    """vLLM's kv_transfer_config for the keeper on this socket."""
    return {
        "kv_connector": "KVReuseConnector",
        "kv_connector_module_path": "kvreuse.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": socket, "group": "test", "blocks": 8192, **extra},
    }


def prompts(count: int, blocks_max: int = 48, seed: int = 0) -> list[list[int]]:
    """Make prompts in the shape of the generated trace: one id is one block of tokens, and a few follow."""
    from kvreuse import replay_trace

    made = []
    for ids in replay_trace.generate(count, seed):
        tokens = []
        for number in ids[:blocks_max].tolist():
            tokens += [4 + (number * 7919 + 31 * place) % 500 for place in range(tiny_model.BLOCK_TOKENS)]
        made.append([*tokens, 4 + len(made) % 500, 5])
    return made


def full_blocks(prompt: list[int], block_tokens: int = tiny_model.BLOCK_TOKENS) -> int:
    """Blocks of a prompt that can be hits: its last token is always computed."""
    return (len(prompt) - 1) // block_tokens
