"""The environment in which chat templates are rendered: jinja2's sandbox, with limits.

jinja2's own sandbox keeps a template from reaching Python. It does not keep it from running for
hours, or from filling the memory. A pass over the parsed template puts a question to the budget
(:mod:`specrun.chat_limits`) into every loop, macro and block, and around whatever goes over a
value; operators, calls, filters and tests are asked about before they run. Constants are not
worked out while the template is compiled, so that nothing runs before the pass is through.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import filters, nodes, pass_environment, pass_eval_context, runtime
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from specrun.chat_limits import MAX_CHARS, MAX_COUNT, MAX_SLOW, Budget, LimitError

MAX_TOKENS = 100_000  # of a template; the longest published ones have some thousands
MAX_DEPTH = 150  # of its parts in one another
MAX_INDENT = 100
MAX_SPEC = re.compile(r"[0-9]{4}")  # a width or precision of str.format that nobody needs
CODECS = ("utf-8", "utf8", "ascii", "latin-1", "utf-16", "utf-32")

# Filters of this module's own; templates cannot write a name with a space.
_TICK, _CHARGE, _SEEN, _MADE, _CONCAT, _LIST = (
    " tick",
    " charge",
    " seen",
    " made",
    " concat",
    " list",
)


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text; here it is plain."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Counted(Extension):
    """Ends the reading of a template that is too long or takes too long."""

    def filter_stream(self, stream: Any) -> Iterator[Any]:
        budget: Budget = self.environment.budget  # type: ignore[attr-defined]
        for count, token in enumerate(stream):
            budget.tick()
            if count > MAX_TOKENS:
                raise LimitError(f"it has more than {MAX_TOKENS} words")
            yield token


class _Namespace(Namespace):
    """What ``namespace()`` makes. It can change, so nothing of what is in it is written."""

    def __repr__(self) -> str:
        return "<Namespace>"


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one rendering."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=budget.made,
            extensions=[_Counted, _Generation, LoopControlExtension],
        )
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        replaced = {"tojson": self._tojson, "sum": _sum, "join": _join}
        for name, function in (self.filters | replaced).items():
            self.filters[name] = self._guarded(function, _FILTERS.get(name))
        self.tests = {name: self._guarded(test, None) for name, test in self.tests.items()}
        self.filters |= {
            _TICK: lambda _: budget.tick(),
            _CHARGE: budget.charge,
            _SEEN: budget.seen,
            _MADE: budget.made,
            _LIST: lambda values: budget.items(values) if isinstance(values, Iterator) else values,
            _CONCAT: _concat,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _check_depth(template)
        _Asking().visit(template)
        template.set_environment(self)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See jinja2."""
        self.budget.check_operator(operator, left, right)
        return self.budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See jinja2."""
        self, budget = __self, __self.budget
        budget.tick()
        budget.weigh(__obj)
        args = tuple(map(budget.seen, args))
        kwargs = {name: budget.seen(value) for name, value in kwargs.items()}
        owner = getattr(__obj, "__self__", None)
        check = _CALLS.get(getattr(__obj, "__name__", ""))
        if check is not None and (owner is not None or __obj is dict):
            check(budget, owner, *args, **kwargs)
        return budget.made(super(Sandbox, self).call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See jinja2."""
        self.budget.weigh(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """See jinja2: ``str.format`` whose fields have a width that somebody may mean."""
        if super().wrap_str_format(value) is None:
            return None
        text, many = value.__self__, value.__name__ == "format_map"
        formatter: Any = (
            _EscapeFormatter(self, escape=text.escape)
            if isinstance(text, Markup)
            else _Formatter(self)
        )

        def wrapper(*args: Any, **kwargs: Any) -> str:
            if many and (kwargs or len(args) != 1):
                raise TypeError("format_map() takes exactly one argument")
            given = ((), args[0]) if many else (args, kwargs)
            text_type: type[str] = type(text)
            return text_type(formatter.vformat(text, *given))

        return functools.update_wrapper(wrapper, value)

    def _guarded(self, function: Any, check: Any) -> Any:
        """A filter or test that is asked about."""
        budget = self.budget
        given = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            budget.tick()
            args = (*args[:given], *map(budget.seen, args[given:]))
            kwargs = {name: budget.seen(value) for name, value in kwargs.items()}
            if check is not None:
                check(budget, *args[given:], **kwargs)
            return budget.made(function(*args, **kwargs))

        return guarded

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as it is, without jinja2's HTML escapes."""
        self.budget.check_count(indent if not isinstance(indent, str) else len(indent), MAX_INDENT)
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None and separators is None:
            return encoder.encode(value)
        pieces = []
        for piece in encoder.iterencode(value):
            self.budget.tick()
            self.budget.charge(len(piece))
            pieces.append(piece)
        return "".join(pieces)


class _Asking(NodeTransformer):
    """Puts a question to the budget wherever a template repeats something or goes over a value.

    1. The body of a loop, macro, call or block: time.
    2. Text between tags: its length, from the total.
    3. What a loop goes over, what is compared or a key, what ``*`` spreads: its size, and time per
       item.
    4. ``a ~ b`` and ``a[i:j]``: the size of what is made.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _SEEN)
        if node.test is not None:
            node.test = nodes.And(_tick(), node.test)
        node.body.insert(0, nodes.ExprStmt(_tick()))
        return node

    def _body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_tick()))
        return node  # type: ignore[no-any-return]

    visit_Macro = visit_CallBlock = visit_Block = _body

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        self.generic_visit(node)
        length = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        if not length:
            return [node]
        return [nodes.ExprStmt(_filtered(nodes.Const(length), _CHARGE)), node]

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _SEEN)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, _SEEN)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _filtered(pair.key, _SEEN)
        return node

    def _arguments(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _filtered(node.dyn_args, _LIST)
        return node  # type: ignore[no-any-return]

    visit_Call = visit_Filter = visit_Test = _arguments

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load"), _CONCAT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE) if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _tick() -> nodes.Filter:
    return _filtered(nodes.Const(None), _TICK)


def _check_depth(template: nodes.Node) -> None:
    """Raise LimitError for one whose parts stand in one another too deep to be compiled."""
    level: list[nodes.Node] = [template]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in node.iter_child_nodes()]
        if not level:
            return
    raise LimitError(f"its parts stand in one another more than {MAX_DEPTH} deep")


class _BoundedFields:
    """Of a formatter: each field is asked about before it is written."""

    _env: Any  # a Sandbox

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._env.budget.weigh(value)
        if MAX_SPEC.search(format_spec):
            raise LimitError(f"it pads a text to {format_spec[:20]!r}")
        return self._env.budget.made(super().format_field(value, format_spec))  # type: ignore[misc]

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._env.budget.weigh(value)
        return super().convert_field(value, conversion)  # type: ignore[misc]


class _Formatter(_BoundedFields, SandboxedFormatter):
    pass


class _EscapeFormatter(_BoundedFields, SandboxedEscapeFormatter):
    pass


@pass_eval_context
def _concat(context: EvalContext, values: tuple[Any, ...]) -> str:
    """As the ``~`` of jinja2."""
    budget = context.environment.budget  # type: ignore[attr-defined]
    budget.tick()
    budget.allow(sum(map(budget.weigh, values)))
    joined: str = (runtime.markup_join if context.autoescape else runtime.str_join)(values)
    budget.charge(len(joined))
    return joined


@pass_environment
def _sum(environment: Sandbox, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """As jinja2's, one addition after the other."""
    if attribute is not None:
        iterable = map(filters.make_attrgetter(environment, attribute), iterable)
    if isinstance(start, (str, bytes)):
        raise TypeError("sum() can't sum texts, use join")
    total = start
    for item in iterable:
        environment.budget.check_operator("+", total, item)
        total = environment.budget.made(total + item)
    return total


@pass_eval_context
def _join(context: EvalContext, value: Any, d: str = "", attribute: Any = None) -> str:
    """As jinja2's, of a length that is allowed."""
    environment: Sandbox = context.environment  # type: ignore[assignment]
    budget = environment.budget
    if attribute is not None:
        value = map(filters.make_attrgetter(environment, attribute), value)
    items = budget.items(value)
    budget.allow(budget.weigh(items) + len(items) * budget.weigh(d))
    return filters.sync_do_join(context, items, d)


# What is asked before a filter runs: by its name, with the arguments it gets.


def _indent(budget: Budget, s: str, width: Any = 4, *_: Any, **__: Any) -> None:
    budget.check_count(width)
    each = len(width) if isinstance(width, str) else int(width)
    budget.allow(len(s) + (s.count("\n") + 1) * each)


def _replaced(budget: Budget, s: Any, old: Any, new: Any, count: Any = None) -> None:
    budget.check_replace(str(s), str(old), str(new), -1 if count is None else count)


def _numbered(budget: Budget, value: Any, number: Any = 0, *_: Any, **names: Any) -> None:
    for given in (number, *names.values()):
        budget.check_count(given)


def _slow(budget: Budget, *values: Any, **names: Any) -> None:
    if sum(map(budget.weigh, (*values, *names.values()))) > MAX_SLOW:
        raise LimitError(f"it uses a slow filter on more than {MAX_SLOW} characters")


def _percent(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    budget.check_percent(str(value), kwargs or args)


def _few(budget: Budget, value: Any, chars: Any = None, **_: Any) -> None:
    if chars is not None and budget.weigh(chars) > MAX_CHARS:
        raise LimitError(f"it looks for more than {MAX_CHARS} characters")


def _rounded(budget: Budget, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    budget.check_count(precision, 300)


_FILTERS: Mapping[str, Any] = {
    "batch": _numbered,
    "center": _numbered,
    "format": _percent,
    "indent": _indent,
    "int": _slow,
    "float": _slow,
    "pprint": _slow,
    "replace": _replaced,
    "round": _rounded,
    "slice": _numbered,
    "striptags": _slow,
    "trim": _few,
    "truncate": _numbered,
    "urlize": _slow,
    "wordwrap": _slow,
    "xmlattr": _slow,
}


# The same before a method of a text, a number or a dictionary is called.


def _padded(budget: Budget, owner: Any, width: Any = 8, *_: Any, **names: Any) -> None:
    for given in (width, *names.values()):
        budget.check_count(given)
    if isinstance(owner, (str, bytes)):
        tabs = owner.count("\t") if isinstance(owner, str) else owner.count(b"\t")
        budget.allow(len(owner) + (tabs + 1) * abs(int(width)))


def _replace_method(budget: Budget, owner: Any, old: Any, new: Any, count: Any = -1) -> None:
    budget.check_replace(owner, old, new, count)


def _join_method(budget: Budget, owner: Any, values: Any) -> None:
    if isinstance(values, Iterator):
        raise LimitError("it joins what it did not make a list of; use the filter join")
    budget.allow(budget.weigh(values) + len(values) * len(owner))


def _translate(budget: Budget, owner: Any, table: Any, *_: Any) -> None:
    longest = 1
    if isinstance(table, Mapping):
        longest = max((budget.weigh(value) for value in table.values()), default=1)
    budget.allow(len(owner) * max(1, longest))


def _codec(budget: Budget, owner: Any, encoding: Any = "utf-8", *_: Any, **__: Any) -> None:
    if not isinstance(encoding, str) or encoding.lower().replace("_", "-") not in CODECS:
        raise LimitError(f"it uses the encoding {str(encoding)[:40]!r}")


def _entries(budget: Budget, owner: Any, values: Any = (), *_: Any, **__: Any) -> None:
    if isinstance(values, Iterator) or (hasattr(values, "__len__") and len(values) > MAX_COUNT):
        raise LimitError(f"it makes a dictionary of more than {MAX_COUNT} entries")


_CALLS: Mapping[str, Any] = {
    "center": _padded,
    "decode": _codec,
    "dict": _entries,
    "encode": _codec,
    "expandtabs": _padded,
    "from_bytes": _slow,
    "fromkeys": _entries,
    "join": _join_method,
    "ljust": _padded,
    "lstrip": _few,
    "replace": _replace_method,
    "rfind": _few,
    "rindex": _few,
    "rjust": _padded,
    "rpartition": _few,
    "rsplit": _few,
    "rstrip": _few,
    "strip": _few,
    "to_bytes": _padded,
    "translate": _translate,
    "zfill": _padded,
}
