"""The worker's renderer equals transformers, stays inside its sandbox and may be used from any thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from api.assets import qwen3_directory
from api.preparation import PreparationError
from api.rendering import ModelRenderer
from api.sandbox import CompiledTemplate
from splice.errors import TemplateRejected
from tests.template_models import chat_templates, qwen3_prepared, qwen3_renderer

Fields = Mapping[str, Any]
TOOLS: Sequence[Fields] = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": 'Looks <b>"things"</b> up & says où.',
            "parameters": {
                "type": "object",
                "properties": {"q": {"type": "string", "description": "What.", "enum": ["a", "b"]}},
                "required": ["q"],
            },
        },
    },
)


def call(arguments: Any) -> Fields:
    function = {"name": "look", "arguments": arguments}
    calls = [{"id": "abc123def", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Où est <b>Paris</b>?\n"}
RESULT = {"role": "tool", "content": '{"t": 21}', "tool_call_id": "abc123def", "name": "look"}
THOUGHT = {"role": "assistant", "content": "There.", "reasoning_content": "Hm.\n"}
DIALOGUES: Sequence[tuple[Sequence[Fields], Sequence[Fields], Fields]] = (
    ([USER], (), {}),
    ([SYSTEM, USER], TOOLS, {}),
    ([USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nThere."}, USER], (), {}),
    ([SYSTEM, USER, THOUGHT, USER], (), {"enable_thinking": False}),
    ([USER, {"role": "assistant", "content": "a", "reasoning": "b"}], (), {"enable_thinking": True, "thinking": True}),
    ([SYSTEM, USER, call({"q": "a", "n": None, "f": 1.5, "b": True}), RESULT], TOOLS, {}),
    ([USER, call('{"q": "a"}'), RESULT, THOUGHT, USER], TOOLS, {}),
    ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], (), {}),
)


class TransformersRendering:
    """transformers' own rendering with the same tokenizer."""

    def __init__(self) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(qwen3_directory())

    def render(self, template: str, messages: Sequence[Fields], tools: Sequence[Fields], kwargs: Fields) -> str | None:
        """The text, or None where the template raises."""
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
                **kwargs,
            )
        except Exception:  # noqa: BLE001 - a template may raise anything
            return None
        return str(text)


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers tells the local time, we tell UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("utc")
def test_every_template_renders_as_in_transformers() -> None:
    theirs = TransformersRendering()
    rendered = 0
    for stem, template in chat_templates().items():
        renderer = Bare(template)
        for messages, tools, kwargs in DIALOGUES:
            expected = theirs.render(template, messages, tools, kwargs)
            assert text_or_none(renderer, messages, tools, kwargs) == expected, (stem, messages)
            rendered += expected is not None
    assert rendered > 4 * len(chat_templates())


class Bare:
    """Another template on Qwen3's tokenizer, without building the tokenizer anew."""

    def __init__(self, template: str) -> None:
        self._renderer = qwen3_renderer().with_template(template)

    def render(self, messages: Sequence[Fields], tools: Sequence[Fields], kwargs: Fields) -> str:
        return self._renderer.render(messages, tools=tools, kwargs=kwargs, clock=time.time())


def text_or_none(renderer: Bare, messages: Sequence[Fields], tools: Sequence[Fields], kwargs: Fields) -> str | None:
    try:
        return renderer.render(messages, tools, kwargs)
    except TemplateRejected:
        return None


# -- the sandbox


def render(template: str, **variables: Any) -> str:
    return CompiledTemplate(template).render(variables, clock=0.0, seconds=0.5)


