"""The one extension, and what KVREUSE_BUILD says about it.

KVREUSE_BUILD=auto (default)  try to build it; on failure say why and go on: the fallback will be used
KVREUSE_BUILD=native          a failure is an error
KVREUSE_BUILD=pure            build none
KVREUSE_STRICT=1              warnings in our C are errors (CI; a user's newer compiler must not break the build)
KVREUSE_SANITIZE=LIST         -fsanitize=LIST, e.g. address,undefined
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel as _bdist_wheel
from setuptools.command.build_ext import build_ext as _build_ext
from setuptools.command.build_py import build_py as _build_py

BUILD = os.environ.get("KVREUSE_BUILD", "auto")
if BUILD not in ("auto", "native", "pure"):
    raise SystemExit(f"KVREUSE_BUILD is {BUILD!r}; expected auto, native or pure")

NAME = "kvreuse._core"
PYX = "kvreuse/_core.pyx"
NATIVE = sorted(str(path) for path in Path("kvreuse/native").glob("*.c"))
HEADERS = sorted(str(path) for path in Path("include").glob("*.h"))
DEPENDS = [
    *HEADERS,
    *sorted(str(path) for pattern in ("*.pxd", "*.pxi", "native/*.h") for path in Path("kvreuse").glob(pattern)),
]

# Not for the C that Cython writes: it is not -Wconversion clean.
NATIVE_FLAGS = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wconversion"]
if os.environ.get("KVREUSE_STRICT") == "1":
    NATIVE_FLAGS.append("-Werror")

SANITIZE = []
if os.environ.get("KVREUSE_SANITIZE"):
    SANITIZE = [f"-fsanitize={os.environ['KVREUSE_SANITIZE']}", "-fno-omit-frame-pointer", "-g"]


class build_ext(_build_ext):
    def run(self):
        inplace = self.inplace
        try:
            super().run()
        except Exception as error:
            if BUILD != "auto":
                raise
            # An older build's extension must not pass for this one's.
            for folder in [self.build_lib, *(["."] if inplace else [])]:
                Path(folder, self.get_ext_filename(NAME)).unlink(missing_ok=True)
            self.extensions = []
            self.distribution.ext_modules = []
            bar = "*" * 100
            print(
                f"{bar}\nkvreuse: {NAME} was NOT built; the slower Python fallback will be used."
                f"\nkvreuse: why: {type(error).__name__}: {error}"
                f"\nkvreuse: KVREUSE_BUILD=native makes this an error, KVREUSE_BUILD=pure asks for it.\n{bar}",
                file=sys.stderr,
                flush=True,
            )

    def build_extension(self, ext):
        objects = self.compiler.compile(
            NATIVE,
            output_dir=self.build_temp,
            include_dirs=ext.include_dirs,
            extra_postargs=[*NATIVE_FLAGS, *SANITIZE, "-pthread"],
        )
        # Imported here, so that an auto build without Cython ends in the fallback. Named by path, since setuptools
        # renames .pyx sources to .c where Cython is absent.
        from Cython.Build import cythonize

        cython = Extension(NAME, [PYX], include_dirs=ext.include_dirs, depends=DEPENDS)
        # Without the GIL: every wrapper works on locals, and the C code takes its own locks.
        directives = {"language_level": 3, "freethreading_compatible": True}
        ext.sources = cythonize([cython], build_dir=self.build_temp, force=self.force, compiler_directives=directives)[
            0
        ].sources
        ext.extra_objects = objects
        super().build_extension(ext)


class build_py(_build_py):
    """Puts include/*.h into the package, for kvreuse.get_include(). An editable install has them beside it."""

    def _headers(self):
        if self.editable_mode:
            return {}
        return {str(Path(self.build_lib, "kvreuse", header)): header for header in HEADERS}

    def run(self):
        super().run()
        for target, header in self._headers().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(header, target)

    def get_outputs(self, include_bytecode=True):
        return [*super().get_outputs(include_bytecode), *self._headers()]

    def get_output_mapping(self):
        return {**super().get_output_mapping(), **self._headers()}


class bdist_wheel(_bdist_wheel):
    def run(self):
        # Build first: an auto wheel whose extension failed must not get a platform tag.
        if not self.skip_build:
            self.run_command("build")
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()


def extension():
    return Extension(
        NAME,
        [PYX, *NATIVE],
        include_dirs=["include", "kvreuse/native"],
        depends=DEPENDS,
        libraries=["dl"],
        extra_compile_args=SANITIZE,
        extra_link_args=["-pthread", *SANITIZE],
    )


setup(
    ext_modules=[] if BUILD == "pure" else [extension()],
    cmdclass={"bdist_wheel": bdist_wheel, "build_ext": build_ext, "build_py": build_py},
)
