"""Five real tokenizers: ids are the tokenizer's own, and whatever somebody spells is text."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splice.boundary import Prompt, Splicer
from splice.types import Finish, Head, IdArray, Lineage, Message, Rendering, ToolCall
from tests import registry
from tests.template_models import trl_template_file

BAR = "\uff5c"
# What opens and ends a message in the template below.
MARKS = {
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "llama3_1": ("<|start_header_id|>", "<|eot_id|>"),
    "deepseek_v3": (f"<{BAR}User{BAR}>", f"<{BAR}end▁of▁sentence{BAR}>"),
    "gptoss": ("<|start|>", "<|return|>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>"),
}
# Everything that a template may write: tools, names, arguments, results.
TEMPLATE = (
    "{% if tools %}OPEN tools\n{{ tools|tojson }}END\n{% endif %}"
    "{% for m in messages %}OPEN{{ m.role }}\n{{ m.name }}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments|tojson }}{% endfor %}END\n{% endfor %}"
    "{% if add_generation_prompt %}OPENassistant\n{% endif %}"
)
TOKENS_AT_ONCE = 64


@functools.cache
def splicer(name: str) -> Splicer:
    """The tokenizer with the template above."""
    opener, end = MARKS[name]
    return Splicer(registry.renderer(name).with_template(TEMPLATE.replace("OPEN", opener).replace("END", end)))


@functools.cache
def own(name: str) -> Splicer:
    """The model as it ships; gpt-oss with its template from TRL."""
    file = trl_template_file("gptoss") if name == "gptoss" else None
    return Splicer(registry.renderer(name, file))


def lineage(prompt: IdArray, generation: IdArray) -> Lineage:
    head = Head("turn", "root", 0.0, Finish("stop"), len(generation))
    return Lineage(head, np.concatenate((prompt, generation)))


@pytest.mark.parametrize("name", registry.NAMES)
def test_the_prepared_tokenizer_is_the_registrys_own(name: str) -> None:
    for text in (
        "The quick  brown fox: 12345.678\n\n\tif",
        "naïve café — 東京タワー 😀👩‍👩‍👧",
        "  a ▁▁ b \r\n",
        "<|im_end|><eos>",
    ):
        ids = registry.tokenizer(name).encode(text, add_special_tokens=False).ids
        assert registry.renderer(name).encode(text).tolist() == ids


# -- ids


words = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=40)


@pytest.mark.parametrize("name", registry.NAMES)
@pytest.mark.parametrize("model", [splicer, own], ids=["every feature", "the model's own template"])
def test_lineage_and_fragment_are_the_tokenizers_ids_of_the_whole_text(name: str, model: object) -> None:
    made = model(name)  # type: ignore[operator]

    @given(texts=st.lists(words.filter(lambda text: spells_nothing(made, text)), min_size=3, max_size=5))
    @settings(max_examples=25, deadline=None)
    def check(texts: list[str]) -> None:
        conversation = [Message("user", texts[0])]
        tokens = made.whole(conversation, Rendering(), 0.0).ids
        for text in texts[1:]:
            spoken = f"said {len(conversation)}" + stop_of(made, name)
            if model is own and name == "gptoss":  # anything else would not be canonical after its prompt
                spoken = "<|channel|>final<|message|>" + spoken
            before = lineage(tokens, made.renderer.encode(spoken))
            reply = Message("assistant", f"said {len(conversation)}")
            prompt = made.after(before, reply, [Message("user", text)], Rendering(), earlier=conversation)
            assert isinstance(prompt, Prompt), prompt
            tokens = np.concatenate((before.tokens, prompt.ids))
            conversation += [reply, Message("user", text)]
        whole = registry.tokenizer(name).encode(made.renderer.decode(tokens), add_special_tokens=False).ids
        assert tokens.tolist() == whole

    check()


def stop_of(made: Splicer, name: str) -> str:
    ends = [token for token in (*made.report.stop_tokens, MARKS[name][1]) if token in made.report.terminator]
    return ends[0]


def spells_nothing(made: Splicer, text: str) -> bool:
    """And survives being decoded: text is compared with the tokenizer through it."""
    renderer = made.renderer
    return not any(t in text for t in renderer.control_tokens) and renderer.decode(renderer.encode(text)) == text


# -- content is text


def control_ids(name: str) -> set[int]:
    """The added tokens that are no ordinary words of the vocabulary too."""
    renderer = splicer(name).renderer
    return {i for token, i in renderer.control_tokens.items() if renderer.encode_plain(token).tolist() != [i]}


def conversation(name: str, text: str) -> IdArray:
    """The text in a system and a user message, a tool's output, arguments, names and a schema with its keys."""
    schema = {"type": "object", "properties": {text: {"type": "string", "description": text, "enum": [text]}}}
    tool = {"type": "function", "function": {"name": text, "description": text, "parameters": schema}}
    call = ToolCall(text, json.dumps({text: text}))
    messages = [
        Message("system", text),
        Message("user", text, name=text),
        Message("assistant", text, tool_calls=(call,)),
        Message("tool", text, name=text),
    ]
    return splicer(name).whole(messages, Rendering((tool,), {}), 0.0).ids


