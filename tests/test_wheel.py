"""The wheel and the source archive hold all that a run needs, and nothing of the repository's other folders."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = """
import os, sys
from setuptools import build_meta
os.chdir(sys.argv[1])
getattr(build_meta, sys.argv[3])(sys.argv[2])
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Archive and wheel, built from what is under version control and without a network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not in a git repository")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    for what in ("build_sdist", "build_wheel"):
        call = [sys.executable, "-c", BUILD, str(source), str(out), what]
        done = subprocess.run(call, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_no_other(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    listed = subprocess.run(["git", "ls-files", "vitrail"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert names == {name for name in listed.stdout.split("\n") if name and (ROOT / name).is_file()}
    with tarfile.open(built[0]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert names <= inside
    assert {"pyproject.toml", "README.md", "LICENSE"} <= inside


@pytest.mark.slow
def test_an_installed_wheel_trains_the_demonstration(built: tuple[Path, Path], tmp_path: Path) -> None:
    """In a folder of its own; torch and the other packages are this machine's."""
    where = tmp_path / "installed"
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(where)
    environment = {**os.environ, "PYTHONPATH": str(where), "PYTHONDONTWRITEBYTECODE": "1"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 600}
    place = [sys.executable, "-c", "import vitrail; print(vitrail.__file__)"]
    said = subprocess.run(place, check=True, **options)  # type: ignore[call-overload]
    assert said.stdout.startswith(str(where))
    words = ["train", "demo", "--optim.epochs", "1", "--data.limit", "200", "--out", "run"]
    done = subprocess.run([sys.executable, "-m", "vitrail", *words], check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "report.html").is_file()
