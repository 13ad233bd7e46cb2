"""Spelled control tokens are characters; texts that spell none are encoded as the tokenizer does it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from api.preparation import AddedToken as ManifestToken
from api.preparation import Manifest
from api.rendering import ModelRenderer
from splice.boundary import Prompt, Splicer
from splice.content import NOTHING_SPELLED, Lexicon, masked
from splice.errors import TemplateRejected
from splice.types import Finish, Head, Lineage, Message, Rendering, ToolCall
from tests.template_models import qwen3_renderer, renderer_for

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def qwen3() -> Splicer:
    return Splicer(qwen3_renderer())


@functools.cache
def lexicon() -> Lexicon:
    return Lexicon(qwen3_renderer())


def controls(splicer: Splicer, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The control tokens among the ids, spelled."""
    names = {number: text for text, number in splicer.renderer.control_tokens.items()}
    return [names[int(number)] for number in ids if int(number) in names]


ADDED = tuple(qwen3_renderer().control_tokens)
plain_text = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=40)
spelling_text = st.lists(plain_text | st.sampled_from(ADDED), min_size=1, max_size=6).map("".join)


def spells_nothing(text: str) -> bool:
    return not any(token in text for token in ADDED)


# -- property tests


@given(st.lists(plain_text.filter(spells_nothing), min_size=1, max_size=3))
@settings(max_examples=100)
def test_texts_that_spell_no_control_token_are_encoded_as_the_tokenizer_does(texts: list[str]) -> None:
    messages = [Message("user", text) for text in texts]
    fields = [{"role": "user", "content": text} for text in texts]
    whole = qwen3().whole(messages, Rendering(), 0.0)
    assert np.array_equal(whole.ids, qwen3_renderer().encode(qwen3_renderer().render(fields)))


@given(spelling_text)
@settings(max_examples=150)
def test_spelled_control_tokens_come_out_as_text_and_never_as_ids(text: str) -> None:
    whole = qwen3().whole([Message("user", text)], Rendering(), 0.0)
    assert controls(qwen3(), whole.ids) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    rendered = qwen3_renderer().render([{"role": "user", "content": text}])
    assert qwen3_renderer().decode(whole.ids) == normalizers.NFC().normalize_str(rendered)


@given(plain_text.filter(spells_nothing), plain_text.filter(spells_nothing))
@settings(max_examples=100)
def test_the_masked_way_gives_what_the_plain_way_gives(left: str, right: str) -> None:
    """Segments that carry no placeholder, and those whose placeholder stands for a harmless text, are equal."""
    text = f"<|im_start|>user\n{left}<|im_end|>\n{right}<|im_end|>"
    mask = masked([left + "<|im_start|>"], lexicon())[1]
    assert np.array_equal(lexicon().encode(text, mask), qwen3_renderer().encode(text))


@given(st.recursive(spelling_text, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_text, inner)))
@settings(max_examples=80)
def test_masking_is_undone_by_restoring(value: Any) -> None:
    (hidden,), mask = masked([value], lexicon())
    text = json.dumps(hidden, ensure_ascii=False)
    assert not any(token in text for token in ADDED)
    assert mask.restore(text) == json.dumps(value, ensure_ascii=False)


# -- every place where content stands


@pytest.mark.parametrize("token", ADDED)
def test_every_added_token_is_text_wherever_it_is_spelled(token: str) -> None:
    bare = conversation("word")
    spelled = conversation(f"a{token}b")
    assert controls(qwen3(), spelled.ids) == controls(qwen3(), bare.ids)
    assert qwen3_renderer().decode(spelled.ids).count(f"a{token}b") == 10


def conversation(text: str) -> Prompt:
    """The text in a system, a user, an assistant and a tool message, a call, a name, a schema and its keys."""
    schema = {"type": "object", "properties": {text: {"type": "string", "description": text, "enum": [text]}}}
    tool = {"type": "function", "function": {"name": text, "description": text, "parameters": schema}}
    messages = [
        Message("system", text),
        Message("user", text),
        Message("assistant", "", tool_calls=(ToolCall(text, json.dumps({text: text})),)),
        Message("tool", "done"),
    ]
    return qwen3().whole(messages, Rendering((tool,), {}), 0.0)


def test_escapes_in_arguments_spell_control_tokens_too() -> None:
    call = ToolCall("f", '{"x": "\\u003c|im_end|>"}')
    whole = qwen3().whole([Message("user", "Hi"), Message("assistant", tool_calls=(call,))], Rendering(), 0.0)
    assert "<|im_end|>" in qwen3_renderer().decode(whole.ids).split('"x": ')[1][:14]
    assert controls(qwen3(), whole.ids).count("<|im_end|>") == 2


def test_reasoning_is_split_off_before_the_rest_of_an_assistants_text_is_made_plain() -> None:
    thought = Message("assistant", "<think>\nhm</think>\n\nYes </think> no")
    whole = qwen3().whole([Message("user", "Hi"), thought], Rendering(), 0.0)
    text = qwen3_renderer().decode(whole.ids)
    assert "<think>\nhm\n</think>\n\nYes </think> no<|im_end|>" in text
    assert controls(qwen3(), whole.ids).count("</think>") == 1


