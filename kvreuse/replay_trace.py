"""Traces for `kvreuse replay`: reading Mooncake's format, and a workload made here."""

from __future__ import annotations

import os
import random

import msgspec
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
ID_MAX = 2**63 - 1
GENERATED_REQUESTS = 2000


class TraceError(Exception):
    """The trace cannot be played; the text is `FILE:LINE: what`."""


def load(path: str | os.PathLike[str], limit: int | None = None) -> list[Ids]:
    """Read the hash_ids of a trace's requests, checking everything before anything is played.

    Parameters
    ----------
    path : path
        JSON lines with timestamp, input_length, output_length (numbers, 0 or more) and hash_ids (a list of integers
        from 0 to 2^63 - 1). Blank lines are skipped.
    limit : int, optional
        Read only so many requests.

    Returns
    -------
    list of int64 arrays
        One a request, in file order.

    Raises
    ------
    TraceError
    """
    requests: list[Ids] = []
    number = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    requests.append(_parse(line, f"{path}:{number}"))
                    if limit is not None and len(requests) >= limit:
                        break
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    if not requests:
        raise TraceError(f"{path}:{max(number, 1)}: the trace has no request")
    return requests


def _parse(line: bytes, where: str) -> Ids:
    try:
        data = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise TraceError(f"{where}: expected an object, got {type(data).__name__}")
    for key in ("timestamp", "input_length", "output_length"):
        value = data.get(key, data)
        if value is data:
            raise TraceError(f"{where}: lacks {key}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise TraceError(f"{where}: {key} must be a number of 0 or more, got {value!r}")
    if "hash_ids" not in data:
        raise TraceError(f"{where}: lacks hash_ids")
    ids = data["hash_ids"]
    if not isinstance(ids, list):
        raise TraceError(f"{where}: hash_ids must be a list, got {type(ids).__name__}")
    # By type, not isinstance: a bool is no id, and a float is none even where it is whole.
    for i, value in enumerate(ids):
        if type(value) is not int or not 0 <= value <= ID_MAX:
            raise TraceError(f"{where}: hash_ids[{i}] must be an integer from 0 to 2^63 - 1, got {value!r}")
    return np.array(ids, np.int64)


def generate(requests: int = GENERATED_REQUESTS, seed: int = 0) -> list[Ids]:
    """Make a deterministic workload: conversations of several turns that interleave, over a few shared system prompts.

    Returns
    -------
    list of int64 arrays
        One a request: the system prompt's blocks, then the conversation's so far.
    """
    source = random.Random(seed)
    fresh = iter(range(ID_MAX))
    systems = [[next(fresh) for _ in range(source.randint(2, 12))] for _ in range(8)]
    talks: list[list[int]] = []
    made: list[Ids] = []
    while len(made) < requests:
        if not talks or source.random() < 0.25:
            talks.append(list(source.choice(systems)))
        index = source.randrange(max(0, len(talks) - 24), len(talks))
        talks[index].extend(next(fresh) for _ in range(source.randint(1, 6)))
        made.append(np.array(talks[index], np.int64))
        if len(talks[index]) > 80:
            talks.pop(index)
    return made
