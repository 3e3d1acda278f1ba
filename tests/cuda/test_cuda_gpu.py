"""The life of CUDA memory on this machine's driver: `make test-gpu` where there is a GPU; the fake one elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.gpu
def test_on_this_machines_driver(backend_name, request):
    """H4, H5: sizes, kinds and bytes as declared; the importer outlives the exporter. `-s` shows the answers."""
    environ = dict(os.environ)
    probe = subprocess.run(
        [sys.executable, "-c", "import ctypes; raise SystemExit(ctypes.CDLL('libcuda.so.1').cuInit(0))"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    is_real = probe.returncode == 0
    if not is_real:
        environ["LD_LIBRARY_PATH"] = str(request.getfixturevalue("driver_dir"))
    script = Path(__file__).with_name("on_driver.py")
    done = subprocess.run(
        [sys.executable, str(script), backend_name],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=script.parent,
    )
    print(f"\n{backend_name} on the {'driver of this machine' if is_real else 'fake driver'}:\n{done.stdout}")
    lines = done.stdout.splitlines()
    assert lines[-1:] == ["ok"], done.stderr
    assert "fds left: 0" in lines
    answers = dict(line.split(": ", 1) for line in lines[:-1])
    assert answers["a map larger than the allocation"] == "SizeMismatchError cuMemMap 1"
    for question in ("an fd that is no CUDA memory", "64 zero bytes as a fabric handle"):
        assert answers[question].split()[1] == "cuMemImportFromShareableHandle"
