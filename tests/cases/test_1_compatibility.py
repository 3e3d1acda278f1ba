"""C3, C11, E10, G2, H1: what must be equal, what may be missing, what an import starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvreuse

HERE = str(Path(__file__).resolve().parent)
HEAD = f"""
import sys
sys.path.insert(0, {HERE!r})
import kvreuse, kvreuse.testing
import restart_scene as scene
"""


CHANGES = [
    ("dtype", "float16", ("bfloat16", "float16")),
    ("block_bytes", 8192, ("4096", "8192")),
    ("layers", 4, ("2", "4")),
    ("kv_heads", 2, ("1", "2")),
    ("block_tokens", 32, ("16", "32")),
    ("hash_scheme", "vllm-sha256-cbor", ("sglang-sha256", "vllm-sha256-cbor")),
    ("hash_root", "r2", ("r1", "r2")),
    ("weights_id", "w2", ("w1", "w2")),
]
FIELDS = {"abi", "model", "head_dim", "layout", "topology", "segments", *(field for field, _, _ in CHANGES)}


def test_c3_exactly_the_field_that_differs_is_named(run_python, backend_name):
    """C3, R3: one at a time, with both values, and no other field; nothing of the old part is found."""
    code = f"""
with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
    for group, (field, value, _) in enumerate({CHANGES!r}):
        options = {{"blocks": 8, "group": str(group)}}
        with keeper.attach(scene.manifest(), kvreuse.Rank(), **options) as part:
            scene.fill(part, scene.KEYS)
        with keeper.attach(scene.manifest(**{{field: value}}), kvreuse.Rank(), **options) as part:
            assert part.match(scene.KEYS) == 0
            print(part.outcome.kind.name, part.outcome.reason)
"""
    done = run_python(HEAD + code, backend=backend_name)
    lines = done.stdout.splitlines()
    assert len(lines) == len(CHANGES), done.stderr
    for line, (field, _, both) in zip(lines, CHANGES, strict=True):
        assert line.startswith("EMPTY ")
        assert {name for name in FIELDS if f"{name}:" in line or f"{name}." in line} == {field}, line
        for word in both:
            assert re.search(rf"(?<![\w-]){word}(?![\w-])", line), line


def test_c3_another_abi_is_named_with_both_values(run_python, backend_name):
    """C3: a worker of another ABI; the keeper stays up."""
    code = """
import kvreuse._api as api
with kvreuse.testing.keeper(scene.PROFILE) as path:
    api.ABI_VERSION = 2
    try:
        kvreuse.connect(path)
    except kvreuse.IncompatibleError as error:
        print(error.fields)
    api.ABI_VERSION = 1
    with kvreuse.connect(path) as keeper:
        print(keeper.status()["parts"])
"""
    done = run_python(HEAD + code, backend=backend_name)
    assert done.stdout == "{'abi': (1, 2)}\n[]\n", done.stderr


def test_c3_a_superblock_of_another_version_is_not_read_further(run_python, backend_name):
    """C3, R2: version + 1 with random bytes after it; the keeper empties the part and says which version it found."""
    code = """
import os
with scene.dead_worker() as keeper:
    with scene.part_memory(keeper, 0, "table") as table:
        table[8:12] = (2).to_bytes(4, "little")
        table[12:8192] = os.urandom(8180)
    with scene.attach(keeper, 0) as part:
        assert part.match(scene.KEYS) == 0
        print(part.outcome)
"""
    done = run_python(HEAD + code, backend=backend_name)
    assert done.stdout.startswith("EMPTY(incompatible"), (done.stdout, done.stderr)
    assert "version 2" in done.stdout
    assert "version 1" in done.stdout


def test_c11_keys_are_equal_whatever_the_hash_seed(run_python):
    """C11: PYTHONHASHSEED unset and 0."""
    code = """
from kvreuse.hashing import get_scheme
for name in ("vllm-sha256-cbor", "sglang-sha256"):
    scheme = get_scheme(name)
    print([key.hex() for key in scheme.block_keys(range(48), 16, scheme.root())])
"""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    unset = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    seeded = run_python(code, env={"PYTHONHASHSEED": "0"})
    assert unset.stdout == seeded.stdout
    assert unset.stdout.count("'") == 12


def test_c11_another_root_is_named(run_python, backend_name):
    """C11, R3: a rank that declares another root joins no group of the first."""
    code = """
with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper, scene.attach(keeper, 0):
    try:
        scene.attach(keeper, 1, hash_root="r2")
    except kvreuse.AttachRefusedError as error:
        print(error)
    print(keeper.group("g").readiness())
"""
    done = run_python(HEAD + code, backend=backend_name)
    refused, readiness = done.stdout.splitlines()
    assert readiness.startswith("not ready: rank 1: missing: its attach was refused")
    for word in ("hash_root", "r1", "r2"):
        assert word in refused, done.stderr
        assert word in readiness


def test_e10_without_a_driver_the_import_works_and_says_so(run_python, backend_name):
    """E10, H10: the capability is false and names the library (test_packaging: the extension links to none)."""
    code = """