def test_digits_around_a_spelled_token_stay_theirs() -> None:
    text = "90" * 30 + "<|im_end|>" + "09" * 30
    whole = qwen3().whole([Message("user", text)], Rendering(), 0.0)
    assert text in qwen3_renderer().decode(whole.ids)


def test_templates_may_change_case_quote_trim_and_split() -> None:
    treatments = {
        "upper": "m.content|upper",
        "quoted": "m.content|tojson",
        "escaped": "m.content|tojson(ensure_ascii=True)",
        "trimmed": "m.content|trim",
        "split": "m.content.split(' ')|join('_')",
        "printed": "[m.content]",
    }
    for name, expression in treatments.items():
        splicer = Splicer(renderer_for(CHATML.replace("m.content", f"({expression})|string")))
        whole = splicer.whole([Message("user", " a <|im_end|> b ")], Rendering(), 0.0)
        assert controls(splicer, whole.ids) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"], name
        assert splicer.renderer.decode(whole.ids).count("<|im_end|>") == 2, name


def test_a_template_that_cuts_texts_apart_is_refused_rather_than_fooled() -> None:
    splicer = Splicer(renderer_for(CHATML.replace("m.content", "m.content[:20]")))
    with pytest.raises(TemplateRejected, match="cuts apart"):
        splicer.whole([Message("user", "0123456789<|im_end|>")], Rendering(), 0.0)


def test_where_nothing_is_spelled_the_values_are_not_copied() -> None:
    value = {"content": "harmless"}
    (same,), mask = masked([value], lexicon())
    assert same is value
    assert mask is NOTHING_SPELLED


# -- flags and SentencePiece, on small tokenizers made here


def small_model(
    normalizer: normalizers.Normalizer | None = None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
    **flags: bool,
) -> ModelRenderer:
    """A tokenizer with three added tokens under these flags, and a template that writes them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat and the <|user|> said end of it all " * 20], trainer)
    names = ("<|user|>", "<|reply|>", "<|end|>")
    tokenizer.add_tokens([AddedToken(name, **{"normalized": False, **flags}) for name in names])
    decoder: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    added = {
        t.content: ManifestToken(number, t.special, t.lstrip, t.rstrip, t.normalized, t.single_word)
        for number, t in decoder.items()
        if t.content in names
    }
    template = (
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|reply|>' }} {{ m.content }} <|end|> "
        "{% endfor %}"
        "{% if add_generation_prompt %}<|reply|>{% endif %}"
    )
    manifest = Manifest(1, "small", {}, (added["<|end|>"].id,), added, tokenizer.get_vocab_size(), None)
    return ModelRenderer(tokenizer, template, manifest, "small")


SENTENCEPIECE = {
    "first word marked": (None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "every segment marked": (
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        pre_tokenizers.Metaspace(prepend_scheme="never"),
    ),
    "never marked": (normalizers.Replace(" ", "▁"), pre_tokenizers.Metaspace(prepend_scheme="never")),
}


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@pytest.mark.parametrize("flags", [{}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
def test_fragments_have_the_ids_of_the_whole_text_under_every_flag(kind: str, flags: dict[str, bool]) -> None:
    renderer = small_model(*SENTENCEPIECE[kind], **flags)
    splicer = Splicer(renderer)
    first, reply, second = Message("user", "the cat"), Message("assistant", "sat on"), Message("user", "the mat")
    whole = splicer.whole([first, reply, second], Rendering(), 0.0)
    text = renderer.render([{"role": m.role, "content": m.content} for m in (first, reply, second)])
    assert np.array_equal(whole.ids, renderer.encode(text))
    sampled = renderer.encode(text[: text.index("<|end|>", text.index("sat on")) + len("<|end|>")])
    before = Lineage(Head("t", "r", 0.0, Finish("stop"), 4), sampled)
    prompt = splicer.after(before, reply, [second], Rendering())
    assert isinstance(prompt, Prompt)
    assert np.array_equal(np.concatenate((sampled, prompt.ids)), renderer.encode(text))


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@pytest.mark.parametrize("flags", [{}, {"rstrip": True, "lstrip": True}, {"single_word": True}, {"normalized": True}])
def test_masking_leaves_the_other_segments_as_they_were(kind: str, flags: dict[str, bool]) -> None:
    splicer = Splicer(small_model(*SENTENCEPIECE[kind], **flags))
    plain, spelled = Message("user", "the cat"), Message("user", "the <|end|> mat")
    alone = splicer.whole([plain, plain], Rendering(), 0.0).ids
    mixed = splicer.whole([plain, spelled], Rendering(), 0.0).ids
    first = len(splicer.whole([plain], Rendering(), 0.0).ids) - 1
    assert np.array_equal(mixed[:first], alone[:first])
    assert controls(splicer, mixed) == controls(splicer, alone)


def test_other_spellings_of_a_token_that_is_looked_for_in_normalised_text_are_text_too() -> None:
    splicer = Splicer(small_model(normalizers.Lowercase(), normalized=True))
    bare = splicer.whole([Message("user", "the cat")], Rendering(), 0.0)
    shouted = splicer.whole([Message("user", "the <|END|> cat")], Rendering(), 0.0)
    assert controls(splicer, splicer.renderer.encode("<|END|>")) == ["<|end|>"]
    assert controls(splicer, shouted.ids) == controls(splicer, bare.ids)
