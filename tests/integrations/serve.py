"""A vLLM that does what it is told: JSON lines in from stdin, JSON lines out to the fd that $ANSWERS names.

Usage: serve.py ARGUMENTS, JSON of `LLM`'s arguments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Server:
    """One engine."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.answers = os.fdopen(int(os.environ.pop("ANSWERS")), "w", buffering=1)
        started = time.monotonic()
        self.llm = LLM(**arguments)
        self.tell(started=time.monotonic() - started)

    def tell(self, **answer: Any) -> None:
        self.answers.write(json.dumps(answer) + "\n")

    def serve(self, prompts: list[list[int]], max_tokens: int, aborts: dict[str, int], at_once: int) -> None:
        """Serve prompts, `at_once` of them at a time; prompt i is aborted aborts[i] steps after it was added."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        waiting, running = list(range(len(prompts)))[::-1], dict[int, tuple[float, int]]()
        names: dict[int, str] = {}
        first: set[int] = set()
        while waiting or running:
            while waiting and len(running) < at_once:
                i = waiting.pop()
                names[i] = engine.add_request(f"request-{i}", {"prompt_token_ids": prompts[i]}, parameters)
                running[i] = (time.monotonic(), 0)
            for output in engine.step():
                i = int(output.request_id.removeprefix("request-").partition("-")[0])
                if i not in running:
                    continue
                started = running[i][0]
                if i not in first and output.outputs[0].token_ids:
                    first.add(i)
                    self.tell(first=i, seconds=time.monotonic() - started, cached=output.num_cached_tokens)
                if output.finished:
                    del running[i]
                    self.tell(
                        done=i,
                        tokens=list(output.outputs[0].token_ids),
                        cached=output.num_cached_tokens,
                        seconds=time.monotonic() - started,
                    )
            for i, (started, steps) in list(running.items()):
                running[i] = (started, steps + 1)
                if aborts.get(str(i)) == steps:
                    engine.abort_request([names[i]])
                    del running[i]
                    self.tell(aborted=i)
        while engine.has_unfinished_requests():
            engine.step()
        self.tell(end=True)

    def reset(self) -> None:
        self.tell(end=bool(self.llm.reset_prefix_cache(reset_connector=True)))

    def reset_local(self) -> None:
        self.tell(end=bool(self.llm.reset_prefix_cache()))

    def reload_weights(self) -> None:
        self.llm.collective_rpc("reload_weights")
        self.tell(end=True)


def main() -> None:
    server = Server(json.loads(sys.argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        getattr(server, order.pop("do"))(**order)


if __name__ == "__main__":
    main()