import kvreuse
from kvreuse import _ctypes_cuda
_ctypes_cuda.LIBRARY = "libcuda.so.1.absent"
found = kvreuse.open_provider("cuda:0").capabilities()
assert not any(capability.ok for capability in found.values())
print(found[kvreuse.HandleKind.POSIX_FD].reason)
try:
    kvreuse.open_provider("cuda:0").allocate(4096)
except kvreuse.NotSupportedError as error:
    print(error)
"""
    done = run_python(code, backend=backend_name)
    reason, error = done.stdout.splitlines()
    assert reason.startswith("libcuda.so.1"), done.stderr
    assert "libcuda.so.1" in error


HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "kvreuse._core":
            raise ModuleNotFoundError("No module named 'kvreuse._core'", name=name)
sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture
def hidden(tmp_path):
    """The environment in which the extension cannot be found, however the package is installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


@pytest.fixture
def copied(tmp_path):
    """A copy of the package without its extension, and the environment that imports it."""
    shutil.copytree(Path(kvreuse.__file__).parent, tmp_path / "kvreuse")
    for extension in (tmp_path / "kvreuse").glob("_core*"):
        extension.unlink()
    return tmp_path / "kvreuse", {"PYTHONPATH": str(tmp_path)}


def test_g2_a_hidden_extension_means_the_fallback(run_python, hidden):
    """G2: with one warning where a driver can be loaded, with none elsewhere."""
    code = """
import os, sys, warnings
warnings.simplefilter("always")
import importlib.util
def load(reason):
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvreuse"]:
        del sys.modules[name]
    spec = importlib.util.find_spec("kvreuse")
    path = os.path.join(os.path.dirname(spec.origin), "_ctypes_cuda.py")
    cuda_spec = importlib.util.spec_from_file_location("kvreuse._ctypes_cuda", path)
    cuda = importlib.util.module_from_spec(cuda_spec)
    cuda_spec.loader.exec_module(cuda)
    cuda.missing_reason = lambda: reason
    sys.modules["kvreuse._ctypes_cuda"] = cuda
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        import kvreuse
    return kvreuse.backend, [type(w.message).__name__ for w in seen]
print(load("no driver"))
print(load(""))
"""
    done = run_python(code, backend="auto", env=hidden)
    assert done.stdout == "('fallback', [])\n('fallback', ['KVReuseWarning'])\n", done.stderr


def test_g2_a_hidden_extension_that_is_required_is_an_import_error(run_python, hidden):
    """G2"""
    done = run_python("import kvreuse", backend="core", env=hidden)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "KVREUSE_BUILD=native" in done.stderr


@pytest.mark.parametrize("word", ["auto", "core"])
def test_g2_an_extension_that_fails_is_no_reason_to_fall_back(run_python, copied, word):
    """G2: its own error comes through."""
    package, environ = copied
    (package / "_core.py").write_text("raise ValueError('broken on purpose')\n")
    done = run_python("import kvreuse", backend=word, env=environ)
    assert done.returncode == 1
    assert "ValueError: broken on purpose" in done.stderr


def test_g2_an_unknown_word_lists_the_words(run_python):
    """G2"""
    done = run_python("import kvreuse", backend="cython")
    assert "ImportError" in done.stderr
    assert "auto, core, fallback" in done.stderr


def test_h1_import_and_allocate_start_nothing(run_python, backend_name, tmp_path):
    """H1, P1: no thread, process, socket or file; no numpy, which would start threads."""
    code = """
import os, sys
def threads(): return len(os.listdir("/proc/self/task"))
def children(): return open(f"/proc/self/task/{os.getpid()}/children").read()
def fds():
    found = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(fd) for fd in found if os.path.lexists(fd))
def files(): return [set(os.listdir(folder)) for folder in (".", os.environ["TMPDIR"], "/dev/shm")]
def started(): return threads(), children(), files()
before, fds_before = started(), fds()
import kvreuse
region = kvreuse.open_provider("host").allocate(4096)
assert started() == before, (before, started())
new = fds()
for name in fds_before:
    new.remove(name)
print(new, "numpy" in sys.modules)
# The names that need it are there too, and start nothing either.
kvreuse.Manifest, kvreuse.Profile, kvreuse.connect
assert started() == before, (before, started())
region.close()
assert fds() == fds_before
"""
    folder = tmp_path / "empty"
    folder.mkdir()
    done = run_python(code, backend=backend_name, env={"TMPDIR": str(folder)})
    assert done.stdout == "['/memfd:kvreuse (deleted)'] False\n", done.stdout + done.stderr
    assert done.stderr == ""
