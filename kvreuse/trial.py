"""The second process of Provider.capabilities(): imports what it is sent over its standard input, and maps it.

Started by handles.py, with the first process's module path.
"""

from __future__ import annotations

import socket

from .errors import KVReuseError
from .handles import TRIAL_TIMEOUT_S, Access, SharedHandle, open_provider


def main(arguments: list[str]) -> int:
    """Return 0 if the memory could be imported and mapped; else say why and return 1."""
    try:
        with (
            socket.socket(fileno=0) as sock,
            SharedHandle.recv(sock, TRIAL_TIMEOUT_S) as shared,
            open_provider(arguments[0]).import_region(shared) as region,
            region.map(Access.READ),
        ):
            return 0
    except KVReuseError as error:
        print(error)
        return 1
