"""What goes wrong while vLLM serves: damage, aborts, preemptions, resets, weights that change."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import kvreuse
import kvreuse.testing

ON = "[reuse]\nenabled = true\n"
ALWAYS = ON + '[checksum]\nwhen = "always"\n'


def tokens(served):
    return {i: found["tokens"] for i, found in served.items()}


def damage(keeper, slots):
    """Overwrite a few bytes in slots of the one part, through the keeper's fd."""
    status = keeper.status()
    (part,) = status["parts"]
    folder = Path("/proc", str(status["pid"]), "fd")
    for name in os.listdir(folder):
        target = os.readlink(folder / name)
        if target.startswith("/memfd:kvreuse:") and part["part_id"][:8] in target and ":data" in target:
            fd = os.open(folder / name, os.O_RDWR)
            for slot in slots:
                os.pwrite(fd, b"damaged!", slot * part["block_bytes"] + 1000)
            os.close(fd)
            return
    raise AssertionError(f"the part's data is not among {sorted(os.readlink(folder / n) for n in os.listdir(folder))}")


def test_damaged_block_is_computed_again(start, cold):
    """R1: under the policy `always` a block that differs from its checksum is not loaded: it is computed again."""
    from engine import full_blocks, prompts
    from tiny_model import BLOCK_TOKENS

    asked = prompts(100)[-1:]
    expected = cold(asked)
    blocks = full_blocks(asked[0])
    with kvreuse.testing.keeper(ALWAYS) as socket, kvreuse.connect(socket) as keeper:
        with start(socket) as engine:
            engine.serve(asked)
        with start(socket) as engine:  # verified at attach, damaged after it
            assert "RESTORED(" in engine.says()
            damage(keeper, range(4, blocks))
            served = engine.serve(asked)
            assert tokens(served) == expected
            # vLLM goes on to count as cached what it had to compute: the part knows what was taken out.
            assert keeper.status()["parts"][0]["corrupt_total"] == blocks - 4
            assert "at its commit it had" in engine.says()
            assert engine.call("reset_local")
            served = engine.serve(asked)  # stored anew
            assert served[0]["cached"] == blocks * BLOCK_TOKENS
            assert tokens(served) == expected
        damage(keeper, range(4, blocks))
        with start(socket) as engine:
            assert "damaged data freed" in engine.says()
            served = engine.serve(asked)
            assert tokens(served) == expected
            assert served[0]["cached"] < blocks * BLOCK_TOKENS


def test_aborts_and_preemptions_leak_no_claim(start, cold):
    """O2, R1: 500 requests with a tiny cache of vLLM's, a small part that evicts, and aborts at any step: no claim is
    left, no block is wrong, and every output is right."""
    from engine import prompts

    asked = [prompt[: random.Random(i).randrange(40, 1000)] for i, prompt in enumerate(prompts(500, seed=3))]
    expected = cold(asked, max_tokens=24)
    source = random.Random(7)
    aborts = {i: source.randrange(30) for i in range(len(asked)) if source.random() < 0.3}
    tiny = {"extra": {"blocks": 300}, "num_gpu_blocks_override": 80, "max_model_len": 2048}
    with kvreuse.testing.keeper(ALWAYS) as socket, kvreuse.connect(socket) as keeper:
        with start(socket, **tiny) as engine:
            for _ in range(2):
                served = engine.serve(asked, max_tokens=24, aborts=aborts, at_once=12)
                assert set(served) >= set(range(len(asked))) - set(aborts)
                assert tokens(served) == {i: expected[i] for i in served}
                (part,) = keeper.status()["parts"]
                assert part["claimed"] == 0
                assert part["corrupt_total"] == 0
            assert part["evicted_total"] > 0
            assert "Traceback" not in engine.log()
        with start(socket, **tiny) as engine:
            assert "RESTORED(" in engine.says()
            assert "damaged" not in engine.says()


@pytest.mark.parametrize("how", ["reset", "reload_weights"])
def test_emptied_cache_gives_nothing(how, start, cold):
    """I4: reset_prefix_cache(reset_connector=True) empties the cache; so does an update of the weights at run time, and
    then nothing is stored any more, because the manifest names the weights of before."""
    from engine import prompts

    asked = prompts(12)
    expected = cold(asked)
    with kvreuse.testing.keeper(ON) as socket, kvreuse.connect(socket) as keeper:
        with start(socket) as engine:
            assert tokens(engine.serve(asked)) == expected
            assert engine.call(how)
            assert engine.call("reset_local")
            assert [part["sealed"] for part in keeper.status()["parts"]] == [0]
            served = engine.serve(asked[:1])
            assert served[0]["cached"] == 0
            assert tokens(engine.serve(asked)) == expected
        (part,) = keeper.status()["parts"]
        assert (part["sealed"] > 0) == (how == "reset")
