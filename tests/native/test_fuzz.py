"""The raw C API under AddressSanitizer and UndefinedBehaviorSanitizer (`make fuzz` makes a million calls)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

FLAGS = ["-std=c11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra"]


def build(root_dir, folder, name, native=None):
    """Compile a program with the C sources, or those in `native`, under the sanitizers."""
    native = native or root_dir / "kvreuse" / "native"
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    program = folder / name
    sources = [root_dir / "tests" / "native" / f"{name}.c", *sorted(native.glob("*.c"))]
    includes = [f"-I{root_dir / 'include'}", f"-I{native}"]
    command = [compiler, *FLAGS, *includes, *map(str, sources), "-pthread", "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if "cannot find" in built.stderr and "asan" in built.stderr:
        pytest.skip("no sanitizer libraries")
    assert built.returncode == 0, built.stderr
    return program


@pytest.fixture(scope="module")
def fuzz(root_dir, tmp_path_factory):
    return build(root_dir, tmp_path_factory.mktemp("fuzz"), "fuzz_calls")


@pytest.fixture(scope="module")
def environ(root_dir):
    """With the fake CUDA driver as libcuda.so.1, where it can be built."""
    sys.path.insert(0, str(root_dir / "tests" / "cuda"))
    import fakedriver

    if not fakedriver.cuda_headers():
        pytest.skip("no cuda.h: install nvidia-cuda-runtime")
    settings = "fabric_attribute=1,fabric_create_result=0"
    return {**os.environ, "LD_LIBRARY_PATH": str(fakedriver.build()), "FAKE_CUDA": settings}


def test_random_calls_end_in_a_status(fuzz, environ):
    """H2, H7: random handles, numbers, keys and damage; no report, and nothing is open at the end."""
    calls = os.environ.get("KVREUSE_FUZZ_CALLS", "20000")
    for seed in ("1", "3") if calls == "20000" else ("1",):
        done = subprocess.run(
            [fuzz, calls, seed], capture_output=True, text=True, check=False, timeout=1500, env=environ
        )
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout)


def test_threads_on_one_anothers_handles(root_dir, tmp_path, environ):
    """G4: what a call works on stays until it is done; no report, nothing is open at the end (see `make tsan`)."""
    program = build(root_dir, tmp_path, "stress_handles")
    done = subprocess.run([program, "2000"], capture_output=True, text=True, check=False, timeout=120, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "open at the end: 0 regions, 0 mappings, 0 fds\n"


# ---- copies ----


def run_copies(program, rounds):
    return subprocess.run([program, str(rounds)], capture_output=True, text=True, check=False, timeout=300)


def test_threads_on_one_anothers_copies(root_dir, tmp_path):
    """O1-O7: buffers are freed, slots given out as soon as the library says so; no report (see `make tsan`)."""
    done = run_copies(build(root_dir, tmp_path, "stress_copies"), 3000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left: 0 regions, 0 mappings, 0 tables, 0 queues, 0 operations, 0 fds" in done.stdout


PLANTED = [
    # A cancel that is taken for the end: the buffers are freed while the copy still writes into them.
    (
        "copies.c",
        "    if (operation->active || operation->phase >= KVR_PHASE_ENDING",
        "    if (operation->phase >= KVR_PHASE_ENDING",
    ),
    # A block that is copied out is not claimed for the operation.
    (
        "copies_submit.c",
        "status = kvr_table_claim_slots(table_handle, operation->slots, operation->generations, count);",
        "status = KVR_OK;",
    ),
]


@pytest.mark.parametrize(("file", "good", "bad"), PLANTED, ids=["early end", "no claim"])
def test_a_planted_early_free_is_caught(root_dir, tmp_path, file, good, bad):
    """O2: the same run, over C in which memory is let go before its copy has ended, does not end well."""
    native = tmp_path / "native"
    shutil.copytree(root_dir / "kvreuse" / "native", native)
    text = (native / file).read_text()
    assert text.count(good) == 1
    (native / file).write_text(text.replace(good, bad))
    done = run_copies(build(root_dir, tmp_path, "stress_copies", native), 3000)
    assert done.returncode != 0, done.stdout
