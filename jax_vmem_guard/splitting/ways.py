"""How one result can be had: the vocabulary of the rules.

A *label* says what a value in a step of the split grid is, compared with the value of the same name in the step of the
original grid: `None`, the whole of it; or `d`, the j-th of k contiguous equal parts along dimension d (j is the number
of the step among the k steps that replace one). A rule answers one question: to have this result under this label,
under which labels are the operands needed, and with which parameters is the primitive then bound?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jax_vmem_guard.splitting.errors import Refused

Label = int | None


@dataclass(frozen=True, kw_only=True)
class Question:
    """A result wanted in parts.

    Attributes:
      eqn: the equation that makes it.
      out: position among the equation's results.
      dim: the dimension that is split.
      parts: k.
    """

    eqn: Any
    out: int
    dim: int
    parts: int

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.eqn.outvars[self.out].aval.shape)

    @property
    def part(self) -> int:
        """Size of one part."""
        return self.shape[self.dim] // self.parts

    def operand(self, i: int) -> tuple[int, ...]:
        return tuple(self.eqn.invars[i].aval.shape)

    def refuse(self, why: str) -> Refused:
        return Refused(f"`{self.eqn.primitive.name}` {why}")


@dataclass(frozen=True, kw_only=True)
class Way:
    """The answer: labels of the operands and the parameters to bind with.

    Attributes:
      labels: one per operand.
      params: the primitive's parameters, blocks made smaller.
      offset_dim: for `iota`: the dimension along which sub-step times part size is added.
    """

    labels: tuple[Label, ...]
    params: dict[str, Any] = field(hash=False)
    offset_dim: int | None = None


Rule = Callable[[Question], Way]


def way(question: Question, labels: tuple[Label, ...] | list[Label], **changes: Any) -> Way:
    return Way(labels=tuple(labels), params={**question.params, **changes})


def shrunk(sizes: tuple[int, ...], dim: int, parts: int) -> tuple[int, ...]:
    return tuple(s // parts if i == dim else s for i, s in enumerate(sizes))
