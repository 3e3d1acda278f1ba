"""kvreuse keeps a worker's KV cache alive and hands it to the replacement only when it can prove what the bytes are.

Names are loaded on first use: `import kvreuse` and allocating start no thread, process or socket and import no numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._select import backend_name as backend
from ._version import __version__
from .errors import *  # noqa: F403
from .errors import __all__ as _error_names

if TYPE_CHECKING:
    from ._info import backend_info, get_include
    from .copies import CopyQueue, CudaEvent, Operation, OperationState, QuarantinedOperation, quarantine
    from .groups import Explanation, Group, GroupClaim, GroupClearResult, RankReadiness, Readiness
    from .handles import (
        Access,
        Capability,
        CudaObservation,
        DeviceView,
        HandleKind,
        Mapping,
        Observation,
        Provider,
        Region,
        SharedHandle,
        open_provider,
    )
    from .keeper.client import Keeper, connect
    from .manifest import Manifest, Rank, Topology
    from .memory import EngineBlocks, Memory
    from .parts import (
        Claim,
        ClearResult,
        Outcome,
        OutcomeKind,
        Part,
        Reservation,
        Reuse,
        VerifyResult,
    )
    from .profile import Profile

_LAZY = {
    "backend_info": "._info",
    "get_include": "._info",
    "Access": ".handles",
    "Capability": ".handles",
    "CudaObservation": ".handles",
    "DeviceView": ".handles",
    "HandleKind": ".handles",
    "Mapping": ".handles",
    "Observation": ".handles",
    "Provider": ".handles",
    "Region": ".handles",
    "SharedHandle": ".handles",
    "open_provider": ".handles",
    "CopyQueue": ".copies",
    "CudaEvent": ".copies",
    "Operation": ".copies",
    "OperationState": ".copies",
    "QuarantinedOperation": ".copies",
    "quarantine": ".copies",
    "EngineBlocks": ".memory",
    "Memory": ".memory",
    "Keeper": ".keeper.client",
    "connect": ".keeper.client",
    "Manifest": ".manifest",
    "Rank": ".manifest",
    "Topology": ".manifest",
    "Claim": ".parts",
    "ClearResult": ".parts",
    "Outcome": ".parts",
    "OutcomeKind": ".parts",
    "Part": ".parts",
    "Reservation": ".parts",
    "Reuse": ".parts",
    "VerifyResult": ".parts",
    "Explanation": ".groups",
    "Group": ".groups",
    "GroupClaim": ".groups",
    "GroupClearResult": ".groups",
    "RankReadiness": ".groups",
    "Readiness": ".groups",
    "Profile": ".profile",
}

__all__ = [
    "Access",
    "Capability",
    "Claim",
    "ClearResult",
    "CopyQueue",
    "CudaEvent",
    "CudaObservation",
    "DeviceView",
    "EngineBlocks",
    "Explanation",
    "Group",
    "GroupClaim",
    "GroupClearResult",
    "HandleKind",
    "Keeper",
    "Manifest",
    "Mapping",
    "Memory",
    "Observation",
    "Operation",
    "OperationState",
    "Outcome",
    "OutcomeKind",
    "Part",
    "Profile",
    "Provider",
    "QuarantinedOperation",
    "Rank",
    "RankReadiness",
    "Readiness",
    "Region",
    "Reservation",
    "Reuse",
    "SharedHandle",
    "Topology",
    "VerifyResult",
    "__version__",
    "backend",
    "backend_info",
    "connect",
    "get_include",
    "open_provider",
    "quarantine",
]
__all__ += _error_names


def __getattr__(name: str) -> Any:
    try:
        module = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
