"""What the CUDA tests need: the fake driver, built; processes in which it is libcuda.so.1."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))
import fakedriver  # noqa: E402


@pytest.fixture(scope="session")
def driver_dir() -> Path:
    """The folder of the fake libcuda.so.1."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    if not fakedriver.cuda_headers():
        pytest.skip("no cuda.h: install nvidia-cuda-runtime")
    return fakedriver.build()


@pytest.fixture(scope="session")
def cuda_head(driver_dir) -> str:
    """The first lines of a program over the fake driver: `fake` is its control; kvreuse, errors, os, sys, ctypes."""
    return (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n"
        "import ctypes, os, fakedriver\nfrom pathlib import Path\n"
        f"fake = fakedriver.Fake(Path({str(driver_dir)!r}))\n"
        "import kvreuse\nfrom kvreuse import errors\n"
    )


def environ_of(driver_dir, settings) -> dict[str, str]:
    """Where the fake driver is found, and its settings."""
    found = {"LD_LIBRARY_PATH": str(driver_dir)}
    if settings:
        found["FAKE_CUDA"] = ",".join(f"{key}={value}" for key, value in settings.items())
    return found


@pytest.fixture
def run_cuda(run_python, cuda_head, driver_dir):
    """`run_python` with the fake driver as libcuda.so.1: ``run_cuda(code, *args, settings={...}, backend=...)``."""

    def run(code, *args, settings=None, **more):
        return run_python(cuda_head + code, *args, env=environ_of(driver_dir, settings), **more)

    return run


@pytest.fixture
def start_cuda(cuda_head, driver_dir):
    """Start a program like `run_cuda`'s: a Popen whose stdout is a pipe; at the end it is killed."""
    started = []

    def start(code, *args, backend, settings=None):
        environ = {**os.environ, **environ_of(driver_dir, settings), "KVREUSE_BACKEND": backend}
        command = [sys.executable, "-W", "error", "-c", cuda_head + code, *args]
        process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(20)
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def run_scenario(driver_dir):
    """Run scenario.py over "core", "fallback" or a compiled library; of another package folder if one is given."""

    def run(name, package_root=None):
        path = [str(package_root)] if package_root else []
        path += [each for each in (os.environ.get("PYTHONPATH"),) if each]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "KVREUSE_BACKEND": "auto"}
        if package_root:
            environ["KVREUSE_BACKEND"] = "fallback"
        command = [sys.executable, "-X", "faulthandler", str(FOLDER / "scenario.py"), str(name)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=environ, check=False, cwd=FOLDER
        )

    return run
