"""What the CUDA tests need: the fake driver, built; processes in which it is libcuda.so.1."""

from __future__ import annotations

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


@pytest.fixture
def run_cuda(run_python, driver_dir):
    """`run_python` with the fake driver as libcuda.so.1: ``run_cuda(code, *args, settings={...}, backend=...)``.

    The code finds `fake` (the driver's control), `kvreuse`, `os`, `sys` and `ctypes` imported.
    """
    head = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n"
        "import ctypes, os, fakedriver\nfrom pathlib import Path\n"
        f"fake = fakedriver.Fake(Path({str(driver_dir)!r}))\n"
        "import kvreuse\nfrom kvreuse import errors\n"
    )

    def run(code, *args, settings=None, env=None, **more):
        environ = {"LD_LIBRARY_PATH": str(driver_dir), **(env or {})}
        if settings:
            environ["FAKE_CUDA"] = ",".join(f"{key}={value}" for key, value in settings.items())
        return run_python(head + code, *args, env=environ, **more)

    return run


@pytest.fixture
def run_scenario(driver_dir, root_dir):
    """Run scenario.py over "core", "fallback" or a compiled library; of another package folder if one is given."""

    def run(name, package_root=None):
        import os

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
