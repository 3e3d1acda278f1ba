"""The command line. Exit status: 0 ok; 1 the check failed; 2 usage or bad input, nothing started; 3 no keeper."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from . import _version
from .errors import KeeperUnavailableError, KVReuseError, ProfileError, RangeError

FAILED, USAGE, NO_KEEPER = 1, 2, 3
WATCH_S = 1.0


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeeperUnavailableError as error:
        return _fail(error, NO_KEEPER)
    except (ProfileError, RangeError) as error:
        return _fail(error, USAGE)
    except KVReuseError as error:
        return _fail(error, FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader of our output left; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _fail(error: object, status: int) -> int:
    print(f"kvreuse: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvreuse", description="KV-cache memory that outlives the worker.")
    parser.add_argument("--version", action="version", version=f"kvreuse {_version.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    keeper = commands.add_parser("keeper", help="run the service that owns the memory")
    keeper.add_argument("--socket", required=True, metavar="PATH", help="where to listen; at most 107 bytes")
    keeper.add_argument("--profile", metavar="FILE", help="TOML; without one nothing is retained")
    keeper.add_argument("--label", help="stands in the names of the memory; default: random")
    keeper.set_defaults(run=_keeper)

    status = commands.add_parser("status", help="what a keeper holds")
    _socket_argument(status)
    how = status.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="one JSON object")
    how.add_argument("--watch", action="store_true", help="again each second, until Ctrl-C")
    status.set_defaults(run=_status)

    release = commands.add_parser("release", help="give back the memory of parts that have no worker")
    _socket_argument(release)
    which = release.add_mutually_exclusive_group(required=True)
    which.add_argument("--part", metavar="ID", help="32 hex digits, or the first 8 as `status` shows them")
    which.add_argument("--all", action="store_true", help="every part without a worker")
    release.set_defaults(run=_release)

    info = commands.add_parser("info", help="which backend runs and why, for bug reports")
    info.add_argument("--json", action="store_true", help="one JSON object")
    info.set_defaults(run=_info)

    _add_replay(commands)
    return parser


def _socket_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="default: $KVREUSE_SOCKET, $XDG_RUNTIME_DIR/kvreuse/keeper.sock, /run/kvreuse/keeper.sock",
    )


def _add_replay(commands: Any) -> None:
    replay = commands.add_parser(
        "replay",
        help="play a trace through a keeper and workers, and kill some of them",
        description="Play a trace in Mooncake's format through a keeper and one worker a rank, and check every hit.",
    )
    add = replay.add_argument
    add("trace", nargs="?", metavar="TRACE", help="JSON lines; without it a workload made here is played")
    add("--ranks", type=int, default=2, metavar="N", help="tensor-parallel ranks, one worker each (2)")
    add("--blocks", type=int, default=10000, metavar="N", help="slots of each rank's part (10000)")
    add("--block-bytes", type=int, default=4096, metavar="B", help="bytes of a slot (4096)")
    add("--limit", type=int, metavar="N", help="play only the first N requests")
    add("--backends", metavar="LIST", help="core, fallback, or one a rank: core,fallback; default: this process's")
    add("--verify", choices=("all", "sample", "off"), default="all", help="compare hits byte by byte (all)")
    add("--verify-attach", action="store_true", help="a replacement checks all blocks' checksums when it attaches")
    add(
        "--kill",
        action="append",
        default=[],
        metavar="worker@K[:R]",
        help="SIGKILL rank R's worker (0) in the middle of request K, from 1; may be repeated",
    )
    add(
        "--crash-rate",
        type=float,
        default=0.0,
        metavar="P",
        help="kill a worker at each request with probability P (workers only)",
    )
    add("--seed", type=int, default=0, metavar="S", help="of --crash-rate (0)")
    add("--plot", metavar="FILE.png", help="draw hit rate, restarts and bytes resident (needs matplotlib)")
    add("--json", action="store_true", help="one JSON object on stdout")
    replay.set_defaults(run=_replay)


def _keeper(arguments: argparse.Namespace) -> int:
    from .keeper import server

    argv = ["--socket", arguments.socket]
    argv += ["--profile", arguments.profile] if arguments.profile else []
    argv += ["--label", arguments.label] if arguments.label else []
    return int(server.main(argv))


def _info(arguments: argparse.Namespace) -> int:
    from ._info import backend_info

    found = backend_info()
    if arguments.json:
        _print_json(found)
        return 0
    for key, value in found.items():
        if isinstance(value, dict):
            print(f"{key}:")
            for name, item in value.items():
                print(f"  {name:<12} {item}")
        else:
            print(f"{key + ':':<16}{value}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from .keeper.client import connect

    with connect(arguments.socket) as keeper:
        if arguments.json:
            _print_json(keeper.status(scan=True))
            return 0
        from .cli_status import render

        if not arguments.watch:
            print(render(keeper.status(scan=True)))
            return 0
        clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                print(f"{clear}{render(keeper.status(scan=True))}", flush=True)
                time.sleep(WATCH_S)
    return 0


def _release(arguments: argparse.Namespace) -> int:
    from .keeper.client import connect

    with connect(arguments.socket) as keeper:
        part_id = None if arguments.all else _find_part(keeper, arguments.part)
        released = keeper.release(part_id)
    print(f"released {released} part(s)")
    return 0


def _find_part(keeper: Any, word: str) -> bytes:
    found = [part["part_id"] for part in keeper.status()["parts"] if part["part_id"].startswith(word.lower())]
    if len(found) != 1:
        raise RangeError(f"--part {word}: {len(found)} parts have an id that starts so; `kvreuse status` lists them")
    return bytes.fromhex(found[0])


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def _replay(arguments: argparse.Namespace) -> int:
    from . import replay, replay_trace
    from ._select import backend_name

    def say(text: str) -> None:
        print("\n".join(f"replay: {line}" for line in text.splitlines()), file=sys.stderr)

    try:
        if arguments.limit is not None and arguments.limit < 1:
            raise replay.UsageError(f"--limit must be 1 or more: got {arguments.limit}")
        if not 0 <= arguments.crash_rate <= 1:
            raise replay.UsageError(f"--crash-rate must be from 0 to 1: got {arguments.crash_rate}")
        if arguments.plot:
            _check_plot(arguments.plot, replay.UsageError)
        if arguments.trace is None:
            requests = replay_trace.generate()[: arguments.limit]
        else:
            requests = replay_trace.load(arguments.trace, arguments.limit)
        kills = replay.parse_kills(arguments.kill)
        options = replay.Options(
            ranks=arguments.ranks,
            blocks=arguments.blocks,
            block_bytes=arguments.block_bytes,
            backends=tuple((arguments.backends or backend_name).split(",")),
            verify=arguments.verify,
            verify_attach=arguments.verify_attach,
        )
        replay.check(options, requests)
        drawn = replay.random_kills(len(requests), options.ranks, arguments.crash_rate, arguments.seed)
        options.kills = (*kills, *(kill for kill in drawn if kill not in kills))
        with _progress(len(requests)) as progress:
            result, curve = replay.run(options, requests, say, progress)
    except (replay.UsageError, replay_trace.TraceError) as error:
        return _fail(error, USAGE)
    except replay.ReplayError as error:
        return _fail(error, FAILED)
    problems = result.pop("problems")
    if arguments.json:
        _print_json(result)
    else:
        for key, value in result.items():
            print(f"{key:<20}{value}")
    if arguments.plot:
        from .replay_plot import draw

        name = arguments.trace or "generated workload"
        try:
            draw(curve, arguments.plot, f"{name}: {options.blocks} blocks, {options.ranks} ranks")
            say(f"wrote {arguments.plot}")
        except OSError as error:
            problems.append(f"--plot {arguments.plot}: {error.strerror or error}")
    for problem in problems:
        _fail(problem, FAILED)
    return FAILED if problems else 0


def _check_plot(path: str, error: type[Exception]) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise error("--plot needs matplotlib: pip install 'kvreuse[plot]'")
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise error(f"--plot {path}: is a folder, expected a file's name")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise error(f"--plot {path}: {folder} is not a folder that can be written to")
    if os.path.splitext(path)[1].lower() not in (".png", ".svg", ".pdf"):
        raise error(f"--plot {path}: the name must end in .png, .svg or .pdf")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, if rich is installed; else nothing."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda done: bar.update(task, completed=done)
