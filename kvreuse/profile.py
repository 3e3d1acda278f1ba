"""The declared deployment (TOML) that turns features on (P1, P2). Imports no numpy."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .errors import ProfileError

_Bytes = Annotated[int, Meta(ge=1, le=2**62)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Reuse(_Section, frozen=True, kw_only=True):
    """[reuse]"""

    enabled: bool


class Handles(_Section, frozen=True, kw_only=True):
    """[handles]"""

    allow: tuple[Literal["posix_fd", "fabric"], ...] = ("posix_fd",)
    fabric: Literal["off", "observe", "allocate"] = "observe"
    file_fallback: bool = False


class Retention(_Section, frozen=True, kw_only=True):
    """[retention]"""

    max_bytes: _Bytes | None = None
    max_parts: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    ttl_s: _Seconds = 600.0
    stall_s: _Seconds = 0.0
    on_stall: Literal["report", "kill"] = "report"
    idle_exit_s: _Seconds = 0.0


class Table(_Section, frozen=True, kw_only=True):
    """[table]"""

    lock_wait_s: Annotated[float, Meta(ge=0, le=3600)] = 2.0
    huge_pages: Literal["off", "prefer", "require"] = "off"


class Group(_Section, frozen=True, kw_only=True):
    """[group]"""

    capacity: Literal["refuse", "min"] = "refuse"


class Checksum(_Section, frozen=True, kw_only=True):
    """[checksum]"""

    when: Literal["off", "commit", "attach", "always"] = "commit"


class Copies(_Section, frozen=True, kw_only=True):
    """[copies]"""

    quarantine_max_bytes: _Bytes = 1073741824
    after: Literal["optional", "required"] = "optional"


class Security(_Section, frozen=True, kw_only=True):
    """[security]"""

    allow_uids: tuple[Annotated[int, Meta(ge=0, le=2**32 - 2)], ...] = ()


class Profile(_Section, frozen=True, kw_only=True):
    """What a keeper was told to do. Made by `load`, `from_toml`, `from_dict`; `off()` is the one without a declaration.

    Sections are attributes: reuse, handles, retention, table, group, checksum, copies, security; docs/profile.md lists
    their keys.
    """

    reuse: Reuse
    handles: Handles = Handles()
    retention: Retention = Retention()
    table: Table = Table()
    group: Group = Group()
    checksum: Checksum = Checksum()
    copies: Copies = Copies()
    security: Security = Security()

    @classmethod
    def off(cls) -> Profile:
        """Return what holds where no profile was declared: reuse is off."""
        return _OFF

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile from a TOML file.

        Raises
        ------
        ProfileError
            The file cannot be read, is no TOML, has an unknown key, or a value that is wrong or that this version
            cannot honour.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _error(f"the profile {os.fspath(path)} cannot be read: {error}") from error
        return cls.from_toml(text, name=os.fspath(path))

    @classmethod
    def from_toml(cls, text: str, name: str = "profile") -> Profile:
        """Read a profile from TOML text; `name` stands in error messages. Raises ProfileError as `load`."""
        try:
            data = msgspec.toml.decode(text)
        except msgspec.DecodeError as error:
            raise _error(f"{name} is no TOML: {error}") from error
        return cls.from_dict(data, name)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str = "profile") -> Profile:
        """Read a profile from a dict of sections. Raises ProfileError as `load`."""
        _refuse_unknown(data, name)
        try:
            profile = msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise _error(f"{name}: {_readable(str(error))}") from error
        profile._refuse_missing_features(name)
        return profile

    def to_dict(self) -> dict[str, Any]:
        """Give the sections as a dict of plain values."""
        return dict(msgspec.to_builtins(self))

    def reuse_reason(self) -> str:
        """Say why reuse is off; "" if it is on."""
        if self.reuse.enabled:
            return ""
        if self is _OFF:
            return "reuse is off: no profile was declared"
        return "reuse is off: the profile says [reuse] enabled = false"

    def max_bytes(self) -> int:
        """Bytes that parts may take together: declared, or half of the memory."""
        return self.retention.max_bytes or default_max_bytes()

    def _refuse_missing_features(self, name: str) -> None:
        # P2: silence would claim that they work.
        if self.table.huge_pages != "off":
            raise _error(
                f"{name}: [table] huge_pages = {self.table.huge_pages!r} needs what this version does not have: "
                'use "off"'
            )


def _error(text: str) -> ProfileError:
    return ProfileError(text, status=-21, name="PROFILE")


def _refuse_unknown(data: Any, name: str) -> None:
    if not isinstance(data, Mapping):
        raise _error(f"{name} must be a table of sections, not {type(data).__name__}")
    sections = {field.name: field.type for field in msgspec.structs.fields(Profile)}
    for section, values in data.items():
        if section not in sections:
            raise _error(f"{name}: unknown section [{section}]{_hint(section, sections)}")
        if not isinstance(values, Mapping):
            continue
        keys = [field.name for field in msgspec.structs.fields(sections[section])]
        for key in values:
            if key not in keys:
                raise _error(f"{name}: unknown key {key!r} in [{section}]{_hint(key, keys)}")


def _hint(word: str, known: Any) -> str:
    near = difflib.get_close_matches(str(word), list(known), 1)
    return f": did you mean {near[0]!r}?" if near else f": expected one of {', '.join(known)}"


def _readable(text: str) -> str:
    """Turn msgspec's "... - at `$.table.lock_wait_s`" into "[table] lock_wait_s: ..."."""
    what, _, where = text.partition(" - at `$.")
    if not where:
        return what
    section, _, key = where.rstrip("`").partition(".")
    return f"[{section}] {key}: {what}" if key else f"[{section}]: {what}"


def default_max_bytes() -> int:
    """Return half of MemTotal, or of this process's cgroup limit if that is less; 1 GiB where neither can be read."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError):
        pass
    found += _cgroup_limits()
    return max(1, min(found) // 2) if found else 1 << 30


def _cgroup_limits() -> list[int]:
    limits = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            folder, file = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            folder, file = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        # A parent's limit binds too; in a container the path may name a folder of the host: look at the root as well.
        here = folder / path.strip("/")
        for candidate in (here, *here.parents):
            if candidate != folder and folder not in candidate.parents:
                break
            try:
                text = (candidate / file).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and 0 < int(text) < 1 << 60:
                limits.append(int(text))
    return limits


_OFF = Profile(reuse=Reuse(enabled=False))
