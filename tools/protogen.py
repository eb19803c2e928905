"""Makes ``kvstore/v1`` from ``protos/``, or proves that what is checked in is current.

``python -m kvstore.tools.protogen`` writes; ``--check`` compares and exits with 1, naming the files, if any differs.
Generated files are never edited by hand.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = Path("kvstore/v1")


def generate(out: Path) -> None:
    """Run the protocol compiler over every proto into ``out``. RuntimeError if it fails; it has printed why."""
    from grpc_tools import protoc  # noqa: PLC0415 - a development dependency, and nothing else here needs it

    protos = sorted((ROOT / "protos").rglob("*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    arguments = [
        "protoc",
        f"-I{ROOT / 'protos'}",
        f"-I{well_known}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *map(str, protos),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("the protocol compiler failed")


def generated(folder: Path) -> dict[str, bytes]:
    """Names and bytes of the generated files of a folder."""
    return {
        path.name: path.read_bytes() for path in sorted(folder.glob("*_pb2*.py*")) if path.suffix in (".py", ".pyi")
    }


def stale(checked_in: dict[str, bytes], fresh: dict[str, bytes]) -> list[str]:
    """Names of files that are missing, differ, or belong to no proto any more."""
    return sorted(name for name in checked_in.keys() | fresh.keys() if checked_in.get(name) != fresh.get(name))


def main() -> int:
    """Entry point; the exit code is 1 if ``--check`` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare only, and exit with 1 if anything differs")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = generated(Path(scratch) / PACKAGE)
    target = ROOT / PACKAGE
    changed = stale(generated(target), fresh)
    if check:
        for name in changed:
            print(f"{PACKAGE / name} is not what protos/ make: run make proto", file=sys.stderr)
        return 1 if changed else 0
    for name in changed:
        if name in fresh:
            (target / name).write_bytes(fresh[name])
        else:
            (target / name).unlink()
        print(f"{PACKAGE / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
