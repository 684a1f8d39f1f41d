"""Packages for a machine with a GPU and no network, in pieces that can travel.

    python benchmarks/gpu_carry.py pack FOLDER [--python 3.12] [--requirement FILE ...]
    python benchmarks/gpu_carry.py join FOLDER

`pack` downloads the wheels of some requirement files, by default those of runs, of Liger-Kernel and
of the real model; torch is in none of them. Wheels are cut into pieces, in folders 1, 2, ... of at
most 60 MiB, which can travel one after the other. `join` puts the pieces together, in any order of
their arrival, and unpacks them into FOLDER/site for PYTHONPATH.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
PACKED = ("run", "liger", "real-model-no-deps")
MOST = 60 << 20
"""Bytes of a folder of pieces."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PART = ".part-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("pack", "join"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine (default: 3.12)")
    parser.add_argument(
        "--requirement", type=Path, action="append", metavar="FILE", help="these only"
    )
    given = parser.parse_args()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    wheels = given.folder / "wheels"
    if given.what == "pack":
        for file in given.requirement or [REQUIREMENTS / f"{one}.txt" for one in PACKED]:
            command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", wheels]
            command += ["--python-version", given.python, "--requirement", file]
            command += [word for one in PLATFORMS for word in ("--platform", one)]
            subprocess.run(command, check=True)
        print(f"{cut(wheels, given.folder)} folders of pieces in {given.folder}")
        return
    files = join(given.folder, wheels)
    target = ("--no-deps", "--no-index", "--upgrade", "--target", given.folder / "site")
    subprocess.run([*pip, "install", *target, *files], check=True)


def cut(wheels: Path, folder: Path, most: int = MOST) -> int:
    """Cut files into pieces in folders 1, 2, ... of at most so many bytes; return their number."""
    for old in folder.glob("[0-9]*"):
        shutil.rmtree(old)
    number, free = 0, 0
    for file in sorted(wheels.iterdir()):
        with file.open("rb") as whole:
            piece = 0
            while content := whole.read(free or most):
                if not free:
                    number, free = number + 1, most
                    (folder / str(number)).mkdir(parents=True)
                place = folder / str(number) / f"{file.name}{PART}{piece:03}"
                place.write_bytes(content[:free])
                free, piece = free - len(content), piece + 1
    return number


def join(folder: Path, wheels: Path) -> list[Path]:
    """Write the files whose pieces are in folders 1, 2, ...; ValueError where one is missing."""
    pieces: dict[str, dict[int, Path]] = {}
    for piece in folder.glob(f"[0-9]*/*{PART}*"):
        name, _, place = piece.name.rpartition(PART)
        pieces.setdefault(name, {})[int(place)] = piece
    if not pieces:
        raise ValueError(f"{folder} has no pieces: run `pack`, and copy its folders 1, 2, ...")
    wheels.mkdir(exist_ok=True)
    for name, parts in sorted(pieces.items()):
        if missing := set(range(max(parts) + 1)) - set(parts):
            raise ValueError(f"{name} lacks pieces {sorted(missing)}: copy all folders of {folder}")
        with (wheels / name).open("wb") as whole:
            for number in sorted(parts):
                whole.write(parts[number].read_bytes())
    return [wheels / name for name in sorted(pieces)]


if __name__ == "__main__":
    main()
