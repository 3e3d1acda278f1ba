"""What the connector costs a vLLM that finds nothing: no connector, ours, and vLLM's own example connector.

Usage: python bench/bench_vllm.py [--requests N] [--rounds R]; not a pytest benchmark: each point starts a vLLM.
All do the same work: N prompts that share nothing, one after the other, cold; then the same again from the connector's
store alone (vLLM's own cache is emptied between).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "integrations"), str(ROOT / "examples" / "vllm_restart")]

import tiny_model  # noqa: E402
from engine import Engine, transfer  # noqa: E402

import kvreuse.testing  # noqa: E402

ON = "[reuse]\nenabled = true\n"
BLOCKS = 32


def prompts(count: int, number: int) -> list[list[int]]:
    """Give prompts of full blocks and one token more, none with another's prefix."""
    nbytes = BLOCKS * tiny_model.BLOCK_TOKENS + 1
    return [[4 + (i * 7919 + place * place * (number + 2)) % 500 for place in range(nbytes)] for i in range(count)]


def times(engine: Engine, asked: list[list[int]]) -> tuple[float, float, int, dict[int, list[int]]]:
    """Serve one after the other; (seconds in all, median seconds to a request's end, cached tokens, outputs)."""
    started = time.monotonic()
    served = engine.serve(asked, at_once=1)
    took = time.monotonic() - started
    middle = statistics.median(found["seconds"] for found in served.values())
    cached = sum(found["cached"] for found in served.values())
    return took, middle, cached, {i: found["tokens"] for i, found in served.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvreuse-bench-") as folder, kvreuse.testing.keeper(ON) as socket:
        model = tiny_model.write(Path(folder, "model"), layers=8, heads=16)
        example = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(Path(folder, "shared"))},
        }
        configs = {"no connector": None, "kvreuse": transfer(socket), "vLLM's example connector": example}
        engines = {}
        try:
            for name, config in configs.items():
                changes = {} if config is None else {"kv_transfer_config": config}
                engines[name] = Engine(Path(folder), model, **changes)
                times(engines[name], prompts(4, -1))  # warm
            return measure(engines, options.requests, options.rounds)
        finally:
            for engine in engines.values():
                engine.kill()


def measure(engines: dict[str, Engine], requests: int, rounds: int) -> int:
    """Take rounds in turns, so that what else the machine does hits all alike; print medians."""
    cold: dict[str, list[float]] = {name: [] for name in engines}
    again: dict[str, list[float]] = {name: [] for name in engines}
    cached: dict[str, int] = {}
    outputs = []
    for number in range(rounds):
        asked = prompts(requests, number)
        for name, engine in engines.items():
            engine.call("reset_local")
            _, middle, found, tokens = times(engine, asked)
            assert found == 0
            cold[name].append(middle)
            engine.call("reset_local")
            _, middle, cached[name], tokens_again = times(engine, asked)
            again[name].append(middle)
            outputs += [(number, tokens), (number, tokens_again)]
    equal = all(tokens == next(first for n, first in outputs if n == number) for number, tokens in outputs)
    possible = requests * BLOCKS * tiny_model.BLOCK_TOKENS
    print(f"{requests} prompts of {BLOCKS} blocks of {tiny_model.BLOCK_TOKENS} tokens, 8 tokens each, {rounds} rounds")
    print(f"{'':26} {'cold ms':>8} {'x':>6} {'again ms':>9} {'x':>6} {'cached tokens':>14} (of {possible})")
    base_cold, base_again = (statistics.median(found["no connector"]) for found in (cold, again))
    for name in engines:
        first, second = statistics.median(cold[name]), statistics.median(again[name])
        print(
            f"{name:26} {1000 * first:8.1f} {first / base_cold:6.2f} {1000 * second:9.1f} {second / base_again:6.2f} "
            f"{cached[name]:14}"
        )
    print(f"outputs equal: {equal}")
    return int(not equal)


if __name__ == "__main__":
    raise SystemExit(main())
