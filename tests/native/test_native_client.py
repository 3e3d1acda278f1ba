"""The header and the built extension as a C program and a Cython module see them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvreuse

FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-Wconversion", "-Werror"]


@pytest.fixture
def extension(backends_present):
    """The extension's file. A pure build has none: its legs have no such test."""
    if "core" not in backends_present:
        pytest.skip("a pure build has no extension")
    if shutil.which("cc") is None or shutil.which("nm") is None:
        pytest.skip("no C compiler or binutils")
    from kvreuse import _core

    return Path(_core.__file__)


def run(command, **options):
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=120, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_c_program_drives_the_handle_api(extension, root_dir, tmp_path):
    """H1: libc and libdl are all that it links; the extension's Python symbols are stand-ins that nothing calls."""
    missing = run(["nm", "-D", "--undefined-only", extension])
    names = sorted(set(re.findall(r"\b_?Py\w+", missing)))
    assert names
    stand_ins = tmp_path / "stand_ins.c"
    stand_ins.write_text("".join(f"char {name}[1024];\n" for name in names))
    program = tmp_path / "client"
    source = root_dir / "tests" / "native" / "client.c"
    run(["cc", *FLAGS, f"-I{kvreuse.get_include()}", source, "-c", "-o", tmp_path / "client.o"])
    run(["cc", "-fno-builtin", stand_ins, "-c", "-o", tmp_path / "stand_ins.o"])
    run(["cc", "-rdynamic", tmp_path / "client.o", tmp_path / "stand_ins.o", "-ldl", "-o", program])
    assert run([program, extension]) == "ok\n"


def test_cython_code_can_cimport_the_declarations(extension, tmp_path):
    """The .pxd: a module built against get_include() calls into the loaded extension."""
    (tmp_path / "probe.pyx").write_text(
        "from libc.stdint cimport int64_t\n"
        "from kvreuse._capi cimport kvr_echo, KVR_ABI_VERSION\n"
        "def echo(int64_t value):\n"
        "    cdef int64_t out = 0\n"
        "    kvr_echo(value, &out)\n"
        "    return out, KVR_ABI_VERSION\n"
    )
    package = Path(kvreuse.__file__).parent
    if not (package / "_capi.pxd").is_file():
        pytest.skip("this install has no declarations")
    run([sys.executable, "-m", "cython", "-3", "-I", package.parent, "probe.pyx"], cwd=tmp_path)
    include = run([sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('include'))"]).strip()
    run(
        ["cc", "-shared", "-fPIC", f"-I{include}", f"-I{kvreuse.get_include()}", "probe.c", "-o", "probe.so"],
        cwd=tmp_path,
    )
    code = (
        "import sys, os\n"
        "sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)\n"
        "import kvreuse._core\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import probe\n"
        "print(probe.echo(2**40 + 5))\n"
    )
    assert run([sys.executable, "-c", code]) == "(1099511627781, 1)\n"
