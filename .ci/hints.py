"""Fail on a Cython "performance hint": a nogil function that takes the GIL at every call. Usage: hints.py FILE.pyx"""

from __future__ import annotations

import subprocess
import sys
import tempfile

with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "cython", "-3", "-o", f"{folder}/out.c", sys.argv[1]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
log = done.stdout + done.stderr
hints = log.lower().count("performance hint")
if hints or done.returncode:
    print(log)
print(f"hints: {hints} in {sys.argv[1]}, cython exit {done.returncode}")
sys.exit(bool(hints or done.returncode))
