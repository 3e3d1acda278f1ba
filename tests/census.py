"""Find dead tests: skipped in every leg of CI. Usage: census.py RECORD...; conftest.py writes the records."""

from __future__ import annotations

import json
import sys
from pathlib import Path

# Always skipped, so it must be in the report: otherwise the census itself is broken.
CANARY = "tests/test_packaging.py::test_census_canary"

# Tests that no CI machine can run: {node id: why}.
ALLOWED: dict[str, str] = {}


def dead_tests(records: list[dict[str, str]]) -> dict[str, str]:
    """Tests that some record has as skipped and none as run, each with a reason that was given."""
    ran = {test for record in records for test, outcome in record.items() if outcome == "ran"}
    return {test: outcome for record in records for test, outcome in record.items() if test not in ran}


def main(paths: list[str]) -> int:
    records = [json.loads(Path(path).read_text()) for path in paths]
    dead = dead_tests(records)
    print(f"census: {len(records)} legs, {len({test for r in records for test in r})} tests")
    unexpected = sorted(dead.keys() - ALLOWED.keys() - {CANARY})
    for test in sorted(dead):
        why = "the canary" if test == CANARY else ALLOWED.get(test, "NOT ALLOWED")
        print(f"  skipped in every leg: {test} ({why}; {dead[test]})")
    if CANARY not in dead:
        print(f"census: FAILED: the canary {CANARY} is not in the report")
    if unexpected:
        print(f"census: FAILED: {len(unexpected)} tests ran in no leg; run them, or say why not in ALLOWED")
    return int(bool(unexpected) or CANARY not in dead)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
