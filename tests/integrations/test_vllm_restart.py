"""vLLM is killed and started again; its KV cache stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import kvreuse
import kvreuse.testing

ON = "[reuse]\nenabled = true\n"
REQUESTS = 100
# When so many are done vLLM is killed, in the middle of others.
KILL_AFTER = 60


def tokens(served):
    return {i: found["tokens"] for i, found in served.items()}


def hits(served, indices):
    """Blocks loaded or found, and blocks that could be."""
    from engine import full_blocks, prompts
    from tiny_model import BLOCK_TOKENS

    asked = prompts(REQUESTS)
    return (
        sum(served[i]["cached"] // BLOCK_TOKENS for i in indices),
        sum(full_blocks(asked[i]) for i in indices),
    )


def serve_and_kill(engine, asked, done=KILL_AFTER):
    """Kill all of vLLM in the middle of serving; give the requests that were done by then."""
    engine.serve(asked, wait=False)
    finished = read_done(engine, done)
    engine.kill()
    return finished


def read_done(engine, count):
    finished = []
    for answer in engine.answers():
        if "done" in answer:
            finished.append(answer["done"])
            if len(finished) == count:
                break
    return finished


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_vllm_finds_its_blocks_again(ranks, start, cold):
    """K1, R5: after SIGKILL in the middle of serving, at least 99 % of the finished requests' full blocks are hits, and
    all outputs are those of a vLLM that never had a cache, token by token."""
    from engine import prompts

    asked = prompts(REQUESTS)
    expected = cold(asked, ranks=ranks)
    with kvreuse.testing.keeper(ON) as socket, kvreuse.connect(socket) as keeper:
        finished = serve_and_kill(start(socket, ranks), asked)
        with start(socket, ranks) as engine:
            assert engine.says().count("RESTORED(") >= ranks
            # One at a time: nothing is found in vLLM's own cache that was not found in the keeper's before.
            again = engine.serve([asked[i] for i in finished], at_once=1)
            again = {i: again[place] for place, i in enumerate(finished)}
            found, possible = hits(again, finished)
            print(f"tp {ranks}: {found} of {possible} full blocks are hits")
            assert found >= 0.99 * possible
            rest = engine.serve(asked)
            assert tokens(rest) == expected
            assert tokens(again) == {i: expected[i] for i in finished}
            assert all(part["claimed"] == 0 for part in keeper.status()["parts"])


def test_killed_worker_of_one_rank_loses_nothing_and_a_lost_part_is_cold(start, cold):
    """R4, R5: SIGKILL of one rank's worker alone ends that vLLM; the next one has the common prefix of all ranks. Where
    one rank's part is gone there are no hits until it is filled again; outputs are right throughout."""
    from engine import prompts

    asked = prompts(REQUESTS)
    expected = cold(asked, ranks=2)
    with kvreuse.testing.keeper(ON) as socket, kvreuse.connect(socket) as keeper:
        first = start(socket, ranks=2)
        first.serve(asked, wait=False)
        finished = read_done(first, KILL_AFTER)
        os.kill(first.worker_pid(1), signal.SIGKILL)
        with pytest.raises(EOFError):
            for _ in first.answers():
                pass
        first.kill()

        with start(socket, ranks=2) as engine:
            again = engine.serve([asked[i] for i in finished], at_once=1)
            found, possible = hits({i: again[place] for place, i in enumerate(finished)}, finished)
            assert found >= 0.99 * possible
            assert tokens(engine.serve(asked)) == expected

        (lost,) = (part for part in keeper.status()["parts"] if part["rank"]["tp"] == 1)
        keeper.release(bytes.fromhex(lost["part_id"]))
        with start(socket, ranks=2) as engine:
            served = engine.serve(asked[:1])
            assert served[0]["cached"] == 0
            assert tokens(engine.serve(asked)) == expected
        with start(socket, ranks=2) as engine:
            served = engine.serve(asked[:1])
            assert served[0]["cached"] > 0
            assert tokens(served) == {0: expected[0]}


def test_other_manifest_is_empty_with_the_field_named(start, cold):
    """R3, I4: other weights, another dtype, another block size: EMPTY, the log names the field, outputs are right."""
    from engine import prompts

    asked = prompts(20)
    with kvreuse.testing.keeper(ON) as socket:
        for field, changes in (
            ("new", {}),
            ("weights_id", {"seed": 1}),
            ("dtype", {"dtype": "bfloat16"}),
            ("block_tokens", {"block_size": 64}),
        ):
            expected = cold(asked, **changes)
            with start(socket, **changes) as engine:
                says = engine.says()
                assert "EMPTY(" in says
                assert field in says.partition("EMPTY(")[2].partition("\n")[0]
                served = engine.serve(asked, at_once=1)
                assert served[0]["cached"] == 0
                assert tokens(served) == expected


def test_declared_weights_id_decides(start):
    """I4: a declared weights_id stands for the weights; another one is EMPTY, though the files are the same."""
    from engine import prompts

    asked = prompts(4)
    with kvreuse.testing.keeper(ON) as socket:
        for name, outcome in (("a", "EMPTY(new"), ("a", "RESTORED("), ("b", "weights_id: 'declared:a' kept")):
            with start(socket, extra={"weights_id": name}) as engine:
                assert outcome in engine.says()
                engine.serve(asked)


def test_without_a_profile_nothing_is_kept(start, cold):
    """P1: a keeper without a profile, or no keeper: vLLM serves, nothing is loaded or stored, and it says why."""
    from engine import prompts

    asked = prompts(10)
    expected = cold(asked)
    with kvreuse.testing.keeper() as socket, kvreuse.connect(socket) as keeper:
        with start(socket) as engine:
            assert "nothing is loaded and nothing is stored: reuse is off" in engine.says()
            assert tokens(engine.serve(asked)) == expected
        assert keeper.status()["parts"] == []
    with start(socket) as engine:
        assert "nothing is loaded and nothing is stored: no keeper answers" in engine.says()
        assert tokens(engine.serve(asked)) == expected


def test_the_example_runs(root_dir):
    """One command; its last lines say that nothing was computed differently."""
    script = root_dir / "examples" / "vllm_restart" / "restart.py"
    done = subprocess.run(
        [sys.executable, str(script), "--requests", "6"], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "outputs equal: 6 of 6" in done.stdout
    assert "RESTORED(" in done.stdout
