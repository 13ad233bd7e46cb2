"""What the demo compares with is what servers without memory really send: transformers' own rendering."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.assets import qwen3_directory
from api.demo import world
from api.demo.evidence import Json
from api.demo.rerender import Rerenderer

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "run_shell", "arguments": '{"command":"ls  -la\\n# ü","n":1.0}'},
}
CONVERSATION: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "[rollout ab] go"}]},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL], "refusal": None},
    {"role": "tool", "tool_call_id": "c1", "content": "a <|im_end|>\n日本"},
    {"role": "assistant", "content": "<think>\nold\n</think>\n\ndone  "},
    {"role": "user", "content": "more"},
]


@pytest.fixture(scope="module")
def directory() -> Path:
    return qwen3_directory()


@pytest.fixture(scope="module")
def rerenderer(directory: Path) -> Rerenderer:
    return Rerenderer(directory)


def test_ids_are_those_of_transformers(directory: Path, rerenderer: Rerenderer) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    as_servers_pass_it = [dict(message) for message in CONVERSATION]
    as_servers_pass_it[1]["content"] = "[rollout ab] go"
    as_servers_pass_it[2]["content"] = ""
    function = {"name": "run_shell", "arguments": {"command": "ls  -la\n# ü", "n": 1.0}}
    as_servers_pass_it[2]["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
    text = tokenizer.apply_chat_template(
        as_servers_pass_it, tools=list(world.TOOLS), add_generation_prompt=True, tokenize=False
    )
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(rerenderer.rerender(CONVERSATION, world.TOOLS)) == expected


def test_a_tag_in_the_user_text_can_be_read_off_the_ids(rerenderer: Rerenderer) -> None:
    assert "[rollout ab] go" in rerenderer.decode(rerenderer.rerender(CONVERSATION, ()))


def test_a_conversation_that_the_template_refuses_renders_to_nothing(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(directory / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert Rerenderer(tmp_path).rerender(CONVERSATION, ()) == ()


def test_arguments_that_are_no_json_reach_the_template_as_text(rerenderer: Rerenderer) -> None:
    broken = {"id": "c1", "type": "function", "function": {"name": "run_shell", "arguments": '{"command": '}}
    ids = rerenderer.rerender([CONVERSATION[1], {"role": "assistant", "content": "", "tool_calls": [broken]}], ())
    assert '{"command": ' in rerenderer.decode(ids)
