"""The profile: off by default, validated, silent about nothing (P1, P2)."""

from __future__ import annotations

import pytest

import kvreuse
from kvreuse import profile as profile_module

ON = "[reuse]\nenabled = true\n"


def load(text):
    return kvreuse.Profile.from_toml(text)


def test_off_is_the_default_and_says_why():
    """P1"""
    assert kvreuse.Profile.off().reuse_reason() == "reuse is off: no profile was declared"
    assert load("[reuse]\nenabled = false\n").reuse_reason().startswith("reuse is off: ")
    assert load(ON).reuse_reason() == ""


def test_defaults():
    profile = load(ON)
    assert profile.handles.allow == ("posix_fd",)
    assert (profile.handles.fabric, profile.handles.file_fallback) == ("observe", False)
    assert (profile.retention.max_parts, profile.retention.ttl_s, profile.retention.idle_exit_s) == (1024, 600, 0)
    assert (profile.table.lock_wait_s, profile.checksum.when, profile.group.capacity) == (2.0, "commit", "refuse")
    assert profile.max_bytes() == kvreuse.Profile.off().max_bytes() > 1 << 20
    assert load(ON + "[retention]\nmax_bytes = 4096\n").max_bytes() == 4096
    assert kvreuse.Profile.from_dict(profile.to_dict()) == profile


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("reuse",)),
        ("x", ("TOML",)),
        (ON + "[retension]\n", ("[retension]", "'retention'")),
        (ON + "[retention]\nttl = 1\n", ("'ttl'", "[retention]", "'ttl_s'")),
        ("[reuse]\nenabled = 1\n", ("[reuse] enabled", "bool", "int")),
        ("[reuse]\n", ("enabled",)),
        (ON + "[retention]\nttl_s = -1\n", ("[retention] ttl_s", ">= 0")),
        (ON + "[retention]\nmax_parts = 0\n", ("[retention] max_parts", ">= 1")),
        (ON + "[retention]\nmax_bytes = 1.5\n", ("[retention] max_bytes", "int")),
        (ON + '[checksum]\nwhen = "never"\n', ("[checksum] when", "'never'")),
        (ON + '[handles]\nallow = ["shm"]\n', ("[handles] allow", "'shm'")),
        (ON + "[security]\nallow_uids = [-1]\n", ("[security] allow_uids",)),
        ("reuse = 5\n", ("reuse",)),
    ],
)
def test_what_is_wrong_is_named(text, words):
    """P2: the key, what was expected, what was found, a hint."""
    with pytest.raises(kvreuse.ProfileError) as caught:
        load(text)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("value", ["prefer", "require"])
def test_what_this_version_lacks_is_refused(value):
    """P2: silence would claim that it works."""
    with pytest.raises(kvreuse.ProfileError, match="this version does not have"):
        load(f'{ON}[table]\nhuge_pages = "{value}"\n')


def test_groups_and_stalls_are_declared():
    profile = load(ON + '[retention]\nstall_s = 2\non_stall = "kill"\n[group]\ncapacity = "min"\n')
    assert (profile.retention.stall_s, profile.retention.on_stall, profile.group.capacity) == (2.0, "kill", "min")


def test_a_file_is_named_in_errors(tmp_path):
    file = tmp_path / "p.toml"
    with pytest.raises(kvreuse.ProfileError, match=r"p\.toml cannot be read"):
        kvreuse.Profile.load(file)
    file.write_text(ON + "[tables]\n")
    with pytest.raises(kvreuse.ProfileError, match=r"p\.toml: unknown section \[tables\]: did you mean 'table'"):
        kvreuse.Profile.load(file)
    file.write_bytes(b"\xff")
    with pytest.raises(kvreuse.ProfileError, match="cannot be read"):
        kvreuse.Profile.load(file)
    file.write_text(ON)
    assert kvreuse.Profile.load(file).reuse.enabled


def test_default_bound_is_half_of_the_smallest_limit(monkeypatch):
    """K4"""
    monkeypatch.setattr(profile_module, "_cgroup_limits", lambda: [1 << 20])
    assert profile_module.default_max_bytes() == 1 << 19


def test_documentation_lists_every_key(root_dir):
    text = (root_dir / "docs" / "profile.md").read_text()
    for section, values in load(ON).to_dict().items():
        for key in values:
            assert f"`[{section}] {key}`" in text or f"`{key}`" in text, (section, key)


def test_a_profile_that_says_no_is_another_reason_than_none():
    """P1"""
    said = load("[reuse]\nenabled = false\n").reuse_reason()
    assert said == "reuse is off: the profile says [reuse] enabled = false"
    assert kvreuse.Profile.off().reuse_reason() != said


@pytest.mark.parametrize(
    ("data", "word"),
    [([], "list"), ({"reuse": None}, "reuse"), ({"reuse": {"enabled": True}, "table": {"lock_wait_s": 3601}}, "3600"),
     ({"reuse": {"enabled": True}, "retention": {"ttl_s": float("nan")}}, "ttl_s"),
     ({"reuse": {"enabled": True}, "retention": {"max_bytes": True}}, "max_bytes"),
     ({"reuse": {"enabled": True}, "security": {"allow_uids": [2**32 - 1]}}, "allow_uids")],
)  # fmt: skip
def test_dicts_are_checked_as_text_is(data, word):
    """P2"""
    with pytest.raises(kvreuse.ProfileError, match=word):
        kvreuse.Profile.from_dict(data)


def test_a_profile_cannot_be_changed():
    with pytest.raises(AttributeError):
        load(ON).reuse.enabled = False


@pytest.mark.parametrize(
    ("lines", "folder"), [("0::/a/b\n", "a"), ("0::/a/b\n", "a/b"), ("0::/\n", ""), ("4:cpu,memory:/a\n", "memory/a")]
)
def test_limits_of_every_parent_bind(tmp_path, monkeypatch, lines, folder):
    """K4: a limit of 1 MiB in any folder on the way."""
    root = tmp_path / "cgroup"
    (root / "a" / "b").mkdir(parents=True)
    (root / "memory" / "a").mkdir(parents=True)
    (root / "memory.max").write_text("max\n")
    (root / folder / ("memory.limit_in_bytes" if "memory" in folder else "memory.max")).write_text("1048576\n")
    (tmp_path / "self").write_text(lines)
    paths = {"/sys/fs/cgroup": root, "/sys/fs/cgroup/memory": root / "memory", "/proc/self/cgroup": tmp_path / "self"}
    monkeypatch.setattr(profile_module, "Path", lambda path: paths.get(path, tmp_path / "none"))
    assert profile_module._cgroup_limits() == [1 << 20]
    assert profile_module.default_max_bytes() == 1 << 19
    (tmp_path / "self").unlink()
    assert profile_module._cgroup_limits() == []
    assert profile_module.default_max_bytes() == 1 << 30
