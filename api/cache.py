"""Where prepared models and fetched files are kept on this machine, and how they get there whole.

Several processes, of several versions of tokensplice, may share a cache: what is in it appears by rename, is
never changed afterwards and is named by what it was made from.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

Progress = Callable[[str], None]


def default_cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """TOKENSPLICE_CACHE_DIR, else in the user's cache folder, else (no home to write to) a temporary one."""
    if chosen := environment.get("TOKENSPLICE_CACHE_DIR"):
        return Path(chosen).expanduser()
    for base in _user_caches(environment):
        if _writable(base / "tokensplice"):
            return base / "tokensplice"
    return _temporary_cache()


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Find `directory`, or let `make` fill a folder aside that is then renamed to it.

    Processes that want the same directory wait for the one that makes it.
    """
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with alone(directory.with_name(f"{directory.name}.lock")):
        if not directory.exists():
            with folder_aside(directory.parent) as aside:
                make(aside)
                settle(aside, directory)
    return directory


@contextlib.contextmanager
def folder_aside(parent: Path) -> Iterator[Path]:
    """An empty folder on the file system of `parent`; gone afterwards unless it was settled."""
    aside = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def settle(aside: Path, directory: Path) -> None:
    """Give a finished folder its name. Whoever came first with the same name made the same thing and keeps it."""
    for path in aside.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # a rename may outlive a power cut that the bytes did not
    aside.chmod(0o755)
    try:
        aside.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock, which the system lets go when this process dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _user_caches(environment: Mapping[str, str]) -> Iterator[Path]:
    if xdg := environment.get("XDG_CACHE_HOME"):
        yield Path(xdg)
    if home := environment.get("HOME"):
        yield Path(home) / ".cache"


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


def _temporary_cache() -> Path:
    # The name is guessable in a folder that everybody may write to: a stranger's folder there is not used.
    directory = Path(tempfile.gettempdir()) / f"tokensplice-{os.getuid()}"
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, exist_ok=True)
        if directory.lstat().st_uid == os.getuid() and not directory.is_symlink():
            return directory
    return Path(tempfile.mkdtemp(prefix="tokensplice-"))
