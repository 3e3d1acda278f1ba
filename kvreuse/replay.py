"""`kvreuse replay`: the main job end to end. A keeper, one worker a rank, a trace, and workers killed in its middle."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import random
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import KVReuseError
from .keeper import holders
from .keeper.client import connect
from .replay_trace import Ids
from .replay_worker import GROUP, Channel

SOCKET_PATH_NBYTES = 107  # sun_path holds 108 with the final NUL
START_TIMEOUT_S = 30.0
REPLY_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 30.0
# Record, link and buckets of a slot in the part's table, rounded up.
TABLE_SLOT_NBYTES = 128
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROFILE = """\
[reuse]
enabled = true
[retention]
max_bytes = {max_bytes}
ttl_s = 120
idle_exit_s = 2
[checksum]
when = "{checksum}"
"""


class UsageError(Exception):
    """The arguments are wrong; nothing was started."""


class ReplayError(Exception):
    """The run could not go on."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """SIGKILL rank `rank`'s worker in the middle of request `request` (from 1)."""

    request: int
    rank: int


@dataclasses.dataclass
class Options:
    """What to play, and how; see `kvreuse replay --help`."""

    ranks: int = 2
    blocks: int = 10000
    block_bytes: int = 4096
    backends: tuple[str, ...] = ()
    verify: str = "all"
    verify_attach: bool = False
    kills: tuple[Kill, ...] = ()


@dataclasses.dataclass
class Curve:
    """What --plot shows, one entry a request."""

    hits: list[int] = dataclasses.field(default_factory=list)
    refs: list[int] = dataclasses.field(default_factory=list)
    resident_bytes: list[int] = dataclasses.field(default_factory=list)
    restarts: list[int] = dataclasses.field(default_factory=list)


def parse_kills(words: list[str]) -> list[Kill]:
    """Read ``worker@K[:R]`` words. Raises UsageError."""
    kills = []
    for word in words:
        found = re.fullmatch(r"(\w+)@(\d+)(?::(\d+))?", word)
        if not found:
            raise UsageError(f"--kill {word}: expected worker@K or worker@K:R with K from 1")
        who, request, rank = found.groups()
        if who in ("keeper", "vault"):
            raise UsageError(f"--kill {word}: killing the {who} needs the vault, which this version does not have")
        if who != "worker":
            raise UsageError(f"--kill {word}: {who} is unknown: expected worker@K or worker@K:R")
        kill = Kill(int(request), int(rank or 0))
        if kill in kills:
            raise UsageError(f"--kill {word}: named twice")
        kills.append(kill)
    return kills


def random_kills(requests: int, ranks: int, rate: float, seed: int) -> list[Kill]:
    """Draw kills: each request with probability `rate`, the victim evenly among the workers."""
    source = random.Random(seed)
    kills = []
    for request in range(1, requests + 1):
        if source.random() < rate:
            kills.append(Kill(request, source.randrange(ranks)))
    return kills


