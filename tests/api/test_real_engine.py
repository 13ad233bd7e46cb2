"""llama.cpp with a real small model: it starts, stops, tells the truth through its witness and agrees on ids."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import aiohttp
import psutil
import pytest
from tokenizers import Tokenizer

from api.assets import smollm2_directory, smollm2_gguf
from api.demo.real_engine import RealEngineUnavailable, running
from api.preparation import prepare_model

REPOSITORY = Path(__file__).parents[2]
FIXTURES = REPOSITORY / "tests/fixtures/llama_server"
PROMPT = [1, 4093, 198, 36218, 915, 9805, 30, 2, 198, 1, 520, 9531, 198]
SAMPLING = {"return_tokens": True, "n_probs": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 3}
WINDOW = 512

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def engine():
    if "CI" not in os.environ:
        pytest.importorskip("xllamacpp")
    with running(smollm2_gguf(), context_length=WINDOW, parallel=2, threads=1) as url:
        yield url


def _ask(url, path, body=None, **headers):
    """Status and body of one request on a connection of its own."""
    with closing(HTTPConnection(url.removeprefix("http://"), timeout=60)) as connection:
        connection.request(
            "GET" if body is None else "POST",
            path,
            body and json.dumps(body),
            {"content-type": "application/json"} | headers,
        )
        reply = connection.getresponse()
        return reply.status, reply.read()


def _recorded(url, rid):
    entries = json.loads(_ask(url, "/sim/record")[1])["entries"]
    (entry,) = (entry for entry in entries if entry["rid"] == rid)
    return entry


def _texts():
    """Fifty texts of all kinds, without control tokens, from this repository and by hand."""
    by_hand = [
        "1234567 8.90",
        "a  b\t\tc\n\n\n d",
        "don't WE'LL",
        "中文 日本語 한국어",
        "👩‍👩‍👧‍👦 🇩🇪",
        "cafe\u0301 Å",
        "\u00a0\u3000\u200b",
        "x" * 99,
    ]
    lines = [
        line for path in sorted((REPOSITORY / "splice").glob("*.py")) for line in path.read_text().splitlines() if line
    ]
    return by_hand + [f"{number * 37} {line}" for number, line in enumerate(lines)][: 50 - len(by_hand)]


def test_fifty_texts_have_the_ids_that_llama_cpp_gives_them(engine, tmp_path):
    prepared = prepare_model(str(smollm2_directory()), cache_dir=tmp_path)
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    texts = _texts()
    assert len(texts) == 50
    for text in texts:
        body = {"content": text, "add_special": False, "parse_special": True}
        assert (
            tokenizer.encode(text, add_special_tokens=False).ids
            == json.loads(_ask(engine, "/tokenize", body)[1])["tokens"]
        )


def test_the_record_holds_what_was_sent_and_what_was_sampled(engine):
    status, reply = _ask(
        engine, "/completion", {"prompt": PROMPT, "n_predict": 9} | SAMPLING, **{"x-request-id": "whole"}
    )
    told = json.loads(reply)
    assert status == 200
    assert [scored["id"] for scored in told["completion_probabilities"]] == told["tokens"]
    assert _recorded(engine, "whole") == {
        "n": _recorded(engine, "whole")["n"],
        "rid": "whole",
        "input_ids": PROMPT,
        "output_ids": told["tokens"],
        "text": told["content"],
        "outcome": "answered",
    }


def test_a_streamed_generation_is_recorded_as_the_same_ids(engine):
    body = {"prompt": PROMPT, "n_predict": 9} | SAMPLING
    _ask(engine, "/completion", body, **{"x-request-id": "at once"})
    _, stream = _ask(engine, "/completion", body | {"stream": True}, **{"x-request-id": "streamed"})
    assert stream.count(b"data: ") > 2
    streamed, at_once = _recorded(engine, "streamed"), _recorded(engine, "at once")
    assert streamed["outcome"] == "answered"
    assert (streamed["output_ids"], streamed["text"]) == (at_once["output_ids"], at_once["text"])


def test_a_refused_prompt_is_recorded_as_failed_and_told_in_the_engines_words(engine):
    status, reply = _ask(engine, "/completion", {"prompt": [1] * (WINDOW + 1)} | SAMPLING, **{"x-request-id": "long"})
    assert status == 400
    assert json.loads(reply)["error"]["type"] == "exceed_context_size_error"
    assert _recorded(engine, "long")["outcome"] == "failed"


def _busy(url):
    return any(slot["is_processing"] for slot in json.loads(_ask(url, "/slots")[1]))


async def _leave(url, rid, **wanted):
    """Ask for a generation and go while it is sampled. Returns once the engine is idle and the record knows."""
    body = {"prompt": PROMPT, "ignore_eos": True} | wanted | SAMPLING
    async with aiohttp.ClientSession(url) as session:
        asked = asyncio.create_task(session.post("/completion", json=body, headers={"x-request-id": rid}))
        while not await asyncio.to_thread(_busy, url):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.02)
        if wanted["stream"]:
            (await asked).close()
        asked.cancel()
        await asyncio.wait([asked])
    while await asyncio.to_thread(_busy, url):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return _recorded(url, rid)


async def test_a_client_that_leaves_a_stream_stops_the_engine(engine):
    entry = await _leave(engine, "left a stream", n_predict=WINDOW, stream=True)
    assert entry["outcome"] == "aborted"
    assert len(entry["output_ids"]) < WINDOW / 2


async def test_a_client_that_leaves_a_whole_reply_is_recorded_as_aborted(engine):
    # llama.cpp samples on for it to the end, which it then tells nobody.
    entry = await _leave(engine, "left", n_predict=40, stream=False)
    assert (entry["outcome"], entry["output_ids"]) == ("aborted", [])


def test_scoring_ids_that_a_client_has_is_no_generation(engine):
    before = _ask(engine, "/sim/record")[1]
    assert _ask(engine, "/completion", {"prompt": PROMPT, "n_predict": 1, "n_probs": 9})[0] == 200
    assert _ask(engine, "/sim/record")[1] == before


def test_the_record_can_be_read_from_a_number_on(engine):
    _ask(engine, "/completion", {"prompt": PROMPT, "n_predict": 1} | SAMPLING, **{"x-request-id": "last"})
    last = _recorded(engine, "last")
    assert json.loads(_ask(engine, f"/sim/record?since={last['n'] - 1}")[1])["entries"] == [last]


@pytest.mark.parametrize("name", sorted(path.stem for path in FIXTURES.glob("*.json") if path.stem != "health_loading"))
def test_the_kept_replies_still_have_the_shape_of_the_live_ones(engine, name):
    kept = json.loads((FIXTURES / f"{name}.json").read_bytes())
    status, reply = _ask(engine, kept["request"]["path"], _fitted(kept["request"]["body"]))
    assert status == kept["status"]
    if "stream" in kept:
        assert _shape(_last_event(reply.decode())) == _shape(_last_event(kept["stream"]))
    else:
        assert _shape(json.loads(reply)) == _shape(kept["body"])


def _fitted(body):
    """The replies were kept from a window half as large."""
    if body and len(body.get("prompt", [])) > 200:
        return body | {"prompt": body["prompt"] + [1] * (WINDOW - 256)}
    return body


def _last_event(stream):
    return json.loads([line for line in stream.splitlines() if line.startswith("data: ")][-1].removeprefix("data: "))


def _shape(value):
    """Keys and kinds, without values and lengths."""
    if isinstance(value, dict):
        return {key: _shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shape(value[0])] if value and isinstance(value[0], dict) else "list"
    return "number" if isinstance(value, int | float) else type(value).__name__


def test_nothing_is_left_running_afterwards():
    pytest.importorskip("xllamacpp")
    before = set(psutil.Process().children(recursive=True))
    with running(smollm2_gguf(), context_length=64, parallel=1):
        started = set(psutil.Process().children(recursive=True)) - before
        assert sorted("--bare" in process.cmdline() for process in started) == [False, True]
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive


def test_llama_cpp_ends_when_the_witness_is_killed():
    pytest.importorskip("xllamacpp")
    command = [
        sys.executable,
        "-m",
        "api.demo.real_engine",
        "--gguf",
        str(smollm2_gguf()),
        "--ctx",
        "64",
        "--parallel",
        "1",
    ]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as witness:
        assert witness.stdout.readline().startswith(b"http://127.0.0.1:")
        (llama,) = psutil.Process(witness.pid).children()
        witness.send_signal(signal.SIGKILL)
    assert llama.wait(20) is not None or not llama.is_running()


def test_the_witness_ends_when_llama_cpp_dies():
    pytest.importorskip("xllamacpp")
    command = [
        sys.executable,
        "-m",
        "api.demo.real_engine",
        "--gguf",
        str(smollm2_gguf()),
        "--ctx",
        "64",
        "--parallel",
        "1",
    ]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as witness:
        assert witness.stdout.readline()
        (llama,) = psutil.Process(witness.pid).children()
        llama.kill()
        assert b"llama.cpp ended" in witness.communicate(timeout=20)[1]
    assert witness.returncode == 1


def test_a_missing_model_file_is_named():
    pytest.importorskip("xllamacpp")
    with pytest.raises(RealEngineUnavailable, match="did not start"), running(Path("/no/such/model.gguf")):
        pass


def test_without_the_extra_the_error_names_it():
    script = """
import sys
sys.modules["xllamacpp"] = None
from api.demo.real_engine import main
sys.exit(main(["--bare", "--gguf", "any"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1
    assert "pip install xllamacpp" in done.stderr
