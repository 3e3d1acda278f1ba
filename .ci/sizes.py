"""Write C assertions that a header's structs have the layout of this machine's ABI. Usage: sizes.py HEADER >FILE.c"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

STRUCT = re.compile(r"typedef struct (\w+) \{(.*?)\} \1;", re.DOTALL)
FIELD = re.compile(r"(?:const )?(\w+)(?: |\s*(\*)\s*)(\w+)(?:\[(\w+)\])?")


def layouts(header: str) -> dict[str, type[ctypes.Structure]]:
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    constants = dict(re.findall(r"^#define (\w+) (\d+)\s*$", text, re.MULTILINE))
    known: dict[str, type] = {"char": ctypes.c_char}
    for bits in (8, 16, 32, 64):
        known |= {f"{sign}int{bits}_t": getattr(ctypes, f"c_{sign}int{bits}") for sign in ("", "u")}
    structs: dict[str, type[ctypes.Structure]] = {}
    for name, body in STRUCT.findall(text):
        fields = []
        for declaration in filter(None, (part.strip() for part in body.split(";"))):
            match = FIELD.fullmatch(declaration)
            if match is None:
                raise SystemExit(f"sizes: struct {name}: cannot read {declaration!r}")
            base, pointer, field, count = match.groups()
            kind = ctypes.c_void_p if pointer else known[base]
            fields.append((field, kind * int(constants.get(count, count)) if count else kind))
        structs[name] = known[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    if len(structs) != text.count("typedef struct"):
        raise SystemExit("sizes: a struct is not of the form `typedef struct NAME { ... } NAME;`")
    return structs


if __name__ == "__main__":
    header = Path(sys.argv[1])
    print(f'#include <stddef.h>\n#include "{header.name}"')
    for name, struct in layouts(header.read_text()).items():
        print(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "size of {name}");')
        for field, *_ in struct._fields_:
            offset = getattr(struct, field).offset
            print(f'_Static_assert(offsetof({name}, {field}) == {offset}, "offset of {name}.{field}");')
