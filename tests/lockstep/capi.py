"""What Cython reads of include/kvreuse.h: kvreuse/_capi.pxd (declarations), kvreuse/_abi.pxi (what the compiler saw).

Cython does not compare widths with the header, so they are never written by hand.

    python tests/lockstep/capi.py            fails if a file is not what the header says
    python tests/lockstep/capi.py --write    writes them
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import header as h

PXD = h.HEADER.parents[1] / "kvreuse" / "_capi.pxd"
PXI = PXD.with_name("_abi.pxi")
HEAD = """\
# Made from include/kvreuse.h by tests/lockstep/capi.py (make capi): do not edit.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "kvreuse.h" nogil:
"""


def generate(header_text: str) -> str:
    """Return the text of the file."""
    header = h.parse(header_text)
    lines = [f"    const int64_t {name}" for name in header.constants]
    for name, members in header.structs.items():
        lines += ["", f"    ctypedef struct {name}:"]
        for member in members:
            count = f"[{member.count}]" if member.count else ""
            lines.append(f"        {member.type} {member.name}{count}")
    lines.append("")
    for name, parameters in header.functions.items():
        arguments = ", ".join(
            f"{'const ' if p.const else ''}{p.type} {'*' if p.pointer else ''}{p.name}" for p in parameters
        )
        lines.append(f"    {header.returns[name]} {name}({arguments}) noexcept")
    return HEAD + "\n".join(lines) + "\n"


def generate_abi(header_text: str) -> str:
    """Return the text of _abi.pxi: a function that reports sizes, offsets and constants as the C compiler saw them."""
    header = h.parse(header_text)
    lines = ["# Made from include/kvreuse.h by tests/lockstep/capi.py (make capi): do not edit.", "", "", "def _abi():"]
    lines += ["    structs = {}"]
    for name, members in header.structs.items():
        lines.append(f'    structs["{name}"] = {{"size": sizeof({name}), "offsets": {{')
        lines += [f'        "{m.name}": <size_t>&(<{name} *>0).{m.name},' for m in members]
        lines.append("    }}")
    lines.append("    constants = {")
    lines += [f'        "{name}": {name},' for name in header.constants]
    lines += ["    }", '    return {"structs": structs, "constants": constants}']
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    text = h.HEADER.read_text()
    status = 0
    for path, wanted in ((PXD, generate(text)), (PXI, generate_abi(text))):
        if arguments == ["--write"]:
            path.write_text(wanted)
        elif not path.exists() or path.read_text() != wanted:
            print(f"{path} is not what include/kvreuse.h says: run `make capi`", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