HOSTILE = {
    "an endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "exponential recursion": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
    ),
    "huge output": "{% set x = 'a' * 1000000 %}{% for a in range(99999) %}{{ x }}{% endfor %}",
    "huge output in a macro": (
        "{% set x = 'a' * 1000000 %}{% macro f() %}{% for a in range(9999) %}{{ x }}{% endfor %}{% endmacro %}{{ f() }}"
    ),
    "a doubled string": "{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a doubled concatenation": (
        "{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    ),
    "a doubled list": "{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a huge repetition": "{{ 'a' * 10000000000 }}",
    "a huge power": "{{ 9 ** 10000000000 }}",
    "powers of powers": "{% set n = namespace(x=9) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a huge width": "{{ 'a'|center(10000000000) }}",
    "a huge justification": "{{ 'a'.ljust(10000000000) }}",
    "a huge format": "{{ '%10000000000d' % 1 }}",
    "another huge format": "{{ '{:>10000000000}'.format('a') }}",
    "a huge replacement": "{% set x = 'a' * 100000 %}{{ x.replace('a', x) }}",
    "a huge replacing filter": "{% set x = 'a' * 100000 %}{{ x|replace('a', x) }}",
    "a huge translation": "{% set x = 'a' * 100000 %}{{ x.translate({97: x}) }}",
    "huge tabs": "{% set x = '\t' * 100000 %}{{ x.expandtabs(90000) }}",
    "many fields": "{% set x = '{0}' * 100000 %}{{ x.format(x) }}",
    "many percents": "{% set x = '%(a)s' * 100000 %}{{ x % {'a': x} }}",
    "a width in the arguments": "{{ '%*d' % (1000000000, 1) }}",
    "a huge rounding": "{{ 1|round(-1000000000) }}",
    "a list in itself": (
        "{% set n = namespace(x=['a']) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}"
    ),
    "a dictionary in itself": (
        "{% set n = namespace(x={}) %}{% for a in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}"
    ),
    "arguments in themselves": "{% macro f() %}{{ f(varargs, varargs) }}{% endmacro %}{{ f('a', 'a') }}",
    "a sum of lists": (
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x]|sum(start=[]) %}{% endfor %}"
    ),
    "filled batches": "{% set x = 'a' * 1000000 %}{{ [1]|batch(100000, x)|list }}",
    "many long texts": (
        "{% set n = namespace(x=[]) %}{% for a in range(9999) %}{% set n.x = n.x + ['a' * 1000000] %}{% endfor %}"
    ),
    "many long lists": (
        "{% set x = 'a' * 1000000 %}{% set n = namespace(x=[]) %}"
        "{% for a in range(9999) %}{% set n.x = [x.split('a'), n.x] %}{% endfor %}"
    ),
    "a constant of enormous size": "{% set x = 'a'|center(10000000000) %}",
    "a huge joining of made parts": "{% set x = 'a' * 1000000 %}{{ x.join(range(99999)|map('string')) }}",
    "a huge joining filter": "{% set x = 'a' * 1000000 %}{{ range(99999)|join(x) }}",
    "a huge joining": "{% set x = 'a' * 1000000 %}{{ x.join(range(99999)) }}",
    "a huge indent": "{{ [1]|tojson(indent=10000000000) }}",
    "a huge range": "{{ range(10000000000)|list }}",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a function's globals": "{{ raise_exception.__globals__['json'] }}",
    "an underscored namespace": "{{ namespace(__class__=1) }}",
    "a changed list": "{{ [].append(1) }}",
    "an import": "{% import 'os' as os %}",
    "a syntax error": "{% if %}",
    "an unknown tag": "{% nothing %}",
    "a Python error": "{{ 1 / 0 }}",
    "a type error": "{{ 'a' + 1 }}",
    "something undefined": "{{ nothing.at.all }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_in_time(name: str) -> None:
    started = time.thread_time()
    with pytest.raises(TemplateRejected) as refused:
        render(HOSTILE[name])
    assert refused.value.words
    assert time.thread_time() - started < 3.0


