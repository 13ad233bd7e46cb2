"""What the imagined model writes: the turns of an agent with tools, or of a chatty model without.

Pure: a scene (what the prompt shows) and a random source in, text out. The text is awkward on purpose: several
lines in tool arguments, JSON spaced and ordered unlike any template's, code, other scripts, trailing spaces.
Every turn carries its nonce where the reader of the reply sees it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Think = Literal["absent", "free", "open", "closed"]

# No digits: an echo can carry neither an older nonce nor a rollout's tag into this turn.
_WORD = re.compile(r"[^\W\d_]{3,}")
_TOOL_RESULT = re.compile(r"tool_response|ipython|observation|tool_result|tool\b", re.IGNORECASE)
_TOOLS_SECTION = re.compile(r"<tools>\n(.*?)\n?</tools>", re.DOTALL)
_TOOL_OPENING = re.compile(r'\{\s*"(?:type": "function"|name":)')


@dataclass(frozen=True)
class Tool:
    """A declared function; only what is needed to call it."""

    name: str
    properties: Mapping[str, Mapping[str, Any]]
    required: frozenset[str]


@dataclass(frozen=True)
class Scene:
    """What the model sees: its tools, the last thing said to it, and whether it may think."""

    tools: tuple[Tool, ...]
    last: str
    think: Think

    @property
    def after_tool(self) -> bool:
        """Whether a tool's result was the last thing said."""
        return _TOOL_RESULT.search(self.last) is not None


def read_scene(head: str, segments: Sequence[str], *, thinks: bool, calls: bool) -> Scene:
    """Read the prompt's head for tools, and its last segments between control tokens for what was said.

    `thinks` and `calls` say whether the vocabulary has the markers to think and to call with.
    """
    ending = segments[-1].rstrip() if segments else ""
    said = [segment for segment in segments[:-1] if len(segment.split()) > 1]
    last = said[-1] if said else ending
    return Scene(read_tools(head) if calls else (), last, _think(ending, thinks=thinks))


def _think(ending: str, *, thinks: bool) -> Think:
    if not thinks:
        return "absent"
    if ending.endswith("<think>"):
        return "open"
    return "closed" if ending.endswith("</think>") else "free"


def read_tools(head: str) -> tuple[Tool, ...]:
    """Every tool that the head declares as JSON: in a `<tools>` section, else wherever an object looks like one."""
    section = _TOOLS_SECTION.search(head)
    text = section[1] if section else head
    decoder = json.JSONDecoder()
    tools: dict[str, Tool] = {}
    at = 0
    while (opening := _TOOL_OPENING.search(text, at)) is not None:
        try:
            found, at = decoder.raw_decode(text, opening.start())
        except ValueError:
            at = opening.end()
            continue
        if (tool := _tool(found)) is not None:
            tools[tool.name] = tool
    return tuple(tools.values())


def _tool(found: dict[str, Any]) -> Tool | None:
    declared = found.get("function", found)
    schema = declared.get("parameters") if isinstance(declared, dict) else None
    if not isinstance(schema, dict) or not isinstance(declared.get("name"), str):
        return None
    return Tool(declared["name"], schema.get("properties") or {}, frozenset(schema.get("required") or ()))


def write_turn(scene: Scene, nonce: str, rng: random.Random) -> str:
    """One assistant turn, without its terminator."""
    reasoning = _reasoning(scene, nonce, rng)
    wants_tool = bool(scene.tools) and _chance(rng, 0.6 if scene.after_tool else 0.8)
    return reasoning + (_calls(scene, nonce, rng) if wants_tool else prose(scene.last, nonce, rng))


def _reasoning(scene: Scene, nonce: str, rng: random.Random) -> str:
    if scene.think == "open":
        return f"{_thoughts(scene, nonce, rng)}\n</think>\n\n"
    if scene.think == "free" and _chance(rng, 0.6):
        return f"<think>\n{_thoughts(scene, nonce, rng)}\n</think>\n\n"
    return ""


def _thoughts(scene: Scene, nonce: str, rng: random.Random) -> str:
    first = f"({nonce}) {rng.choice(_DOUBTS)} {_echo(scene.last, rng)}."
    return "\n".join([first, *(_line(rng) for _ in range(rng.randint(1, 3)))])


def _calls(scene: Scene, nonce: str, rng: random.Random) -> str:
    spoken = f"{rng.choice(_PREAMBLES)} {nonce}.\n\n" if _chance(rng, 0.4) else ""
    calls = [_arguments(rng.choice(scene.tools), nonce, rng) for _ in range(2 if _chance(rng, 0.2) else 1)]
    blocks = [f"<tool_call>\n{dump_call(name, arguments, rng)}\n</tool_call>" for name, arguments in calls]
    if not spoken and nonce not in "".join(blocks):
        spoken = f"{rng.choice(_PREAMBLES)} {nonce}.\n"
    return spoken + "\n".join(blocks)