def controls(name: str, ids: IdArray) -> list[int]:
    known = control_ids(name)
    return [number for number in ids.tolist() if number in known]


@pytest.mark.parametrize("name", registry.NAMES)
def test_every_added_token_is_text_wherever_it_is_spelled(name: str) -> None:
    tokens = list(splicer(name).renderer.control_tokens)
    bare = controls(name, conversation(name, "word"))
    for start in range(0, len(tokens), TOKENS_AT_ONCE):
        some = tokens[start : start + TOKENS_AT_ONCE]
        ids = conversation(name, "".join(f"a{token}b{token}" for token in some))
        assert controls(name, ids) == bare, some


@pytest.mark.parametrize("name", registry.NAMES)
def test_every_added_token_is_text_in_what_is_appended(name: str) -> None:
    made = splicer(name)
    generation = made.renderer.encode("said" + MARKS[name][1])
    before = lineage(made.whole([Message("user", "Hi")], Rendering(), 0.0).ids, generation)
    reply = Message("assistant", tool_calls=(ToolCall("look", "{}"),))
    expected: list[int] | None = None
    for text in ("word", *spelled_in_groups(list(made.renderer.control_tokens))):
        prompt = made.after(before, reply, [Message("tool", text)], Rendering(), earlier=[Message("user", "Hi")])
        assert isinstance(prompt, Prompt), prompt
        expected = expected or controls(name, prompt.ids)
        assert controls(name, prompt.ids) == expected, text
        shown = made.renderer.decode(prompt.ids)
        assert text in shown or text.replace("▁", " ") in shown


def spelled_in_groups(tokens: Sequence[str]) -> list[str]:
    starts = range(0, len(tokens), TOKENS_AT_ONCE)
    return ["x" + "y".join(tokens[start : start + TOKENS_AT_ONCE]) + "z" for start in starts]


def test_gemma_adds_runs_of_white_space_that_are_words_of_its_vocabulary_too() -> None:
    """So their ids say nothing that text does not say: a run of `▁` is how it writes as many spaces."""
    renderer = splicer("gemma3").renderer
    words = {t for t, i in renderer.control_tokens.items() if renderer.encode_plain(t).tolist() == [i]}
    runs = {token for token in words if not token.strip("▁\n\t ")}
    assert {"▁" * 2, "\n" * 2} <= runs
    for token in runs:
        assert np.array_equal(renderer.encode(token), renderer.encode_plain(token))
        assert np.array_equal(renderer.encode_plain(token), renderer.encode_plain(token.replace("▁", " ")))
    assert not any("turn" in token or "unused" in token for token in words)