def test_a_refusal_is_in_the_templates_own_words() -> None:
    with pytest.raises(TemplateRejected, match="roles must alternate") as refused:
        render("{{ raise_exception('roles must alternate') }}")
    assert refused.value.words == "roles must alternate"
    with pytest.raises(TemplateRejected, match="line 2"):
        CompiledTemplate("a\n{% endfor %}")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for a in x %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}", "1/3,2/3,3/3"),
        ("{% for a in x %}{{ loop.previtem }}<{{ a }}>{{ loop.nextitem }} {% endfor %}", "<1>2 1<2>3 2<3> "),
        ("{% for a in x if a > 1 %}{{ a }}{% else %}none{% endfor %}", "23"),
        ("{% for a in [] %}{{ a }}{% else %}none{% endfor %}", "none"),
        ("{% for a in x %}{% if a == 2 %}{% continue %}{% endif %}{{ a }}{% endfor %}", "13"),
        ("{% for a in t recursive %}{{ a.n }}{{ loop(a.c) if a.c }}{% endfor %}", "12"),
        ("{% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% endfor %}", "a1"),
        ("{% generation %}{% set y = 1 %}in{% endgeneration %}{{ y is defined }}", "inFalse"),
        ("{{ {'é<': '&'}|tojson }} {{ [1]|tojson(indent=1) }}", '{"é<": "&"} [\n 1\n]'),
        ("{{ strftime_now('%Y-%m-%d') }}", "1970-01-01"),
        ("{{ dict(a=1).a }}{{ namespace(self=2).self }}", "12"),
        ("{{ '%05.1f' % 2.5 }}{{ 'a' * 3 }}{{ 7 % 4 }}{{ 'b'.center(3) }}|", "002.5aaa3 b |"),
        (
            "{{ x|map('string')|join('-') }} {{ '-'.join(x|map('string')) }} {{ (x, [x])|list }}",
            "1-2-3 1-2-3 [[1, 2, 3], [[1, 2, 3]]]",
        ),
        (
            "{{ 2.345|round(1) }} {{ x|batch(2, 0)|list }} {{ 'a%sb' % 'c' }} {{ 'a{}b'.format('c') }}",
            "2.3 [[1, 2], [3, 0]] acb acb",
        ),
    ],
)
def test_the_bounds_change_nothing_for_honest_templates(template: str, text: str) -> None:
    assert render(template, x=[1, 2, 3], t=[{"n": 1, "c": [{"n": 2}]}]) == text


def test_a_long_honest_conversation_is_within_bounds() -> None:
    messages = [{"role": "user", "content": "x" * 1000}, {"role": "assistant", "content": "y" * 1000}] * 1000
    assert len(qwen3_renderer().render(messages)) > 2_000_000


# -- the tokenizer


def test_spelled_control_tokens_are_live_in_one_encoder_and_dead_in_the_other() -> None:
    renderer = qwen3_renderer()
    for token, number in renderer.control_tokens.items():
        assert renderer.encode(token).tolist() == [number]
        plain = renderer.encode_plain(token)
        assert number not in plain
        assert renderer.decode(plain) == token


def test_ids_come_as_read_only_arrays_and_decode_spells_control_tokens() -> None:
    ids = qwen3_renderer().encode("<|im_start|>user\nHi 😀<|im_end|>\n")
    assert ids.dtype == np.uint32
    assert not ids.flags.writeable
    assert qwen3_renderer().decode(ids) == "<|im_start|>user\nHi 😀<|im_end|>\n"


def test_what_a_model_is_comes_from_its_prepared_directory(tmp_path: Any) -> None:
    renderer = qwen3_renderer()
    assert renderer.eos_ids == {151_643, 151_645}
    assert renderer.vocab_size == 151_669
    assert renderer.control_tokens["<|im_end|>"] == 151_645
    assert renderer.template == (qwen3_prepared() / "chat_template.jinja").read_text()
    with pytest.raises(PreparationError):
        ModelRenderer.load(tmp_path)


def test_a_bare_template_takes_its_ids_from_a_prepared_directory(tmp_path: Any) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages[0].content }}<|im_end|>")
    renderer = ModelRenderer.from_template_file(file, qwen3_prepared())
    assert renderer.render([{"role": "user", "content": "Hi"}]) == "Hi<|im_end|>"
    assert renderer.identity != qwen3_renderer().identity
    assert renderer.identity == ModelRenderer.from_template_file(file, qwen3_prepared()).identity


def test_threads_do_not_disturb_each_other() -> None:
    renderer = qwen3_renderer()
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(30):
            content = f"thread {number} turn {turn}"
            text = renderer.render([{"role": "user", "content": content}], clock=float(number))
            if content not in text or renderer.decode(renderer.encode(text)) != text:
                wrong.append(content)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_worker_never_imports_transformers() -> None:
    program = (
        "import sys; from pathlib import Path; from api.rendering import ModelRenderer;"
        "ModelRenderer.load(Path(sys.argv[1])).render([{'role': 'user', 'content': 'Hi'}]);"
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(qwen3_prepared())], check=True, timeout=60)
