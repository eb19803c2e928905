"""The optional C++ extension; everything else is in pyproject.toml.

A missing compiler or a failed build leaves the package without ``kvstore.kernels._native``: it then runs on the
torch path, and ``kvstore.kernels.native.native_status()`` tells why from the note written here.
"""

from __future__ import annotations

import platform
import textwrap
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

SOURCES = [
    "module",
    "index",
    "index_face",
    "index_memory",
    "index_reader",
    "module_plans",
    "module_digests",
    "digests",
    "plans",
    "plan_pieces",
    "plan_threads",
    "lz4",
    "paged",
    "pool",
    "memory",
    "crc",
    "copies",
    "levels",
    "level_portable",
    "level_avx2",
    "level_avx512",
]
# -Wno-*uninitialized: GCC 12's own AVX-512 header reads "undefined" vectors by design.
FLAGS = [
    "-O3",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
]
LEVEL_FLAGS = {
    "level_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "level_avx512.cpp": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx512vnni",
        "-mfma",
        "-mf16c",
        "-Wno-uninitialized",
    ],
}
NOTE = "_native_failed.txt"


class OptionalBuild(build_ext):
    """Compiles the level files with their own flags, and turns any failure into a note."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        """Build one extension, or write down why not."""
        notes = [Path(self.get_ext_fullpath(ext.name)).with_name(NOTE)]
        if self.editable_mode:
            notes.append(Path("kernels", NOTE))
        compile_one = self.compiler._compile

        def compile_with_flags(obj, src, ext_name, cc_args, extra, pp_opts):  # type: ignore[no-untyped-def]
            more = LEVEL_FLAGS.get(Path(src).name, []) if platform.machine() in ("x86_64", "AMD64") else []
            compile_one(obj, src, ext_name, cc_args, [*extra, *more], pp_opts)

        self.compiler._compile = compile_with_flags
        try:
            super().build_extension(ext)
        except Exception as error:  # noqa: BLE001  (compilers fail in many ways; none may fail the installation)
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", 160)
            for note in notes:
                note.parent.mkdir(parents=True, exist_ok=True)
                note.write_text(f"its build failed with {reason}\n")
            self.warn(f"kvstore.kernels._native was not built: {error}; the torch path will be used")
            return
        finally:
            self.compiler._compile = compile_one
        for note in notes:
            note.unlink(missing_ok=True)


ParallelCompile(default=2).install()

setup(
    ext_modules=[
        Pybind11Extension(
            "kvstore.kernels._native",
            [f"kernels/native/{name}.cpp" for name in SOURCES],
            cxx_std=20,
            extra_compile_args=FLAGS,
            depends=[str(path) for path in sorted(Path("kernels/native").glob("*.h"))],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": OptionalBuild},
)
