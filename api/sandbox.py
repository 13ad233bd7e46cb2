"""The sandbox in which a chat template runs: transformers' Jinja environment, with bounds.

A template is code from the internet. It is compiled and run in the environment that transformers would give it
(filters, globals, extensions and white-space rules alike, proved by test), except that what can run or grow
without end is counted (`sandbox_budget`): every loop step and every call costs a tick, every ticking checks the
thread's CPU time, and no text or list may grow past a cap. Whatever a template raises comes out as
`TemplateRejected`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from api.sandbox_budget import Budget, TooMuch, bounded, budget
from api.sandbox_checks import BINARY_CHECKS, FILTER_CHECKS, METHOD_CHECKS
from splice.errors import TemplateRejected

MAX_TEMPLATE_CHARS = 300_000  # twenty times the longest known; Python takes seconds to compile so much
_COMPILE_SECONDS = 10.0


class _Counted:
    """An iterable that ticks; sized where the original is, since `loop.length` asks."""

    __slots__ = ("_iterable",)

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        tick = budget().tick
        for item in self._iterable:
            tick()
            yield item

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


def _joined(parts: Iterable[Any]) -> str:
    """What Jinja's `~` does, and its own joining of output, with a cap."""
    texts = [str(part) for part in parts]
    budget().spend(sum(map(len, texts)))
    return "".join(texts)


def _built(value: Any) -> Any:
    """A list, tuple or dictionary that the template made, weighed."""
    budget().allow(budget().weigh(value))
    return value


def _checked(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """The filter behind a check of its arguments."""
    # Jinja marks filters that take its own context as their first argument.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args[first:], **kwargs)
        return function(*args, **kwargs)

    checked.__dict__.update(function.__dict__)
    return checked


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass these by position or name, as in transformers
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _listed_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter over a list, where a template gives an iterator that cannot be measured."""

    def listed(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return function(context, list(value) if isinstance(value, Iterator) else value, *args, **kwargs)

    listed.__dict__.update(function.__dict__)
    return listed


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Dict:
    """`dict` for templates: makes dictionaries and leads nowhere else."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _built(dict(*args, **kwargs))

    @staticmethod
    def fromkeys(*args: Any) -> Any:
        return _built(dict.fromkeys(*args))


class _Namespace(jinja2.utils.Namespace):
    """`namespace` without underscored attributes, a way out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes: dict[str, Any] = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # what it holds has not been weighed


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the underscored attribute {name!r}")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a trainer masks; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as transformers makes of it: names set inside stay inside.
        return jinja2.nodes.CallBlock(self.call_method("_pass_through"), [], [], body).set_lineno(line)

    @staticmethod
    def _pass_through(caller: Callable[[], str]) -> str:
        return caller()


class _BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_joined)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        more: dict[str, Callable[..., Any]] = {
            "tojson": _tojson,
            "_counted": _Counted,
            "_joined": _joined,
            "_built": _built,
        }
        self.filters |= more
        for name, check in FILTER_CHECKS.items():
            self.filters[name] = _checked(self.filters[name], check)
        self.filters["join"] = _listed_first(self.filters["join"])
        self.globals |= {"raise_exception": _raise_exception, "dict": _Dict(), "namespace": _Namespace}
        del self.globals["lipsum"]  # random text, endless when asked

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            loop.iter = jinja2.nodes.Filter(loop.iter, "_counted", [], [], None, None).set_lineno(loop.lineno)
        return _Bounds().visit(tree)  # type: ignore[no-any-return]

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063 - Jinja's names
        budget().tick()
        if isinstance(__obj, jinja2.runtime.Macro) and len(args) + len(kwargs) > len(__obj.arguments):
            _built((args, kwargs))  # a macro finds what it did not name in lists of its own
        # The sandbox hands out `format` wrapped.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if not isinstance(owner, str):
            return super().call(__context, __obj, *args, **kwargs)
        given = [list(arg) if isinstance(arg, Iterator) else arg for arg in args]
        if (check := METHOD_CHECKS.get(getattr(__obj, "__name__", ""))) is not None:
            check(owner, *given, **kwargs)
        result = super().call(__context, __obj, *given, **kwargs)
        budget().spend(len(owner) + 8 * len(result) if isinstance(result, list) else budget().weigh(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        BINARY_CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)


class _Bounds(jinja2.visitor.NodeTransformer):
    """Sends what builds texts, lists and dictionaries through the functions that count."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802 - Jinja names visitors so
        self.generic_visit(node)
        return _filtered(jinja2.nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if _constant(node.items) else _filtered(node, "_built")

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if node.ctx != "load" or _constant(node.items) else _filtered(node, "_built")

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if _constant([pair.value for pair in node.items]) else _filtered(node, "_built")


def _constant(items: Iterable[jinja2.nodes.Node]) -> bool:
    return all(isinstance(item, jinja2.nodes.Const) for item in items)


def _filtered(node: jinja2.nodes.Expr, name: str) -> jinja2.nodes.Node:
    return jinja2.nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno)


class CompiledTemplate:
    """A chat template, compiled once and run by any thread."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_TEMPLATE_CHARS:
            raise TemplateRejected(f"it has {len(text)} characters, more than a chat template can need")
        environment = _BoundedEnvironment()
        try:
            # Compiling evaluates constant expressions.
            with bounded(Budget(_COMPILE_SECONDS)):
                self._template = environment.from_string(text)
        except Exception as error:
            raise TemplateRejected(_words(error)) from error

    def render(self, variables: Mapping[str, Any], *, clock: float, seconds: float) -> str:
        """The template's text for these variables. Raises TemplateRejected with its own words.

        seconds: CPU time of this thread that it may take.
        """

        def strftime_now(format: str) -> str:  # noqa: A002 - templates may name it
            # UTC, so that every worker writes the same date for the same clock.
            return datetime.fromtimestamp(clock, UTC).strftime(format)

        try:
            with bounded(Budget(seconds, list(variables.values()))):
                return self._collect({"strftime_now": strftime_now, **variables})
        except Exception as error:
            # Foreign code may raise anything, and all of it means the same: these messages do not render.
            raise TemplateRejected(_words(error), runaway=isinstance(error, TooMuch)) from error

    def _collect(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        for part in self._template.generate(variables):
            size += len(part)
            budget().allow(size)
            parts.append(part)
        return "".join(parts)


def _words(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    if isinstance(error, jinja2.TemplateError):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"
