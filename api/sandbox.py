"""The sandbox in which a chat template runs: transformers' Jinja environment, with bounds.

A template is code from the internet. It is compiled and run in the environment that transformers would give it
(filters, globals, extensions and white-space rules alike, proved by test), except that what can run or grow
without end is counted: every loop step and every call costs a tick, every ticking checks the thread's CPU time,
and no string or list may grow past a cap. Whatever a template raises comes out as `TemplateRejected`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from splice.errors import TemplateRejected

MAX_TEMPLATE_CHARS = 2_000_000
MAX_OUTPUT_CHARS = 64_000_000
_MAX_WIDTH = 100_000  # padding, indent, repetition of lists: no template has use for more
_MAX_BITS = 100_000  # of an integer
_TICKS_PER_LOOK = 64
_WIDE_FORMAT = re.compile(r"[0-9]{6}")


class TooMuch(jinja2.TemplateRuntimeError):
    """The template ran too long or wrote too much."""


class _Budget:
    """What one rendering may still spend. CPU time of the thread, so that a busy machine changes nothing."""

    __slots__ = ("deadline", "ticks")

    def __init__(self, seconds: float) -> None:
        self.deadline = time.thread_time() + seconds
        self.ticks = 0

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks % _TICKS_PER_LOOK == 0 and time.thread_time() > self.deadline:
            raise TooMuch("it ran for too long")


_budget: ContextVar[_Budget | None] = ContextVar("template_budget", default=None)


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT_CHARS:
        raise TooMuch("it wrote too much")


class _Counted:
    """An iterable that ticks; sized where the original is, since `loop.length` asks."""

    __slots__ = ("_iterable",)

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        budget = _budget.get()
        for item in self._iterable:
            if budget is not None:
                budget.tick()
            yield item

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


def _joined(parts: Iterable[Any]) -> str:
    """What Jinja's `~` does, and its own joining of output, with a cap."""
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, refusing widths that only serve to fill the memory."""

    def narrowed(*args: Any, **kwargs: Any) -> Any:
        _check_arguments((*args[1:], *kwargs.values()))
        return function(*args, **kwargs)

    narrowed.__dict__.update(function.__dict__)  # Jinja marks filters that take the environment there
    return narrowed


def _check_arguments(arguments: Iterable[Any]) -> None:
    if any(isinstance(argument, int) and argument > _MAX_WIDTH for argument in arguments):
        raise TooMuch("it asked for an enormous width")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass these by position or name, as in transformers
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Dict:
    """`dict` for templates: makes dictionaries and leads nowhere else."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    @staticmethod
    def fromkeys(*args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


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
        for name in ("center", "indent", "batch", "slice", "wordwrap", "truncate", "format"):
            self.filters[name] = _narrow(self.filters[name])
        more: dict[str, Callable[..., Any]] = {"tojson": _narrow(_tojson), "_counted": _Counted, "_joined": _joined}
        self.filters |= more
        self.globals |= {"raise_exception": _raise_exception, "dict": _Dict(), "namespace": _Namespace}
        del self.globals["lipsum"]  # random text, endless when asked

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            loop.iter = jinja2.nodes.Filter(loop.iter, "_counted", [], [], None, None).set_lineno(loop.lineno)
        return _BoundConcat().visit(tree)  # type: ignore[no-any-return]

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063 - Jinja's names
        budget = _budget.get()
        if budget is not None:
            budget.tick()
        _check_call(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _BINARY_CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)


class _BoundConcat(jinja2.visitor.NodeTransformer):
    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802 - Jinja names visitors so
        self.generic_visit(node)
        parts = jinja2.nodes.List(node.nodes).set_lineno(node.lineno)
        return jinja2.nodes.Filter(parts, "_joined", [], [], None, None).set_lineno(node.lineno)


def _check_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    # The sandbox hands out `format` wrapped.
    owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
    if not isinstance(owner, str):
        return
    _check_arguments((*args, *kwargs.values()))
    name = getattr(function, "__name__", "")
    if name == "replace" and len(args) >= 2:
        _check_size(owner.count(str(args[0])) * len(str(args[1])) + len(owner))
    elif name == "join" and args and isinstance(args[0], Sequence):
        _check_size(len(args[0]) * len(owner) + sum(len(part) for part in args[0] if isinstance(part, str)))
    elif name in {"format", "format_map"} and _WIDE_FORMAT.search(owner):
        raise TooMuch("it asked for an enormous width")


def _check_sum(left: Any, right: Any) -> None:
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _check_size(len(left) + len(right))


def _check_product(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            _check_size(len(sequence) * times)
    _check_integers(left, right)


def _check_integers(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
        raise TooMuch("it made an enormous number")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > _MAX_BITS:
        raise TooMuch("it made an enormous number")


def _check_modulo(left: Any, _right: Any) -> None:
    if isinstance(left, str) and _WIDE_FORMAT.search(left):
        raise TooMuch("it asked for an enormous width")


_BINARY_CHECKS: Mapping[str, Callable[[Any, Any], None]] = {
    "+": _check_sum,
    "*": _check_product,
    "**": _check_power,
    "%": _check_modulo,
}


class CompiledTemplate:
    """A chat template, compiled once and run by any thread."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_TEMPLATE_CHARS:
            raise TemplateRejected(f"it has {len(text)} characters, more than a chat template can need")
        environment = _BoundedEnvironment()
        try:
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

        token = _budget.set(_Budget(seconds))
        try:
            return self._collect({"strftime_now": strftime_now, **variables})
        except Exception as error:
            # Foreign code may raise anything, and all of it means the same: these messages do not render.
            raise TemplateRejected(_words(error), runaway=isinstance(error, TooMuch)) from error
        finally:
            _budget.reset(token)

    def _collect(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        for part in self._template.generate(variables):
            size += len(part)
            _check_size(size)
            parts.append(part)
        return "".join(parts)


def _words(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    if isinstance(error, jinja2.TemplateError):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"
