"""The four durabilities, and what a server must have to give each. `docs/durability.md` says what each survives."""

from __future__ import annotations

from dataclasses import dataclass

from store.views import ServerFacts

MODES = ("memory", "aof", "sync", "replicated")
PAUSED = "always, but not during rewrites"  # what `no-appendfsync-on-rewrite yes` makes of `always`
FSYNCS = ("no", "", "everysec", PAUSED, "always")  # weakest first; "" where the server does not say
MOST_REPLICAS = 16


@dataclass(frozen=True, slots=True)
class Durability:
    """What an acknowledged turn survives. `replicas` is 0 except where they are waited for."""

    mode: str
    replicas: int = 0


def parse_durability(text: str) -> Durability:
    """From `memory`, `aof`, `sync`, `replicated` or `replicated:<replicas>`. Raises ValueError."""
    mode, colon, number = text.partition(":")
    if mode not in MODES or (colon and mode != "replicated"):
        raise ValueError("must be one of " + ", ".join(MODES) + ", replicated:<replicas>")
    if mode != "replicated":
        return Durability(mode)
    if colon and not (number.isdecimal() and 1 <= int(number) <= MOST_REPLICAS):
        raise ValueError(f"{number!r} is no number of replicas: 1 to {MOST_REPLICAS}")
    return Durability(mode, int(number or 1))


def given(server: ServerFacts) -> str:
    """What a server has, in a few words; what it does not say is said too."""
    if not server.append_only:
        file = "no append-only file"
    elif server.append_fsync:
        file = f"append-only file, fsync {server.append_fsync}"
    else:
        file = "append-only file, fsync not verified (CONFIG GET is forbidden)"
    return f"{file}, {server.replicas} replicas" if server.replicas else file


def shortcoming(wanted: Durability, server: ServerFacts) -> str:
    """Why this server cannot give that, with the remedy; empty when it can."""
    match wanted.mode:
        case "aof":
            return _lacks_file(server) or (_lacks_everysec(server) if server.append_fsync == "no" else "")
        case "sync":
            return _lacks_file(server, "sync") or _lacks_always(server)
        case "replicated" if server.replicas < wanted.replicas:
            return (
                f"durability is replicated by {wanted.replicas} but {server.replicas} are connected: give every "
                "primary that many (`replicaof <host> <port>` on each), or set TOKENSPLICE_DURABILITY=replicated:<n> "
                "to what there is, or aof or sync to rely on the primary's disk"
            )
        case _:
            return ""


def _lacks_file(server: ServerFacts, mode: str = "aof") -> str:
    if server.append_only:
        return ""
    return (
        f"durability is {mode} but the server keeps no append-only file: set `appendonly yes` there (on replicas too), "
        "or TOKENSPLICE_DURABILITY=memory if losing every session with the server is meant"
    )


def _lacks_everysec(_: ServerFacts) -> str:
    return (
        "durability is aof but the server leaves it to the kernel when its file reaches the disk: set `appendfsync "
        "everysec` there (on replicas too), or TOKENSPLICE_DURABILITY=memory"
    )


def _lacks_always(server: ServerFacts) -> str:
    if server.append_fsync == "always":
        return ""
    if not server.append_fsync:
        return (
            "durability is sync but this server does not let us read `appendfsync`, so it could not be verified: allow "
            "its user `+config|get`, or set TOKENSPLICE_DURABILITY=aof, which INFO shows to be given"
        )
    return (
        f"durability is sync but `appendfsync` is {server.append_fsync}: set `appendfsync always` and "
        "`no-appendfsync-on-rewrite no` there (on replicas too), or TOKENSPLICE_DURABILITY=aof if losing the last two "
        "seconds with the server is meant"
    )