def _arguments(tool: Tool, nonce: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
    names = [name for name in tool.properties if name in tool.required or _chance(rng, 0.5)]
    rng.shuffle(names)
    return tool.name, {name: _value(tool.properties[name], nonce, rng) for name in names}


def _value(schema: Mapping[str, Any], nonce: str, rng: random.Random) -> Any:  # noqa: PLR0911 - one line a JSON type
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    match schema.get("type"):
        case "integer":
            return rng.randint(-3, 4096)
        case "number":
            return rng.choice([0.5, 1.0, 1e-7, 12345.678, 3])
        case "boolean":
            return _chance(rng, 0.5)
        case "null":
            return None
        case "array":
            return [_value(schema.get("items") or {}, nonce, rng) for _ in range(rng.randint(0, 3))]
        case "object":
            inner = schema.get("properties") or {}
            return {name: _value(inner[name], nonce, rng) for name in inner}
        case _:
            return f"{rng.choice(_COMMANDS)} # {nonce}\n{_code(rng)}{rng.choice(_TAILS)}"


def dump_call(name: str, arguments: Mapping[str, Any], rng: random.Random) -> str:
    """JSON as models write it: any spacing, either key first, escapes or not."""
    call = {"name": name, "arguments": arguments}
    if _chance(rng, 0.3):
        call = {"arguments": arguments, "name": name}
    separators, indent = rng.choice(_JSON_STYLES)
    return json.dumps(call, separators=separators, indent=indent, ensure_ascii=_chance(rng, 0.3))


def prose(last: str, nonce: str, rng: random.Random) -> str:
    """Several paragraphs of plain text and code."""
    first = f"{rng.choice(_OPENINGS)} {nonce}: {_echo(last, rng)}."
    body = [rng.choice(_PARAGRAPHS)(rng) for _ in range(rng.randint(1, 3))]
    return "\n\n".join([first, *body]) + rng.choice(_TAILS)


def _chance(rng: random.Random, share: float) -> bool:
    return rng.random() < share


def _echo(last: str, rng: random.Random) -> str:
    words = _WORD.findall(last.partition("\n")[2] or last)[-40:]  # not the role, where it has a line of its own
    if not words:
        return "nothing was asked"
    start = rng.randrange(len(words))
    return " ".join(words[start : start + 5])


def _line(rng: random.Random) -> str:
    return f"{rng.choice(_DOUBTS)} {rng.choice(_NOUNS)} {rng.choice(_VERBS)} {rng.choice(_NOUNS)}{rng.choice(_ENDS)}"


def _sentences(rng: random.Random) -> str:
    return " ".join(_line(rng) for _ in range(rng.randint(1, 3)))


def _list(rng: random.Random) -> str:
    return "\n".join(f"{at}. {_line(rng)}{rng.choice(_TAILS[:3])}" for at in range(1, rng.randint(3, 5)))


def _fenced(rng: random.Random) -> str:
    return f"```python\n{_code(rng)}\n```"


def _numbers(rng: random.Random) -> str:
    row = "  ".join(f"{rng.uniform(-1e4, 1e4):.{rng.randint(0, 6)}f}" for _ in range(4))
    return f"| x | y |\n|---|--:|\n| {row} | {rng.getrandbits(48):#x} |"


def _code(rng: random.Random) -> str:
    name, other = rng.sample(_NOUNS, 2)
    return rng.choice(_SNIPPETS).format(name=name, other=other, n=rng.randint(0, 99999))


_PARAGRAPHS = (_sentences, _sentences, _list, _fenced, _numbers)
_JSON_STYLES: tuple[tuple[tuple[str, str] | None, int | None], ...] = (
    (None, None),
    ((",", ":"), None),
    ((" , ", " : "), None),
    ((",  ", ":"), None),
    (None, 2),
)
_OPENINGS = ("Done.", "Here is what I found,", "Résumé", "好的!", "Sure! Ref", "Antwort")
_PREAMBLES = ("Let me look:", "Next step", "Ich prüfe das:", "Checking")
_DOUBTS = ("Wait,", "So", "Hmm, maybe", "First:", "Actually…", "\tNote that")
_NOUNS = ("buffer", "naïve_cache", "ledger", "Größe", "tokeniser", "路径", "kwargs", "reçu", "shard", "offset")
_VERBS = ("contains", "doesn't match", "overflows", "→", "==", "re-reads", "is older than")
_ENDS = (".", " — 42%.", "?  ", " 🙂.", "; see #17.", "…", ' ("sic").')
_TAILS = ("", "", " ", "  \n", "\n", " \t")
_COMMANDS = ("cat -n src/main.py", "python - <<'EOF'", "grep -rn 'foo\\\\|bar' .", "ls -la", "echo \"a b\"  'c'")
_SNIPPETS = (
    "def {name}(x):\n    return x * {n}  # {other}",
    "for i in range({n}):\n\tprint(f'{other}: ' + str(i))\n",
    '{{"{name}": [1,2, {n}], "{other}": null}}',
    "SELECT *\n  FROM {name}\n WHERE {other} >= {n};",
    "if ({name} && !{other}) {{\n  return `${{{n}}}\\n`;\n}}",
)
