from __future__ import annotations

import contextlib
import os
import tempfile

import keeper_peers
import pytest

import kvreuse.testing


@pytest.fixture
def folder():
    """A directory of mode 0700 whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kvr-", dir="/tmp") as path:
        yield path


@pytest.fixture
def path():
    """The socket of a keeper with reuse on."""
    with kvreuse.testing.keeper(keeper_peers.ON) as path:
        yield path


@pytest.fixture
def client(path):
    with kvreuse.connect(path, timeout=10) as client:
        yield client


@pytest.fixture
def both_path(backend_name, monkeypatch):
    """The socket of a keeper, once on each backend."""
    monkeypatch.setenv("KVREUSE_BACKEND", backend_name)
    with kvreuse.testing.keeper(keeper_peers.ON) as path:
        yield path


@pytest.fixture
def both(both_path):
    with kvreuse.connect(both_path, timeout=10) as client:
        yield client


@pytest.fixture
def few_fds():
    """``with few_fds(n):`` leaves n free file descriptors to this process."""
    import resource

    @contextlib.contextmanager
    def limit(free):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Fill the holes, so that the limit counts exactly.
        top = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        fill = []
        while (fd := os.open("/dev/null", os.O_RDONLY)) < top:
            fill.append(fd)
        os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd + free, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in fill:
                os.close(fd)

    return limit
