"""What `kvreuse status` prints for people; --json prints the same as one object."""

from __future__ import annotations

import time
from typing import Any


def render(status: dict[str, Any]) -> str:
    """Make the text: the keeper, one line a part with its workers, and what was emptied last and why."""
    lines = [
        f"keeper {status['version']}, pid {status['pid']}, label {status['label']}, {status['clients']} client(s)",
        f"reuse: {status['reuse']}",
        f"held: {_size(status['bytes'])} of {_size(status['max_bytes'])}, "
        f"{_size(status['waiting_bytes'])} of it without a worker",
        f"pending reclaim: {_size(status['pending_reclaim'])}",
        f"keeper: {status['keeper_fds']} fds, {status['keeper_memory_fds']} of them memory, "
        f"{status['keeper_mappings']} mappings",
    ]
    if "unattributed_bytes" in status:
        unseen = status["unreadable_processes"]
        beside = f" ({unseen} process(es) of other users not looked into)" if unseen else ""
        lines.append(f"unattributed bytes: {_size(status['unattributed_bytes'])}{beside}")
    for item in status["retired"]:
        who = f", held by pid {', '.join(map(str, item['pids']))}" if item["pids"] else ""
        lines.append(f"  {item['part_id'][:8]}  retired, {_size(item['bytes'])} still to come back{who}")
    for group in status["groups"]:
        lines.append(f"group {group['group']} (dp {group['dp']}): {group['readiness']}")
    lines.append(f"parts: {len(status['parts'])}")
    for part in status["parts"]:
        lines.append(
            f"  {part['part_id'][:8]}  {_place(part)}  {part['state']}  "
            f"{part['sealed']} of {part['blocks']} blocks of {_size(part['block_bytes'])}, {part['claimed']} claimed, "
            f"{part['evicted_total']} evicted, {part['corrupt_total']} corrupt"
        )
        for session in part["sessions"]:
            lines.append(f"            {_session(session)}")
        if part["waiting_since"]:
            lines.append(f"            without a worker for {time.monotonic() - part['waiting_since']:.0f} s")
    if status["last_emptied"]:
        lines.append("last emptied:")
        lines += [f"  {_place(entry)}: {entry['reason']}" for entry in status["last_emptied"]]
    return "\n".join(lines)


def _session(session: dict[str, Any]) -> str:
    words = [f"{session['role']} pid {session['pid']}", f"{_size(session['bytes'])}"]
    words.append("connected" if session["connected"] else "disconnected")
    if session["role"] == "writer":
        words.append(f"attached as {session['outcome']}" if session["outcome"] else "not confirmed yet")
    done, total = session["progress"]
    if done < total:
        words.append(f"{done} of {total} done")
    if session["stalled"]:
        words.append("stalled")
    return ", ".join(words)


def _place(entry: dict[str, Any]) -> str:
    rank = ", ".join(f"{axis} {number}" for axis, number in entry["rank"].items() if axis != "dp")
    return f"{entry['group']} (dp {entry['dp']}) {rank}"


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
