"""API keys: which tenant a key speaks for, and keys that *are* a session.

A session key (`tss_...`) is for tools that let one set only a key. It carries tenant and session id, signed
with the tenant's own API key, so no worker has to remember it. With no keys configured the server is open,
one tenant named `default`, and a session key proves nothing: it only names.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple

from api.errors import Unauthorized

OPEN_TENANT = "default"
_PREFIX = "tss_"
_MAC_CHARS = 32


class Identity(NamedTuple):
    """Whose key it is; `session_id` is set when the key is a session key."""

    tenant: str
    session_id: str = ""


class KeyRing:
    """The configured keys, kept as digests so that looking one up takes the same time for every guess."""

    def __init__(self, tenants_by_key: Mapping[str, str] | None) -> None:
        keys = tenants_by_key or {}
        self._tenants = {sha256(key.encode()).digest(): tenant for key, tenant in keys.items()}
        self._secrets: dict[str, list[bytes]] = {} if keys else {OPEN_TENANT: [b"open"]}
        for key, tenant in keys.items():
            self._secrets.setdefault(tenant, []).append(key.encode())

    @property
    def is_open(self) -> bool:
        """Whether anybody may call."""
        return not self._tenants

    def identify_request(self, headers: Mapping[str, str]) -> Identity:
        """The identity of a request's key: bearer token, or Anthropic's `x-api-key`. Raises Unauthorized."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return self.identify(token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", ""))

    def identify(self, key: str) -> Identity:
        """The key's tenant and, for a session key, its session. Raises Unauthorized."""
        if key.startswith(_PREFIX):
            return self._session(key)
        if self.is_open:
            return Identity(OPEN_TENANT)
        tenant = self._tenants.get(sha256(key.encode()).digest())
        if tenant is None:
            raise Unauthorized("send a known key as `Authorization: Bearer <key>` or `x-api-key`")
        return Identity(tenant)

    def session_key(self, tenant: str, session_id: str) -> str:
        """A key that is this session."""
        payload = urlsafe_b64encode(f"{tenant}\0{session_id}".encode()).rstrip(b"=")
        return f"{_PREFIX}{payload.decode()}.{_mac(self._secrets[tenant][0], payload)}"

    def _session(self, key: str) -> Identity:
        payload, _, mac = key.removeprefix(_PREFIX).partition(".")
        try:
            tenant, session_id = urlsafe_b64decode(payload + "=" * (-len(payload) % 4)).decode().split("\0", 1)
        except (ValueError, UnicodeDecodeError):
            raise Unauthorized("the session key is damaged") from None
        secrets = self._secrets.get(tenant, [])
        if not any(hmac.compare_digest(_mac(secret, payload.encode()).encode(), mac.encode()) for secret in secrets):
            raise Unauthorized("the session key was not minted here, or its tenant's key has gone")
        return Identity(tenant, session_id)


def _mac(secret: bytes, payload: bytes) -> str:
    return hmac.new(secret, payload, sha256).hexdigest()[:_MAC_CHARS]
