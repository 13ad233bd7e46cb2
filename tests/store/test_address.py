"""The forms of a Redis URL."""

from __future__ import annotations

import pytest

from store.address import parse_address


def test_sentinels_are_named_with_their_service_and_both_kinds_of_credentials():
    found = parse_address("redis+sentinel://me:p%40ss@a:1,b,[::1]:3/rollouts/2?sentinel_password=x&sentinel_username=y")
    assert (found.kind, found.service) == ("sentinel", "rollouts")
    assert found.hosts == (("a", 1), ("b", 26379), ("::1", 3))
    assert found.options == {"username": "me", "password": "p@ss", "db": 2}
    assert found.sentinel_options == {"username": "y", "password": "x"}


def test_what_is_not_said_of_sentinels_is_the_usual():
    found = parse_address("redis+sentinel://a")
    assert (found.hosts, found.service, found.options) == ((("a", 26379),), "mymaster", {"db": 0})


def test_a_cluster_is_named_by_some_of_its_nodes_and_encrypted_where_asked():
    found = parse_address("rediss+cluster://word@a:1,b?ssl_ca_certs=/ca.pem")
    assert (found.kind, found.hosts) == ("cluster", (("a", 1), ("b", 6379)))
    assert found.options == {"username": "word", "ssl": True, "ssl_ca_certs": "/ca.pem"}


@pytest.mark.parametrize("url", ["redis://h:1/0", "rediss://h", "unix:///run/redis.sock"])
def test_single_servers_are_left_to_the_library(url):
    assert parse_address(url).kind == "server"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://x", "must begin with"),
        ("unix+cluster:///x", "must begin with"),
        ("redis+other://x", "must begin with"),
        ("redis+cluster://", "names no host"),
        ("redis+cluster://a:1/1", "only database 0"),
        ("redis+sentinel://a:x/s", "no host:port"),
        ("redis+sentinel://a/s/x", "no database number"),
    ],
)
def test_what_cannot_be_used_is_said_in_words(url, says):
    with pytest.raises(ValueError, match=says):
        parse_address(url)
