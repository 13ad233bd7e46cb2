"""Sessions stick to a replica; a lost one moves only its own; nothing is sent twice that may have been read."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from api.engine.base import EngineContract, EngineFacts, EngineTimeout, EngineUnavailable
from api.engine.http import NeverSent
from api.engine.pool import Replicas, rendezvous, routing_headers

URLS = [f"http://engine-{number}:30000" for number in range(4)]
SESSIONS = [f"session/{number}" for number in range(10_000)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("count", [2, 3, 4])
def test_ten_thousand_sessions_spread_within_five_percent_of_even(count: int) -> None:
    share = Counter(rendezvous(URLS[:count], session)[0] for session in SESSIONS)
    even = len(SESSIONS) / count
    assert all(abs(number - even) <= 0.05 * even for number in share.values())
    assert len(share) == count


def test_the_loss_of_one_replica_moves_only_its_share_and_spreads_it() -> None:
    before = {session: rendezvous(URLS, session)[0] for session in SESSIONS}
    after = {session: rendezvous(URLS[1:], session)[0] for session in SESSIONS}
    moved = {session for session in SESSIONS if before[session] != after[session]}
    assert moved == {session for session in SESSIONS if before[session] == URLS[0]}
    spread = Counter(after[session] for session in moved)
    assert all(abs(number - len(moved) / 3) <= 0.1 * len(moved) / 3 for number in spread.values())


def test_the_order_of_the_settings_does_not_matter() -> None:
    assert all(rendezvous(URLS, session) == rendezvous(URLS[::-1], session) for session in SESSIONS[:100])


def test_every_process_agrees_on_the_replica() -> None:
    script = "from api.engine.pool import rendezvous; print(rendezvous(['http://a', 'http://b', 'http://c'], 's')[0])"
    told = {subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout for _ in range(2)}
    assert told == {(rendezvous(["http://a", "http://b", "http://c"], "s")[0] + "\n").encode()}


class Sender:
    """Sends to replicas of which some are down."""

    def __init__(self, *down: str) -> None:
        self.down = set(down)
        self.tried: list[str] = []

    async def __call__(self, url: str) -> str:
        self.tried.append(url)
        if url in self.down:
            raise NeverSent(f"{url} refused")
        return url


async def test_an_unreachable_replica_is_passed_over_for_the_next_of_its_order() -> None:
    first, second, *_ = rendezvous(URLS, "s")
    send = Sender(first)
    assert await Replicas(URLS).ask("s", send) == second
    assert send.tried == [first, second]


async def test_an_unreachable_replica_rests_ever_longer_and_comes_back() -> None:
    clock = Clock()
    replicas = Replicas(URLS, clock=clock)
    first, second, *_ = rendezvous(URLS, "s")
    send = Sender(first)
    rests = []
    for _ in range(7):
        await replicas.ask("s", send)
        rest = 0.0
        while replicas.candidates("s")[0] != first:
            clock.now += 0.5
            rest += 0.5
        rests.append(rest)
    assert rests == [1, 2, 4, 8, 16, 30, 30]

    send.down.clear()
    assert await replicas.ask("s", send) == first
    send.down.add(first)
    assert await replicas.ask("s", send) == second
    clock.now += 1.0
    assert replicas.candidates("s")[0] == first


async def test_many_failures_of_one_outage_count_once() -> None:
    clock = Clock()
    replicas = Replicas(URLS[:1], clock=clock)
    for _ in range(20):
        with pytest.raises(NeverSent):
            await replicas.ask("s", Sender(URLS[0]))
    clock.now += 1.0
    assert replicas._resting(URLS[0], clock.now) is False


async def test_with_every_replica_down_all_are_tried_and_named() -> None:
    send = Sender(*URLS)
    replicas = Replicas(URLS)
    for _ in range(2):  # resting ones too: one that answers is better than none
        send.tried.clear()
        with pytest.raises(NeverSent) as unreachable:
            await replicas.ask("s", send)
        assert sorted(send.tried) == URLS
        assert all(url in str(unreachable.value) for url in URLS)


@pytest.mark.parametrize("error", [EngineUnavailable("dropped"), EngineTimeout("late"), EngineContract("ids", "?")])
async def test_what_may_have_been_read_is_never_sent_again(error: Exception) -> None:
    tried = []

    async def send(url: str) -> str:
        tried.append(url)
        raise error

    with pytest.raises(type(error)):
        await Replicas(URLS).ask("s", send)
    assert len(tried) == 1


def test_routing_headers_carry_any_session_id() -> None:
    assert routing_headers("run/7")["X-SMG-Routing-Key"] == "run/7"
    assert routing_headers("a\r\nx: é")["X-Session-ID"] == "a%0D%0Ax:%20%C3%A9"
    assert routing_headers("") == {}


def facts(**changes: object) -> EngineFacts:
    values = {"context_length": 100, "max_prompt_length": 93, "vocab_size": 10, **changes}
    return EngineFacts(kind="k", version="1", model="m", log_prob_kind="raw", **values)  # type: ignore[arg-type]


async def told_by(*answers: EngineFacts | Exception) -> EngineFacts:
    by_url = dict(zip(URLS, answers, strict=False))

    async def facts_of(url: str) -> EngineFacts:
        answer = by_url[url]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return await Replicas(list(by_url)).agreed_facts(facts_of)


async def test_the_tightest_limits_of_the_replicas_that_answer_hold() -> None:
    told = await told_by(facts(), facts(context_length=80, max_prompt_length=73), EngineUnavailable("down"))
    assert (told.context_length, told.max_prompt_length) == (80, 73)


async def test_replicas_of_different_vocabularies_are_refused() -> None:
    with pytest.raises(EngineContract, match="vocab_size"):
        await told_by(facts(), facts(vocab_size=11))


async def test_one_replica_that_breaks_the_contract_is_enough_to_refuse() -> None:
    with pytest.raises(EngineContract, match="allow_auto_truncate"):
        await told_by(facts(), EngineContract("allow_auto_truncate", "on"))


async def test_with_no_replica_there_are_no_facts() -> None:
    with pytest.raises(EngineUnavailable, match="down"):
        await told_by(EngineUnavailable("down"), EngineUnavailable("down"))
