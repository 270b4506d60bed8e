"""Terms and their numbers: what a rebuilt kernel and its original are compared in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Table:
    """Terms and their numbers, shared by the two kernels. `mentions` holds the loop symbols inside a term."""

    numbers: dict[Any, int] = field(default_factory=dict)
    terms: list[Any] = field(default_factory=list)
    mentions: list[frozenset[int]] = field(default_factory=list)

    def number(self, head: Any, *args: Any) -> int:
        """The number of a term; `args` are numbers, or tuples of them."""
        term = (head, args)
        known = self.numbers.get(term)
        if known is None:
            known = len(self.terms)
            self.numbers[term] = known
            self.terms.append(term)
            self.mentions.append(frozenset().union(*(self._inside(a) for a in args)))
        return known

    def symbol(self, head: Any, *args: Any) -> int:
        """A term that stands for a value of an unknown iteration."""
        number = self.number(head, *args)
        self.mentions[number] = frozenset([number])
        return number

    def _inside(self, arg: Any) -> frozenset[int]:
        if isinstance(arg, tuple):
            return frozenset().union(*(self._inside(a) for a in arg))
        return self.mentions[arg] if arg >= 0 else frozenset()
