"""One process of the hammer: ``hammer.py writer|reader SOCKET COUNTS INDEX JOURNAL SEED``. It runs until it is killed.

Blocks say whose they are: a block's bytes are made of its key. The writer keeps a journal of what it does, so that the
next one knows what has to be there after a SIGKILL at any instruction.
"""

from __future__ import annotations

import mmap
import random
import sys
import time

import kvreuse

BLOCKS, KEYS, BLOCK_BYTES = 64, 400, 4096
LOST, WRONG, EXTRA = 3, 4, 5  # exit statuses


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> bytes:
    return number.to_bytes(8, "big") * (BLOCK_BYTES // 8)


def manifest() -> kvreuse.Manifest:
    return kvreuse.Manifest(
        model="m", weights_id="w", dtype="bfloat16", block_tokens=16, block_bytes=BLOCK_BYTES, layers=1, kv_heads=1,
        head_dim=1, layout="bytes", hash_scheme="test", hash_root="0",
    )  # fmt: skip


class Counter:
    """Calls made, in shared memory: one word of a file of 8 a process."""

    def __init__(self, path: str, index: int) -> None:
        with open(path, "r+b") as file:
            self._memory = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._index = index

    def add(self) -> None:
        self._memory[self._index] += 1


def present(journal: str) -> tuple[set[int], set[int], int]:
    """Read what the writers did: (blocks that were there, those that may be as well, how many may be gone)."""
    sealed: set[int] = set()
    maybe: set[int] = set()
    may_lose = 0
    with open(journal) as lines:
        for line in lines:
            if not line.endswith("\n"):
                break  # cut short by the SIGKILL: what it says had not begun
            word, *numbers = line.split()
            named = {int(number) for number in numbers}
            if word == "reserve":  # it may evict as many
                maybe, may_lose = named - sealed, len(named - sealed)
            elif word == "evicted":
                sealed -= named
                may_lose = 0
            elif word == "committed":
                sealed |= named
                maybe = set()
            else:  # "found": the next writer's inventory
                sealed, maybe, may_lose = named, set(), 0
    return sealed, maybe, may_lose


def check_restored(part: kvreuse.Part, journal: str) -> None:
    """K1: no sealed block is lost, no unfinished one is there; and every one has its own bytes."""
    found = {int.from_bytes(name, "big") for name in part.keys()}  # noqa: SIM118
    sealed, maybe, may_lose = present(journal)
    if len(sealed - found) > may_lose:
        print(f"lost: {sorted(sealed - found)}, at most {may_lose} may be", file=sys.stderr)
        sys.exit(LOST)
    if found - sealed - maybe:
        print(f"never sealed: {sorted(found - sealed - maybe)}", file=sys.stderr)
        sys.exit(EXTRA)
    for number in found:
        with part.claim([key(number)]) as claim:
            if len(claim) != 1 or claim.view(0) != content(number):
                print(f"wrong bytes in block {number}", file=sys.stderr)
                sys.exit(WRONG)


def write(path: str, counter: Counter, journal: str, seed: int) -> None:
    draw = random.Random(seed)
    keeper = kvreuse.connect(path, timeout=20)
    part = keeper.attach(manifest(), kvreuse.Rank(), blocks=BLOCKS, timeout=20)
    check_restored(part, journal)
    # One line a step, each in one write.
    log = open(journal, "a", buffering=1)  # noqa: SIM115
    log.write(f"found {' '.join(str(int.from_bytes(name, 'big')) for name in part.keys())}\n")  # noqa: SIM118
    print("ready", flush=True)
    while True:
        first = draw.randrange(KEYS)
        numbers = [(first + i) % KEYS for i in range(draw.randint(1, 6))]
        log.write(f"reserve {' '.join(map(str, numbers))}\n")
        try:
            made = part.reserve([key(n) for n in numbers], evict=True)
        except kvreuse.NoSpaceError:  # readers hold too much
            log.write("evicted\n")
            continue
        log.write(f"evicted {' '.join(str(int.from_bytes(name, 'big')) for name in made.evicted)}\n")
        for i, n in enumerate(numbers):
            if made.slots[i] >= 0:
                made.view(i)[:] = content(n)
        if draw.random() < 0.1:
            made.abort()
        else:
            made.commit()
            log.write(f"committed {' '.join(map(str, numbers))}\n")
        part.touch([key(n) for n in numbers])
        if draw.random() < 0.01:
            sealed, _, _ = present(journal)
            found = {int.from_bytes(name, "big") for name in part.keys()}  # noqa: SIM118
            if found != sealed:
                print(f"the model has {sorted(sealed)}, the part {sorted(found)}", file=sys.stderr)
                sys.exit(LOST)
        counter.add()


def read(path: str, counter: Counter, seed: int) -> None:
    draw = random.Random(seed)
    keeper = kvreuse.connect(path, timeout=20)
    group = keeper.group(manifest=manifest(), read_data=True)
    print("ready", flush=True)
    while True:
        first = draw.randrange(KEYS)
        numbers = [(first + i) % KEYS for i in range(draw.randint(1, 4))]
        keys = [key(n) for n in numbers]
        with group.claim(keys, tag="one" if draw.random() < 0.3 else None) as claim:
            for _ in range(2):  # the bytes stay as long as the claim
                for i in range(len(claim)):
                    if claim.view(0, i) != content(numbers[i]):
                        print(f"wrong bytes in claimed block {numbers[i]}", file=sys.stderr)
                        sys.exit(WRONG)
            if len(claim) and draw.random() < 0.05:
                time.sleep(0.01)
        if draw.random() < 0.2:
            group.touch(keys)
        counter.add()


def main() -> None:
    role, path, counts, index, journal, seed = sys.argv[1:]
    counter = Counter(counts, int(index))
    if role == "writer":
        write(path, counter, journal, int(seed))
    else:
        read(path, counter, int(seed))


if __name__ == "__main__":
    main()