def check(options: Options, requests: list[Ids]) -> None:
    """Refuse what cannot be run, before anything is started. Raises UsageError."""
    for name in ("ranks", "blocks", "block_bytes"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be 1 or more: got {getattr(options, name)}")
    for word in options.backends:
        if word not in ("core", "fallback"):
            raise UsageError(f"--backends {word}: expected core or fallback")
        if word == "core" and importlib.util.find_spec("kvreuse._core") is None:
            raise UsageError("--backends core: the extension kvreuse._core is not installed; use fallback")
    if len(options.backends) not in (1, options.ranks):
        raise UsageError(
            f"--backends names {len(options.backends)} backends for {options.ranks} ranks: one, or one a rank"
        )
    for kill in options.kills:
        if not 1 <= kill.request <= len(requests):
            raise UsageError(f"--kill worker@{kill.request}: the requests played are 1 to {len(requests)}")
        if kill.rank >= options.ranks:
            raise UsageError(f"--kill worker@{kill.request}:{kill.rank}: the ranks are 0 to {options.ranks - 1}")
    wanted, free = options.ranks * options.blocks * (options.block_bytes + TABLE_SLOT_NBYTES), _available_bytes()
    if wanted > free:
        raise UsageError(
            f"{options.ranks} ranks x {options.blocks} blocks x {options.block_bytes} bytes and their tables need "
            f"{wanted} bytes: {free} are available; lower --ranks, --blocks or --block-bytes"
        )


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


class Worker:
    """One rank's worker process, as the coordinator sees it."""

    def __init__(self, replay: Replay, rank: int) -> None:
        self.rank = rank
        self.backend = ""
        options = replay.options
        mine, theirs = socket.socketpair()
        started = time.monotonic()
        backend = options.backends[rank % len(options.backends)]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvreuse.replay_worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "KVREUSE_BACKEND": backend},
                # A terminal's Ctrl-C is for the coordinator alone, which ends all others.
                start_new_session=True,
            )
        mine.settimeout(REPLY_TIMEOUT_S)
        self.channel = Channel(mine)
        # Before anything that can fail: who started it can end it.
        replay.workers[rank] = self
        self.send(
            {
                "socket": replay.socket_path,
                "label": replay.label,
                "rank": rank,
                "ranks": options.ranks,
                "blocks": options.blocks,
                "block_bytes": options.block_bytes,
                "verify": options.verify,
            }
        )
        self._started = started
        self.start_s = 0.0

    def hello(self) -> None:
        """Wait until the interpreter is up."""
        message = self.recv()
        self.backend = message["backend"]
        self.start_s = message["hello"] - self._started

    def attach(self) -> dict[str, Any]:
        """Let it attach; return the outcome."""
        self.send({"do": "attach"})
        return self.recv()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises ReplayError if nobody takes it."""
        try:
            self.channel.send(message)
        except TimeoutError:
            raise ReplayError(f"rank {self.rank}'s worker took no message within {REPLY_TIMEOUT_S} s") from None
        except OSError:
            self.recv()  # what it said before it ended is the better error
            raise ReplayError(f"rank {self.rank}'s worker closed its socket") from None

    def recv(self) -> dict[str, Any]:
        """Receive a reply. Raises ReplayError if there is none, or an error."""
        try:
            message = self.channel.recv()
        except TimeoutError:
            raise ReplayError(f"rank {self.rank}'s worker did not answer within {REPLY_TIMEOUT_S} s") from None
        if message is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            raise ReplayError(f"rank {self.rank}'s worker ended unexpectedly (exit status {self.process.poll()})")
        if "error" in message:
            raise ReplayError(f"rank {self.rank}'s worker: {message['error']}")
        return message

    def end(self) -> None:
        """Close the channel, which ends the process; kill it if it does not."""
        self.channel.close()
        _end(self.process, 0)


def _kill(workers: list[Worker]) -> list[tuple[float, float]]:
    """SIGKILL workers together; return of each the monotonic times of its kill and of its pidfd firing."""
    with contextlib.ExitStack() as stack:
        killed, fired, ranks = {}, {}, {}
        poll = select.poll()
        for worker in workers:
            pidfd = os.pidfd_open(worker.process.pid)
            stack.callback(os.close, pidfd)
            poll.register(pidfd, select.POLLIN)
            ranks[pidfd] = worker.rank
        for worker in workers:
            killed[worker.rank] = time.monotonic()
            worker.process.kill()
        while ranks:
            found = poll.poll(READY_TIMEOUT_S * 1000)
            now = time.monotonic()
            if not found:
                raise ReplayError(
                    f"workers of ranks {[*ranks.values()]} are not gone {READY_TIMEOUT_S} s after SIGKILL"
                )
            for pidfd, _ in found:
                poll.unregister(pidfd)
                fired[ranks.pop(pidfd)] = now
    for worker in workers:
        worker.process.wait(READY_TIMEOUT_S)
        worker.channel.close()
    return [(killed[worker.rank], fired[worker.rank]) for worker in workers]


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None and number:
        process.send_signal(number)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


class Replay:
    """One run. Use `run`; everything that it starts has ended when it returns or raises."""

    def __init__(self, options: Options, requests: list[Ids], say: Callable[[str], None]) -> None:
        self.options = options
        self.requests = requests
        self.label = secrets.token_hex(6)
        self.folder = ""
        self.socket_path = ""
        self.curve = Curve()
        self._say = say
        self._keeper: subprocess.Popen[bytes] | None = None
        self._keeper_said: threading.Thread | None = None
        self._client: Any = None
        self.workers: dict[int, Worker] = {}
        ranks = range(options.ranks)
        self._sealed: list[set[int]] = [set() for _ in ranks]
        self._corrupt_at_attach = [0] * options.ranks
        self._result: dict[str, Any] = {
            "requests": 0,
            "block_refs": 0,
            "hit_blocks": 0,
            "hit_rate": 0.0,
            "evictions": 0,
            "ranks": options.ranks,
            "backends": [],
            "verified_blocks": 0,
            "corrupt_blocks": 0,
            "lost_sealed_blocks": 0,
            "restarts": 0,
            "keeper_restarts": 0,
            "ready_ms": [],
            "start_ms": [],
            "teardown_ms": [],
            "leaked_bytes": 0,
            "leaked_fds": 0,
            "requests_per_s": 0.0,
            "bytes_written": 0,
        }

    def run(self, progress: Callable[[int], None]) -> dict[str, Any]:
        """Play the requests; `progress` is called with the number of requests played.

        Returns
        -------
        dict
            The keys of --json; "problems" lists why the exit status must be 1.

        Raises
        ------
        ReplayError
            The run could not go on.
        """
        with self._started():
            begun = time.monotonic()
            self._play(progress)
            elapsed = time.monotonic() - begun
            evictions = [self._ask(worker, {"do": "finish"})["evictions"] for worker in self._ordered()]
            if self._keeper is not None and self._keeper.poll() is not None:
                raise ReplayError(f"the keeper ended unexpectedly (exit status {self._keeper.returncode})")
        result = self._result
        result["requests"] = len(self.requests)
        result["block_refs"] = sum(map(len, self.requests))
        result["hit_rate"] = round(result["hit_blocks"] / max(1, result["block_refs"]), 6)
        result["evictions"] = evictions[0]
        result["requests_per_s"] = round(len(self.requests) / max(elapsed, 1e-9), 1)
        result["leaked_fds"], result["leaked_bytes"] = find_leaks(self.label)
        result["problems"] = self._problems(evictions)
        return result

    def _problems(self, evictions: list[int]) -> list[str]:
        problems = []
        if len(set(evictions)) > 1:
            problems.append(f"the ranks evicted different numbers of blocks: {evictions}")
        for key in ("corrupt_blocks", "lost_sealed_blocks", "leaked_bytes", "leaked_fds"):
            if self._result[key]:
                problems.append(f"{key} is {self._result[key]}")
        return problems

    # ---- processes ----

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        self.folder = tempfile.mkdtemp(prefix="kvreuse-")
        try:
            self._start_keeper()
            for rank in range(self.options.ranks):
                Worker(self, rank)
            for worker in self._ordered():
                worker.hello()
                outcome = worker.attach()
                if outcome["outcome"] != "EMPTY":
                    raise ReplayError(f"a fresh part of rank {worker.rank} is {outcome}")
                self._result["backends"].append(worker.backend)
            self._wait_ready()
            yield
        finally:
            # A second signal comes when nothing is left to be cut short.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                self._end()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _end(self) -> None:
        # All see the end of their socket first, and close at the same time.
        for worker in self.workers.values():
            worker.channel.close()
        for worker in self.workers.values():
            worker.end()
        if self._client is not None:
            with contextlib.suppress(KVReuseError):
                self._client.close()
        if self._keeper is not None:
            _end(self._keeper, signal.SIGTERM)
            if self._keeper_said is not None:
                self._keeper_said.join()
            if self._keeper.stderr is not None:
                self._keeper.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ordered(self) -> list[Worker]:
        return [self.workers[rank] for rank in range(self.options.ranks)]

    def _start_keeper(self) -> None:
        options = self.options
        self.socket_path = os.path.join(self.folder, "keeper.sock")
        if len(self.socket_path.encode()) > SOCKET_PATH_NBYTES:
            raise UsageError(
                f"the temporary directory's path is too long for a socket ({self.socket_path}): "
                "set TMPDIR to a shorter one"
            )
        text = PROFILE.format(
            # Room for the table and the claims beside the data.
            max_bytes=options.ranks * (options.blocks * (options.block_bytes + 1024) + (64 << 20)),
            checksum="attach" if options.verify_attach else "commit",
        )
        profile = os.path.join(self.folder, "profile.toml")
        Path(profile).write_text(text)
        self._say("reuse is off by default; this run declares its own profile:\n" + text.rstrip())
        arguments = ["--socket", self.socket_path, "--profile", profile, "--label", self.label]
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "kvreuse.keeper", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=subprocess.PIPE,
            env={**os.environ, "KVREUSE_BACKEND": options.backends[0]},
            start_new_session=True,
        )
        self._await_keeper(self._keeper)
        # What it says later must not fill the pipe.
        self._keeper_said = threading.Thread(target=_pass_on, args=(self._keeper.stderr,), daemon=True)
        self._keeper_said.start()
        self._client = connect(self.socket_path)

    def _await_keeper(self, keeper: subprocess.Popen[bytes]) -> None:
        """Wait for the keeper's line that says it is ready; what it says instead is the error."""
        assert keeper.stderr is not None
        said, deadline = b"", time.monotonic() + START_TIMEOUT_S
        poll = select.poll()
        poll.register(keeper.stderr, select.POLLIN | select.POLLHUP)
        while b"ready on" not in said or not said.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise ReplayError(f"the keeper was not ready within {START_TIMEOUT_S} s")
            data = os.read(keeper.stderr.fileno(), 65536)
            if not data:
                raise ReplayError(f"the keeper did not start: {said.decode(errors='replace').strip()}")
            said += data
        self._say(said.decode(errors="replace").strip())

    def _wait_ready(self) -> float:
        readiness = self._client.group(GROUP).wait_ready(READY_TIMEOUT_S)
        if not readiness.ready:
            raise ReplayError(f"the group is not ready: {readiness}")
        return time.monotonic()

    # ---- requests ----

    def _ask(self, worker: Worker, message: dict[str, Any]) -> dict[str, Any]:
        worker.send(message)
        return worker.recv()

    def _play(self, progress: Callable[[int], None]) -> None:
        kills: dict[int, set[int]] = {}
        for kill in self.options.kills:
            kills.setdefault(kill.request, set()).add(kill.rank)
        data = [ids.tobytes() for ids in self.requests]
        hits = min(self._ask(worker, {"do": "match", "ids": data[0]})["hits"] for worker in self._ordered())
        for index, ids in enumerate(self.requests):
            after = data[index + 1] if index + 1 < len(data) else None
            # A match of the next request rides on each reply: it is taken before anything of that request is stored.
            hits_after = self._play_one(ids, data[index], after, hits, kills.get(index + 1, set()))
            self._result["hit_blocks"] += hits
            self.curve.hits.append(hits)
            self.curve.refs.append(len(ids))
            self.curve.resident_bytes.append(sum(map(len, self._sealed)) * self.options.block_bytes)
            if index + 1 in kills:
                self.curve.restarts.append(index + 1)
            hits = hits_after
            progress(index + 1)

    def _play_one(self, ids: Ids, data: bytes, after: bytes | None, hits: int, victims: set[int]) -> int:
        """Play one request on all ranks; return the common hits of the next."""
        workers = self._ordered()
        message = {"do": "play", "ids": data, "hits": hits, "again": False, "next": after}
        for worker in workers:
            worker.send({**message, "stop": worker.rank in victims})
        hits_after = []
        for worker in workers:
            reply = worker.recv()
            self._count(worker.rank, reply)
            self._result["verified_blocks"] += reply["verified"]
            hits_after.append(reply.get("hits", len(ids)))
        if victims:
            self._restart(victims)
            for rank in sorted(victims):
                reply = self._ask(self.workers[rank], {**message, "stop": False, "again": True})
                self._count(rank, reply)
                hits_after[rank] = reply.get("hits", 0)
        return min(hits_after) if after is not None else 0

    def _count(self, rank: int, reply: dict[str, Any]) -> None:
        self._result["corrupt_blocks"] += reply["corrupt"]
        self._result["bytes_written"] += reply["bytes_written"]
        self._sealed[rank].difference_update(reply["evicted"])
        self._sealed[rank].update(reply["stored"])

    def _restart(self, victims: set[int]) -> None:
        """Kill the victims together, start their replacements, and see what those were given."""
        ranks = sorted(victims)
        times = _kill([self.workers[rank] for rank in ranks])
        workers = [Worker(self, rank) for rank in ranks]
        for worker in workers:
            worker.hello()
        outcomes = [worker.attach() for worker in workers]
        ready = self._wait_ready()
        # The interpreters start side by side: the slowest is what the group waited for.
        start_s = max(worker.start_s for worker in workers)
        for rank, worker, outcome, (killed, fired) in zip(ranks, workers, outcomes, times, strict=True):
            self._result["restarts"] += 1
            self._result["teardown_ms"].append(round((fired - killed) * 1000, 3))
            self._result["start_ms"].append(round(worker.start_s * 1000, 3))
            self._result["ready_ms"].append(round((ready - fired - start_s) * 1000, 3))
            self._say(
                f"rank {rank} was killed; its replacement is {outcome['outcome']}({outcome['blocks']})"
                + (f": {outcome['reason']}" if outcome["reason"] else "")
            )
            corrupt = outcome["corrupt_total"] - self._corrupt_at_attach[rank]
            self._corrupt_at_attach[rank] = outcome["corrupt_total"]
            self._result["corrupt_blocks"] += corrupt
            missing = self._ask(worker, {"do": "missing", "ids": sorted(self._sealed[rank])})["missing"]
            self._sealed[rank].difference_update(missing)
            self._result["lost_sealed_blocks"] += max(0, len(missing) - corrupt)


def _pass_on(stream: IO[bytes]) -> None:
    for line in stream:
        sys.stderr.write(line.decode(errors="replace"))


def find_leaks(label: str) -> tuple[int, int]:
    """Look for memory of this run in all processes: (fds that name it, bytes of distinct memory)."""
    found = holders.scan(label)
    return found.fds, found.nbytes


def run(
    options: Options, requests: list[Ids], say: Callable[[str], None], progress: Callable[[int], None]
) -> tuple[dict[str, Any], Curve]:
    """Check the options and play the requests. Raises UsageError or ReplayError.

    SIGTERM and SIGHUP end the run like Ctrl-C, so that no process stays behind.
    """
    check(options, requests)
    replay = Replay(options, requests, say)
    # What is ignored stays so (nohup).
    caught = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _interrupt) for number in caught}
    try:
        return replay.run(progress), replay.curve
    except KVReuseError as error:
        raise ReplayError(f"{type(error).__name__}: {error}") from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
