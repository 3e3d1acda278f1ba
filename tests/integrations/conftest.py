from __future__ import annotations

import faulthandler
import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent.parent / "examples" / "vllm_restart"))  # tiny_model


def pytest_collection_modifyitems(items):
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:  # a folder that is named so has none
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="vllm is not installed"))


@pytest.fixture(autouse=True)
def _long_tests():
    """A vLLM takes 10 s to start, and more on a busy machine: every wait has a bound of its own here."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """``make_model(seed)`` gives a model's folder; made once a seed."""
    made = {}

    def make(seed=0):
        if seed not in made:
            import tiny_model

            made[seed] = tiny_model.write(tmp_path_factory.mktemp(f"model-{seed}"), seed)
        return made[seed]

    return make


@pytest.fixture(scope="session")
def cold(make_model, tmp_path_factory):
    """``cold(prompts, ...)`` gives the tokens of a vLLM without a connector."""
    from engine import Engine

    known = {}

    def run(prompts, max_tokens=8, seed=0, ranks=1, **changes):
        key = repr((prompts, max_tokens, seed, ranks, sorted(changes.items())))
        if key not in known:
            with Engine(tmp_path_factory.mktemp("cold"), make_model(seed), ranks, **changes) as engine:
                known[key] = {i: found["tokens"] for i, found in engine.serve(prompts, max_tokens).items()}
        return known[key]

    return run


@pytest.fixture
def start(make_model, tmp_path):
    """``start(socket, ...)`` starts a vLLM with the connector; what still runs is killed at the end."""
    from engine import Engine, transfer

    started = []

    def run(socket, ranks=1, seed=0, extra=None, **changes):
        changes.setdefault("kv_transfer_config", transfer(socket, **(extra or {})))
        started.append(Engine(tmp_path, make_model(seed), ranks, **changes))
        return started[-1]

    yield run
    for engine in started:
        if engine.process.poll() is None:
            engine.kill()
