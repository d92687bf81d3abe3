"""What the rendering of a chat template may take: time, and the size of every value in between.

Nothing in a template is interrupted from outside: whatever a template can do a second time, or to
a value of any size, asks here first. A size is in characters, those of a list are what it would
take to write it. Templates cannot change a list or an object, so that the size of one is
worked out once; without that, ``x = [x, x]`` sixty times over would be written for years.
"""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import jinja2

SECONDS = 2.0  # of the thread's own work: on a busy machine a template is as good as on another
MIN_VALUE = 4 << 20  # characters that any value may have, however short the messages
MIN_TOTAL = 64 << 20  # characters that all values together may have that are made on the way
VALUE_SHARE, TOTAL_SHARE = 8, 512  # the same, in lengths of all messages
MAX_BITS = 20_000  # of a whole number
MAX_WIDTH = 10_000  # that a text is padded to by %
MAX_COUNT = 10_000  # of entries that go into a dictionary at once, of rows that a list is cut into
MAX_SLOW = 20_000  # characters, for what takes more than a moment each
MAX_CHARS = 1000  # characters to look for from the end, or to strip

_CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)
_SMALL = frozenset([bool, float, type(None)])  # types whose values are all of about one size
_PLAIN = _SMALL | {str}  # those that take no time to go over, once they are there
_PER_ITEM, _PER_CONTAINER = 8, 16
_DIRECTIVE = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(\*|[0-9]+)?(?:\.(\*|[0-9]+))?")


class LimitError(jinja2.TemplateRuntimeError):
    """The template asks for more than any template needs."""


class Budget:
    """What one rendering has left. ``characters``: of all messages together."""

    def __init__(self, characters: int, seconds: float) -> None:
        self.most = max(MIN_VALUE, VALUE_SHARE * characters)
        self._left = max(MIN_TOTAL, TOTAL_SHARE * characters)
        self._seconds = seconds
        self._end = time.thread_time() + seconds
        self._known: dict[int, tuple[Any, int]] = {}  # the objects too, so that no id comes again

    def tick(self) -> bool:
        """Raise LimitError when the time is up. Returns True, to stand in a condition."""
        if time.thread_time() > self._end:
            raise LimitError(f"it takes more than {self._seconds:g} seconds")
        return True

    def charge(self, characters: int) -> None:
        """Take that much from the total. Raises LimitError."""
        self._left -= characters
        if self._left < 0:
            raise LimitError("it makes more text than any prompt needs")

    def allow(self, characters: int) -> None:
        """Raise LimitError unless a value may have that size; before it is made."""
        if characters > self.most:
            raise LimitError(f"it makes a value of more than {self.most} characters")

    def seen(self, value: Any) -> Any:
        """``value``, which something is about to go over: of a size that is allowed.

        An iterator comes back as one that asks for time with every item.
        """
        if type(value) not in _PLAIN:
            if isinstance(value, Iterator):
                return self._ticking(value)
            self.weigh(value)
        return value

    def made(self, value: Any) -> Any:
        """``value``, which has just been made."""
        if type(value) not in _SMALL:
            if type(value) is not str and isinstance(value, Iterator):
                return self._ticking(value)
            self.charge(self.weigh(value))
        return value

    def items(self, values: Iterable[Any]) -> list[Any]:
        """All of them as a list of a size that is allowed."""
        found = []
        for value in values:
            self.tick()
            found.append(value)
            self.allow(_PER_ITEM * len(found))
        self.weigh(found)
        return found

    def weigh(self, value: Any) -> int:
        """The size of ``value``. Raises LimitError for more than one may have."""
        size = self._size(value)
        if size is None:
            size = self._weigh_all(value)
        self.allow(size)
        return size

    def _ticking(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.tick()
            yield value

    def _size(self, value: Any) -> int | None:
        """None for a container that was not weighed yet."""
        if type(value) is str or isinstance(value, (str, bytes)):
            return len(value)
        if type(value) in _SMALL:
            return 1
        if isinstance(value, int):
            return 1 + value.bit_length() // 3
        if not isinstance(value, _CONTAINERS):
            return 1
        known = self._known.get(id(value))
        return None if known is None else known[1]

    def _weigh_all(self, value: Any) -> int:
        """Of a container, those in it first; without recursion, as it may be nested any deep."""
        stack = [(value, iter(_children(value)), _PER_CONTAINER)]
        open_ids = {id(value)}
        while True:
            holder, children, size = stack.pop()
            for child in children:
                inner = self._size(child)
                if inner is None:
                    if id(child) in open_ids:
                        raise LimitError("it has a list that holds itself")
                    self.tick()
                    open_ids.add(id(child))
                    stack += [(holder, children, size), (child, iter(_children(child)), 16)]
                    break
                size += inner + _PER_ITEM
                self.allow(size)
            else:
                self.charge(_PER_CONTAINER)
                self._known[id(holder)] = (holder, size)
                open_ids.discard(id(holder))
                if not stack:
                    return size
                above, rest, before = stack.pop()
                stack.append((above, rest, before + size + _PER_ITEM))

    # What an operation makes, before it is done.

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """Of ``left operator right``."""
        self.tick()
        sizes = self.weigh(left), self.weigh(right)
        whole = isinstance(left, int) and isinstance(right, int)
        if operator == "+":
            self.allow(sum(sizes))
        elif operator == "*" and whole:
            self.check_bits(left.bit_length() + right.bit_length())
        elif operator == "*" and isinstance(left, int):
            self.allow(left * sizes[1])
        elif operator == "*" and isinstance(right, int):
            self.allow(right * sizes[0])
        elif operator == "**" and whole:
            self.check_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, (str, bytes)):
            self.check_percent(left, right)

    def check_bits(self, bits: int) -> None:
        """Of a whole number."""
        if bits > MAX_BITS:
            raise LimitError(f"it makes a number of more than {MAX_BITS} bits")

    def check_percent(self, pattern: Any, values: Any) -> None:
        """Of ``pattern % values``."""
        text = pattern if isinstance(pattern, str) else repr(pattern)
        directives = text.count("%")
        self.allow(len(text) * (1 + directives // 100))
        widths = 0
        for width in (part for found in _DIRECTIVE.findall(text) for part in found if part):
            if width == "*" or len(width) > 5 or int(width) > MAX_WIDTH:
                raise LimitError(f"it pads a text to {width[:20]} characters")
            widths += int(width)
        self.allow(len(text) + widths + directives * self.weigh(values))

    def check_replace(self, text: str, old: str, new: str, count: int = -1) -> None:
        """Of ``text.replace(old, new, count)``."""
        times = text.count(old) if count is None or count < 0 else min(count, text.count(old))
        self.allow(len(text) + times * len(new))

    def check_count(self, count: Any, most: int = MAX_COUNT) -> None:
        """Of what is given as a number."""
        if isinstance(count, (int, float)) and not abs(count) <= most:
            raise LimitError(f"it gives a number above {most} where a small one is meant")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    return list(value)
