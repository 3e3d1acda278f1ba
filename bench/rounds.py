"""What the benchmarks of calls share: the loop that times them, and the rounds in which they take turns."""

from __future__ import annotations

import random
import time

CALLS, ROUNDS = 100, 61


def timed(function, *columns) -> tuple[float, list]:
    """ns a call over columns of CALLS arguments, and the results. `map` calls as C does: the loop costs a few ns."""
    begun = time.perf_counter_ns()
    results = list(map(function, *columns))
    return (time.perf_counter_ns() - begun) / CALLS, results


def take_turns(sources) -> dict[str, list]:
    """Call each source ROUNDS times: {name: results}.

    What ran before leaves the kernel's queues in another state, so nobody always comes after the same one.
    """
    order = random.Random(0)
    rounds: dict[str, list] = {name: [] for name in sources}
    for _ in range(ROUNDS):
        for name in order.sample(sorted(sources), len(sources)):
            sources[name]()  # its code and memory are warm, then it counts
            rounds[name].append(sources[name]())
    return rounds
