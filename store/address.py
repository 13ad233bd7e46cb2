"""What a Redis URL says: which kind of deployment it names, at which hosts, and how to connect there.

    redis://host:port/db      rediss:// with TLS      unix:///path?db=0
    redis+sentinel://host:port,host:port/service/db
    redis+cluster://host:port,host:port

Credentials stand before the hosts and query arguments at the end, as in redis-py's own URLs. Sentinels that ask for
credentials of their own get `sentinel_username` and `sentinel_password` from the query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from redis.asyncio.connection import SSLConnection, parse_url

Host = tuple[str, int]

_SERVICE = "mymaster"  # what Sentinel's own documentation and most charts call it
_PORTS = {"sentinel": 26379, "cluster": 6379}


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL. `options` and `sentinel_options` are a connection's keyword arguments, without host and port."""

    kind: Literal["server", "sentinel", "cluster"]
    url: str
    hosts: tuple[Host, ...] = ()
    service: str = ""
    options: Mapping[str, Any] | None = None
    sentinel_options: Mapping[str, Any] | None = None


def parse_address(url: str) -> Address:
    """Raises ValueError, in words for the operator."""
    scheme, _, rest = url.partition("://")
    base, plus, kind = scheme.partition("+")
    if not plus and base in {"redis", "rediss", "unix"}:
        parse_url(url)
        return Address("server", url)
    if base not in {"redis", "rediss"} or kind not in _PORTS:
        raise ValueError(
            "must begin with redis://, rediss:// or unix://, or redis+sentinel:// or redis+cluster:// (rediss+ for TLS)"
        )
    authority, path, query = _split(rest)
    credentials, at, listed = authority.rpartition("@")
    hosts = tuple(_host(part, _PORTS[kind]) for part in listed.split(",") if part.strip())
    if not hosts:
        raise ValueError("names no host")
    options: dict[str, Any] = dict(parse_url(f"{base}://{credentials}{at}host{query}"))
    del options["host"]
    if options.pop("connection_class", None) is SSLConnection:
        options["ssl"] = True
    if kind == "cluster":
        if path.strip("/") not in {"", "0"}:
            raise ValueError("a cluster has only database 0")
        return Address("cluster", url, hosts, options=options)
    return _sentinel(url, hosts, path, options)


def _split(rest: str) -> tuple[str, str, str]:
    """Authority, path, and query with its question mark."""
    before, mark, query = rest.partition("?")
    authority, slash, path = before.partition("/")
    return authority, slash + path, mark + query


def _host(text: str, port: int) -> Host:
    name, colon, number = text.strip().rpartition(":")
    if not colon or name.endswith(":") or (name.startswith("[") and not name.endswith("]")):
        name, number = text.strip(), str(port)
    name = unquote(name.removeprefix("[").removesuffix("]"))
    if not name or not number.isdecimal():
        raise ValueError(f"{text!r} is no host:port")
    return name, int(number)


def _sentinel(url: str, hosts: tuple[Host, ...], path: str, options: dict[str, Any]) -> Address:
    service, _, database = path.strip("/").partition("/")
    if database and not database.isdecimal():
        raise ValueError(f"{database!r} is no database number: the path is /service/db")
    options.setdefault("db", int(database or 0))
    shared = {name: value for name, value in options.items() if name.startswith("ssl")}
    own = {
        name.removeprefix("sentinel_"): options.pop(name)
        for name in ("sentinel_username", "sentinel_password")
        if name in options
    }
    return Address("sentinel", url, hosts, unquote(service) or _SERVICE, options, {**shared, **own})
