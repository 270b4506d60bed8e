"""Functions whose author declared choices: which ones there are, and which choice a trace of a program takes.

A declared function leaves nothing in a traced program. What a program's choices are is learned by tracing it again:
then every call of a declared function in it is counted as a *site*, and may be given another choice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

TUNABLE, FALLBACK = "tunable", "fallback"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to call a declared function.

    Attributes:
      words: as a log line shows it: "block_q=512, block_k=1024".
      function: what is called.
      keywords: arguments the choice adds; those of the caller win.
    """

    words: str
    function: Callable[..., Any]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **{**self.keywords, **kwargs})


@dataclass(frozen=True, kw_only=True, eq=False)
class Declaration:
    """A declared function.

    Attributes:
      kind: "tunable" or "fallback".
      name: of the function.
      where: "file:line" of the declaration.
      choices: best first; of a fallback the kernel and the reference.
      reasons: of a fallback: what makes it take the reference: "vmem", "lowering".
    """

    kind: str
    name: str
    where: str
    choices: tuple[Choice, ...]
    reasons: tuple[str, ...] = ("vmem",)

    def describe(self, index: int) -> str:
        """A choice in words: "block=256 (choice 2 of 3)"."""
        return f"{self.choices[index].words} (choice {index + 1} of {len(self.choices)})"


class Retracing:
    """One trace of a program in which declared functions take given choices.

    A site is a declared function together with the types of the arguments it is called with: calls that agree in both
    take the same choice. Its key is text, the same on every host.

    Args:
      chosen: site key -> index of the choice; the first one where it has none.
    """

    def __init__(self, chosen: Mapping[str, int]):
        self._chosen = chosen
        self._met: dict[str, list[Declaration]] = {}
        #: Site key -> declaration, in the order in which the trace met them.
        self.sites: dict[str, Declaration] = {}

    def index(self, declaration: Declaration, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """The choice for a call, which becomes a site."""
        same_name = self._met.setdefault(declaration.name, [])
        if declaration not in same_name:
            same_name.append(declaration)
        number = same_name.index(declaration)
        name = declaration.name if number == 0 else f"{declaration.name}#{number + 1}"
        key = f"{name}({', '.join(_in_words(leaf) for leaf in jax.tree.leaves((args, dict(kwargs))))})"
        self.sites.setdefault(key, declaration)
        return min(self._chosen.get(key, 0), len(declaration.choices) - 1)


def _in_words(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return repr(leaf) if isinstance(leaf, (bool, int, float, str)) else type(leaf).__name__


class _ThreadState(threading.local):
    retracing: Retracing | None = None
    only_cheap: bool = False


_state = _ThreadState()
_reasons_declared: set[str] = set()


def register(declaration: Declaration) -> None:
    """Note what was declared in this process: only for that, programs are worth another trace."""
    _reasons_declared.update(declaration.reasons)


def any_declared(reason: str = "vmem") -> bool:
    """Whether a declared function of this process has another choice for this reason, "vmem" or "lowering"."""
    return reason in _reasons_declared


def retracing() -> Retracing | None:
    """The retracing at work in this thread, or None."""
    return _state.retracing


@contextlib.contextmanager
def retrace_with(chosen: Mapping[str, int]) -> Iterator[Retracing]:
    """Inside, declared functions of this thread take the given choices."""
    before, _state.retracing = _state.retracing, Retracing(chosen)
    try:
        yield _state.retracing
    finally:
        _state.retracing = before


def only_cheap_remedies() -> bool:
    """Whether programs of this thread are repaired only by what costs less than another declared choice."""
    return _state.only_cheap


@contextlib.contextmanager
def cheap_remedies_first() -> Iterator[None]:
    """Inside, another declared choice is still to come: see `only_cheap_remedies`."""
    before, _state.only_cheap = _state.only_cheap, True
    try:
        yield
    finally:
        _state.only_cheap = before
