"""A prepared directory gives exactly what transformers gives, and costs a worker nothing of transformers."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jinja2.ext
import msgspec
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from api.assets import qwen3_directory, smollm2_directory
from api.cache import default_cache_dir
from api.preparation import PreparationError, load_manifest, prepare_model

REPOSITORY = Path(__file__).parents[2]
TEXTS = [
    "Hello, 12345 worlds\n\n  and\ttabs",
    '<|im_start|>assistant\n<think>\n\n</think>\n<tool_call>\n{"name": "f"}\n</tool_call><|im_end|>\n',
    "中文 café cafe\u0301 👩‍👩‍👧‍👦",
    "",
]
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.role + ':' + message.content }}\n{% endfor %}"


@pytest.fixture
def tiny(tmp_path):
    """A directory with a tokenizer.json of nine words, and nothing else."""
    return _write_tiny(tmp_path / "tiny")


def _write_tiny(directory, **files):
    directory.mkdir()
    words = ["[UNK]", "a", "b", ":", "user", "<end>"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken("<mark>", lstrip=True, normalized=False)])
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@pytest.mark.parametrize("make", [qwen3_directory, smollm2_directory])
def test_the_prepared_tokenizer_and_manifest_are_what_transformers_has(make, tmp_path):
    prepared = prepare_model(str(make()), cache_dir=tmp_path)
    theirs = AutoTokenizer.from_pretrained(make())
    ours = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False).ids == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    manifest = load_manifest(prepared)
    assert manifest.special_tokens == theirs.special_tokens_map
    assert manifest.vocab_size == max(theirs.get_vocab().values()) + 1
    assert manifest.model_max_length == theirs.model_max_length
    assert {text: token.id for text, token in manifest.added_tokens.items()} == theirs.get_added_vocab()
    assert (prepared / "chat_template.jinja").read_text() == theirs.get_chat_template()


def test_the_manifest_has_both_ends_of_qwen3_and_its_unflagged_markers(tmp_path):
    manifest = load_manifest(prepare_model(str(qwen3_directory()), cache_dir=tmp_path))
    assert manifest.eos_ids == (151_643, 151_645)
    assert manifest.added_tokens["<|im_end|>"].special
    assert not manifest.added_tokens["</think>"].special
    assert manifest.vocab_size == 151_669


def test_a_second_preparation_is_quick_and_leaves_transformers_alone(tmp_path):
    source = str(qwen3_directory())
    first = prepare_model(source, cache_dir=tmp_path)
    said = _in_another_process(f"""
        import sys, time
        from pathlib import Path
        from api.preparation import load_manifest, prepare_model
        directory = prepare_model({source!r}, cache_dir=Path({str(tmp_path)!r}))
        load_manifest(directory)
        print(directory, time.process_time() < 2, sorted({{"transformers", "tokenizers"}} & set(sys.modules)))
    """)
    assert said == f"{first} True []"


def test_no_connection_is_opened_for_a_directory(tmp_path):
    said = _in_another_process(f"""
        import sys
        from pathlib import Path
        opened = []
        network = ("socket.connect", "socket.getaddrinfo")
        sys.addaudithook(lambda event, _: opened.append(event) if event in network else None)
        from api.preparation import prepare_model
        prepare_model({str(smollm2_directory())!r}, cache_dir=Path({str(tmp_path)!r}))
        print(opened)
    """)
    assert said == "[]"


def test_a_hub_id_is_taken_from_the_hub_cache_when_the_hub_is_out_of_reach(tmp_path):
    model = tmp_path / "hub" / "models--acme--tiny"
    (model / "snapshots").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("c0ffee")
    _write_tiny(
        model / "snapshots" / "c0ffee",
        tokenizer_config__json={"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"},
        chat_template__jinja=PLAIN_TEMPLATE,
        config__json={"model_type": "llama"},
    )
    said = _in_another_process(
        f"""
        from pathlib import Path
        from api.preparation import load_manifest, prepare_model
        print(load_manifest(prepare_model("acme/tiny", cache_dir=Path({str(tmp_path / "cache")!r}))).special_tokens)
        """,
        HF_HUB_CACHE=str(tmp_path / "hub"),
        HF_HUB_OFFLINE="1",
    )
    assert said == "{'eos_token': '<end>'}"


def _in_another_process(script, **environment):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_processes_that_prepare_at_once_get_one_whole_directory(tmp_path):
    source = _write_tiny(tmp_path / "tiny", chat_template__jinja=PLAIN_TEMPLATE)
    script = textwrap.dedent(f"""
        from pathlib import Path
        from api.preparation import load_manifest, prepare_model
        directory = prepare_model({str(source)!r}, cache_dir=Path({str(tmp_path / "cache")!r}))
        print(directory, load_manifest(directory).vocab_size)
    """)
    running = [
        subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = {process.communicate()[0] for process in running}
    (directory, vocab_size) = outputs.pop().split()
    assert not outputs
    assert vocab_size == "7"
    names = {path.name for path in (tmp_path / "cache" / "prepared").iterdir()}
    assert names == {"sources", Path(directory).name}
    assert {path.name for path in Path(directory).iterdir()} == {
        "tokenizer.json",
        "chat_template.jinja",
        "manifest.json",
    }


def test_a_bare_tokenizer_needs_only_a_template(tiny, tmp_path):
    template = tmp_path / "given.jinja"
    template.write_text(PLAIN_TEMPLATE)
    prepared = prepare_model(str(tiny), cache_dir=tmp_path, chat_template=template)
    assert (prepared / "chat_template.jinja").read_text() == PLAIN_TEMPLATE
    manifest = load_manifest(prepared)
    assert manifest.added_tokens["<mark>"].lstrip
    assert manifest.model_max_length is None
    with pytest.raises(PreparationError, match="has no chat template: give one"):
        prepare_model(str(tiny), cache_dir=tmp_path)


def test_a_given_template_goes_before_the_models_own(tmp_path):
    source = _write_tiny(tmp_path / "tiny", chat_template__jinja="their own")
    given = tmp_path / "given.jinja"
    given.write_text(PLAIN_TEMPLATE)
    prepared = prepare_model(str(source), cache_dir=tmp_path, chat_template=given)
    assert (prepared / "chat_template.jinja").read_text() == PLAIN_TEMPLATE


def test_equal_models_share_a_directory_and_any_change_makes_another(tmp_path):
    one = prepare_model(str(_write_tiny(tmp_path / "one", chat_template__jinja="x")), cache_dir=tmp_path)
    same = prepare_model(str(_write_tiny(tmp_path / "two", chat_template__jinja="x")), cache_dir=tmp_path)
    other = prepare_model(str(_write_tiny(tmp_path / "three", chat_template__jinja="y")), cache_dir=tmp_path)
    assert one == same != other
    assert load_manifest(one).identity != load_manifest(other).identity


def test_an_edited_source_is_prepared_again(tmp_path):
    source = _write_tiny(tmp_path / "tiny", chat_template__jinja="before")
    prepare_model(str(source), cache_dir=tmp_path)
    (source / "chat_template.jinja").write_text("after")
    assert (prepare_model(str(source), cache_dir=tmp_path) / "chat_template.jinja").read_text() == "after"


def test_ends_of_the_generation_config_join_the_tokenizers_own(tmp_path):
    source = _write_tiny(
        tmp_path / "tiny",
        chat_template__jinja="x",
        tokenizer_config__json={"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"},
        generation_config__json={"eos_token_id": 2},
    )
    assert load_manifest(prepare_model(str(source), cache_dir=tmp_path)).eos_ids == (2, 5)


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_reach_workers(tiny, tmp_path):
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tiny / "tokenizer.json"))
    (tiny / "chat_template.jinja").write_text("x")
    prepared = prepare_model(str(tiny), cache_dir=tmp_path)
    assert Tokenizer.from_file(str(prepared / "tokenizer.json")).encode("a b a").ids == [1, 2, 1]


def test_two_templates_become_one_that_chooses_as_transformers_does(tmp_path):
    default = "  {% if messages %}\n {{ messages[0].content }}\n   {% endif %}\n   \n\n"
    tool_use = "{% macro show(tool) %}<{{ tool.name }}>{% endmacro %}\n {{ show(tools[0]) }} \n"
    source = _write_tiny(tmp_path / "tiny", chat_template__jinja=default)
    (source / "chat_templates").mkdir()
    (source / "chat_templates" / "tool_use.jinja").write_text(tool_use)
    template = (prepare_model(str(source), cache_dir=tmp_path) / "chat_template.jinja").read_text()
    theirs = PreTrainedTokenizerFast.from_pretrained(source)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    messages = [{"role": "user", "content": "hi"}]
    for tools in (None, [{"name": "look"}]):
        rendered = environment.from_string(template).render(messages=messages, tools=tools)
        assert rendered == theirs.apply_chat_template(messages, tools=tools, tokenize=False)


def test_templates_without_a_default_are_named(tmp_path):
    templates = [{"name": name, "template": "x"} for name in ("rag", "tool_use")]
    source = _write_tiny(
        tmp_path / "tiny",
        tokenizer_config__json={"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": templates},
    )
    with pytest.raises(PreparationError, match=r"\['rag', 'tool_use'\] and none named default"):
        prepare_model(str(source), cache_dir=tmp_path)


def test_a_tokenizer_without_a_fast_form_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    with pytest.raises(PreparationError, match=r"ByT5Tokenizer, which has no tokenizer\.json form: give a"):
        prepare_model(str(tmp_path / "slow"), cache_dir=tmp_path)


def test_code_that_a_model_brings_is_not_run_unless_trusted(tmp_path):
    source = _write_tiny(
        tmp_path / "tiny",
        chat_template__jinja="x",
        tokenizer_config__json={"auto_map": {"AutoTokenizer": [None, "theirs.Theirs"]}, "tokenizer_class": "Theirs"},
        theirs__py=f"""
            open({str(tmp_path / "ran")!r}, "w").close()
            from transformers import PreTrainedTokenizerFast
            class Theirs(PreTrainedTokenizerFast):
                pass
        """.replace("\n            ", "\n"),
    )
    with pytest.raises(PreparationError, match="trust it explicitly"):
        prepare_model(str(source), cache_dir=tmp_path)
    assert not (tmp_path / "ran").exists()
    said = _in_another_process(
        f"""
        from pathlib import Path
        from api.preparation import prepare_model
        print(prepare_model({str(source)!r}, cache_dir=Path({str(tmp_path)!r}), trust_remote_code=True).is_dir())
        """,
        HF_MODULES_CACHE=str(tmp_path / "modules"),
    )
    assert said == "True"
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no/such/place/here", "there is no directory"),
        ("{file}", "is a file: give the directory"),
        ("{empty}", "cannot load"),
    ],
)
def test_a_source_that_is_none_says_so(source, words, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PreparationError, match=words):
        prepare_model(source.format(file=tmp_path / "file", empty=tmp_path / "empty"), cache_dir=tmp_path)


def test_a_directory_that_was_not_prepared_here_is_refused(tiny, tmp_path):
    with pytest.raises(PreparationError, match="not a prepared model"):
        load_manifest(tiny)
    (tiny / "chat_template.jinja").write_text("x")
    prepared = prepare_model(str(tiny), cache_dir=tmp_path)
    newer = msgspec.structs.replace(load_manifest(prepared), format_version=99)
    (prepared / "manifest.json").write_bytes(msgspec.json.encode(newer))
    with pytest.raises(PreparationError, match="has format 99"):
        load_manifest(prepared)
    (prepared / "manifest.json").write_text("{")
    with pytest.raises(PreparationError, match="prepare again"):
        load_manifest(prepared)


def test_the_cache_is_where_the_environment_says_and_never_where_nothing_can_be_written(tmp_path):
    chosen = {"TOKENSPLICE_CACHE_DIR": str(tmp_path / "chosen"), "HOME": str(tmp_path)}
    assert default_cache_dir(chosen) == tmp_path / "chosen"
    assert default_cache_dir({"XDG_CACHE_HOME": str(tmp_path / "xdg")}) == tmp_path / "xdg" / "tokensplice"
    assert default_cache_dir({"HOME": str(tmp_path)}) == tmp_path / ".cache" / "tokensplice"
    (tmp_path / "home").write_text("a home that is no directory")
    for environment in ({"HOME": str(tmp_path / "home")}, {}):
        fallback = default_cache_dir(environment)
        assert tmp_path not in fallback.parents
        assert fallback.is_dir()


def test_the_chatml_template_with_tools_is_append_only():
    tokenizer = AutoTokenizer.from_pretrained(smollm2_directory())
    call = {"function": {"name": "look", "arguments": {"at": "x"}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hm", "tool_calls": [call, call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "three"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "and?"},
    ]
    whole = tokenizer.apply_chat_template(messages, tools=[{"name": "look"}], tokenize=False)
    for length in (1, 2, 4, 5, 6, 7):  # tool results come together
        assert whole.startswith(
            tokenizer.apply_chat_template(messages[:length], tools=[{"name": "look"}], tokenize=False)
        )
    assert whole.count('<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>') == 3
    assert "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n" in whole
