"""Every Redis key: its name, its type, what is in it and how long it lives.

Ids come from clients, so each is percent-encoded (`quote`): no id can leave its place in a key, and no tenant can
name another's key. Everything of one session *tree* (a session and its forks) shares one hash tag,
`{<tenant>:<root session>}`, so one script sees it all, on a cluster too.

In a tree, `ts1:{<tenant>:<root>}:` and then

  session:<sid>   HASH  what the session is, as text: id, tenant, schema, state (open, finished, deleted), created and
                        updated (ISO-8601), run, group, model, turns, tokens, sampled_tokens, last_turn, metadata and
                        sampling_params (JSON), ttl_s, on_rendering_change, on_overflow, thinking, status, reward, and a
                        field `root:<turn>` for each root: `<rendering signature> <clock> <rendering digest>`.
                        A fork's key, under the fork's own tag, holds only `root`, the session whose tag it lives under.
                        A deleted session leaves `state deleted` behind, so that late turns are told.
  links           HASH  turn -> one line of text, all that scripts need of a turn, in this order: extended (0 or 1),
                        order of commit, parent, root, session, prompt length, delta's length, delta's digest,
                        generation's length, generation's digest, finish, settings' digest. "%" stands for nothing:
                        no parent, its own root, the tree's own session. Only `extended` ever changes.
  turns           HASH  turn -> MessagePack record {schema, min_reader, ...}; see `codec.TurnRecord`
  tokens          HASH  turn -> its sampled ids; `=<digest>` -> a prompt delta's ids, equal deltas once.
                        Three little-endian bytes an id (four where an id needs them). Measured at turns of 256 + 256
                        tokens on Redis 7.0: jemalloc rounds 1,024 bytes up to 1,280, so the tree costs 8.8 bytes a
                        token beside its text with u32 and 7.3 with u24 (Valkey 9.1: 7.4 and 6.4), where the budget is
                        8. Widening 128k ids takes 1 ms, on cache misses only. `redis-cli HGET ... | od -An -v -tu1 -w3`
  logprobs        HASH  turn -> `f4` or `f8`, then little-endian floats; f4 whenever that loses nothing
  text            HASH  turn -> the request's new messages and the reply: MessagePack by position, brotli
  shared          HASH  digest -> what many turns have in common, JSON, brotli where that helps: sampling parameters
                        with model and engine; and on roots, the tools and template arguments
  index:<sid>     HASH  chain hash -> turns, oldest first: the conversation up to and including the turn's reply
  requests:<sid>  HASH  request hash -> turns, oldest first; `key:<idempotency key>` -> turn and request hash
  rewards:<sid>   HASH  turn -> JSON {reward, source, at}
  attempts:<sid>  HASH  what runs now; an attempt's id is the id of the turn that it will commit:
                        request hash -> `attempt worker` for each, oldest first;
                        `key:<idempotency key>` -> `attempt worker <request hash>`;
                        `waits:<attempt>` -> a number that grows while clients wait for it beside its own;
                        `taken:<attempt>` -> who took over, "%" when it was given up: it commits no more
  delivered       HASH  turn -> who delivers it: a worker, or `worker attempt` of a replay. "0": seen undelivered.
                        Absent: delivered. By a worker that is gone: not known
  fence           STRING  empty, lives a millisecond: what `WAIT` waits behind (see `replication`)
 laid out for *Trainer*, which fills them
  sessions        SET   the tree's session ids, once it has forks; keys go with the last of them
  pins            HASH  checkpoint -> the session's heads at that instant; while it exists the tree has no TTL
  superseded      SET   turns that a restore in place took out of find, replay and samples
  owners          HASH  turn -> the finished session in which it trains

Beside the trees, each in a slot of its own

  ts1:{<tenant>}:sessions               ZSET  session -> last use, ms. Written before the session exists and refreshed
                                              in batches after replies; members whose session is gone are pruned
  ts1:{<tenant>}:run:<run>              ZSET  the same, of one run
  ts1:{<tenant>~<chain hash>}:seen      ZSET  `<turn> <session> <generation digest>` -> commit time, ms: which unnamed
                                              sessions hold this conversation. Written before the commit, verified by
                                              `find`, newest 1,024 kept
  ts1:{<tenant>~<request hash>}:asked   ZSET  `<turn> <session>` -> commit time, ms: first turns of unnamed sessions,
                                              for marked retries. As `seen`
  ts1:{worker:<id>}:alive               STRING  a worker lives: JSON {host, pid, started}. TTL of seconds, rewritten
                                              while it runs
 laid out for later
  ts1:{<tenant>}:finished:<run>         ZSET  finished sessions that no consumer has acknowledged
  ts1:{<tenant>}:claims:<run>           HASH  claim -> consumer, lease, its sessions, delivery count
  ts1:{<tenant>}:checkpoints            HASH  name -> JSON summary
  ts1:{<tenant>}:checkpoint:<name>      HASH  session -> heads
  ts1:{key:<sha256>}:apikey             HASH  tenant and session of a session's own API key

 written by `migrations`
  ts1:migrations                        HASH  migration -> when it was applied
  {ts1:migrations}:lock                 STRING  the running migration's token
  ts1:schema                            HASH  layout -> the version of these keys

TTL: every key of a tree gets the session's `ttl_s` (else the store's default) in the commit that uses it, rewritten
once a sixteenth of it has passed; `seen` and `asked` get it once, when written. Listings are pruned instead.
`attempts`, which may be there before its session, always has one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote as percent_encode
from urllib.parse import unquote as percent_decode

SCHEMA_VERSION = 1
PREFIX = f"ts{SCHEMA_VERSION}"
NOTHING = "%"  # an empty id; percent-encoding never writes a bare %
TOMBSTONE_TTL_MS = 7 * 86_400_000  # of a deleted session that had no TTL of its own
SEEN_KEPT = 1024
SEEN_TTL_MS = 30 * 86_400_000  # of `seen` and `asked` where sessions have no TTL
ATTEMPTS_TTL_MS = 86_400_000  # of `attempts` where sessions have no TTL

_PLAIN = re.compile(r"[A-Za-z0-9_.~-]+")


def quote(identifier: str) -> str:
    """An id as it stands in keys, fields and lines: no brace, colon, space or control character survives."""
    if _PLAIN.fullmatch(identifier):
        return identifier
    return percent_encode(identifier, safe="", errors="surrogatepass") or NOTHING


def unquote(quoted: str) -> str:
    """The id that `quote` was given."""
    return "" if quoted == NOTHING else percent_decode(quoted, errors="surrogatepass")


@dataclass(frozen=True, slots=True)
class Tree:
    """The keys of one session tree, all in one slot."""

    tenant: str
    root_session: str

    @property
    def tag(self) -> str:
        """What every key of the tree begins with."""
        return f"{PREFIX}:{{{quote(self.tenant)}:{quote(self.root_session)}}}"

    def session(self, session_id: str) -> str:
        """The session's main key."""
        return f"{self.tag}:session:{quote(session_id)}"

    def all(self, session_id: str) -> tuple[str, ...]:
        """Every key that a session's turns are kept in, in the order that the scripts expect."""
        tag, sid = self.tag, quote(session_id)
        return (
            f"{tag}:session:{sid}",
            f"{tag}:links",
            f"{tag}:turns",
            f"{tag}:tokens",
            f"{tag}:logprobs",
            f"{tag}:text",
            f"{tag}:shared",
            f"{tag}:index:{sid}",
            f"{tag}:requests:{sid}",
            f"{tag}:rewards:{sid}",
            f"{tag}:attempts:{sid}",
            f"{tag}:delivered",
        )

    def attempts(self, session_id: str) -> str:
        """What runs in a session now."""
        return f"{self.tag}:attempts:{quote(session_id)}"

    @property
    def delivered(self) -> str:
        """Turns that are not known to be delivered."""
        return f"{self.tag}:delivered"


def listing(tenant: str, run_id: str = "") -> str:
    """A tenant's sessions by last use, or those of one run."""
    tag = f"{PREFIX}:{{{quote(tenant)}}}"
    return f"{tag}:run:{quote(run_id)}" if run_id else f"{tag}:sessions"


def seen(tenant: str, chain_field: str) -> str:
    """Where unnamed sessions that hold this conversation are remembered."""
    return f"{PREFIX}:{{{quote(tenant)}~{chain_field}}}:seen"


def asked(tenant: str, request_field: str) -> str:
    """Where first turns of unnamed sessions are remembered by their request."""
    return f"{PREFIX}:{{{quote(tenant)}~{request_field}}}:asked"


def alive(worker_id: str) -> str:
    """There while the worker runs."""
    return f"{PREFIX}:{{worker:{worker_id}}}:alive"
