"""Packages and interpreters made for a test: backends that others bring."""

from __future__ import annotations

import sys
import sysconfig
import venv
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def package(folder: Path, name: str, source: str, backends: dict[str, str]) -> Path:
    """What installing a package of one module leaves in a folder, which has to be on the path to be found."""
    module = name.replace("-", "_")
    info = folder / f"{module}-0.1.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n", encoding="utf-8")
    lines = ["[harness.backends]", *(f"{key} = {module}:{value}" for key, value in backends.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def interpreter(folder: Path, *paths: Path, torch: bool = True) -> Path:
    """A Python of its own that sees these folders and, unless told otherwise, the torch of this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    shared = [sysconfig.get_path("purelib")] if torch else []
    (site / "brought.pth").write_text("\n".join([*shared, *map(str, paths)]) + "\n", encoding="utf-8")
    return folder / "bin" / "python"
