"""Dead on entry: no buffer carries anything from one step of the split axis into the next.

The split grid runs (a, j=0, all inner steps), (a, j=1, all inner steps), ... So whatever a scratch buffer, or an output
block that stays in place, holds when step a begins must not matter. Shown on the original kernel, in one of two ways:

* `first`: with every inner grid index 0 (the first inner step of a) the buffer is written whole, and not read before
  that (`@pl.when(pl.program_id(inner) == 0)` that initialises);
* `every`: in every step the buffer is not read before it is written whole in that step.

An output block in parts needs the first way: what it holds in the end is read by whoever reads the result.

Conditions that can be decided are followed; of others both branches are taken, and a write counts if it is in both.
Loops that may run no iteration count for their reads, not for their writes. A buffer is whole also when constant slices of
one dimension cover it, or a loop that writes chunk i of it in every iteration i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting import chunks, frames, memory
from jax_vmem_guard.splitting.frames import Frame, RefId

_SCALAR: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or,
    "not": np.bitwise_not, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is known of the kernel's grid indices. Axes are numbered as `program_id` numbers them.

    Attributes:
      inner: axes that run inside the split one.
      sizes: axis -> number of programs, for static ones.
    """

    inner: frozenset[int]
    sizes: Mapping[int, int]

    def ids(self, first: bool) -> dict[int, int]:
        """The indices that are known: of axes with one step, and of the inner ones in the first inner step."""
        known = {axis: 0 for axis, size in self.sizes.items() if size == 1}
        return {**known, **dict.fromkeys(self.inner, 0)} if first else known


def carried(root: Frame, shapes: Mapping[RefId, tuple[int, ...]], final: frozenset[RefId], grid: Grid) -> \
        dict[RefId, str]:
    """The buffers that may carry something, with what was found.

    Args:
      root: frames of the original kernel.
      shapes: the buffers to look at.
      final: those whose last contents are read from outside, in parts: only the first way counts for them.
      grid: what is known of the grid.
    """
    first = _Run(shapes=shapes, ids=grid.ids(first=True), sizes=grid.sizes)
    written = first.frame(root, frozenset())
    every = _Run(shapes=shapes, ids=grid.ids(first=False), sizes=grid.sizes)
    every.frame(root, frozenset())
    found = {}
    for ref in shapes:
        if ref in written and ref not in first.early:
            continue
        if ref not in final and ref not in every.early:
            continue
        found[ref] = ("is read before it is written whole" if ref in first.early
                      else "is not written whole when a step of the axis begins")
    return found


@dataclass(frozen=True)
class _Piece:
    """Part of a buffer, whole in all dimensions but `dim`: start..stop, or chunk i in iteration i of a loop."""

    ref: RefId
    dim: int
    start: int = 0
    stop: int = 0
    loop: int | None = None

    def holds(self, other: _Piece) -> bool:
        return (self.ref, self.dim, self.loop) == (other.ref, other.dim, other.loop) \
            and self.start <= other.start and other.stop <= self.stop


_Written = frozenset[Any]  # of RefId, written whole, and of _Piece


@dataclass
class _Run:
    """One abstract run of the kernel; `early` collects the buffers read before they are written whole."""

    shapes: Mapping[RefId, tuple[int, ...]]
    ids: Mapping[int, int]
    sizes: Mapping[int, int]
    early: set[RefId] = field(default_factory=set)
    known: dict[tuple[int, Any], Any] = field(default_factory=dict)

    def frame(self, frame: Frame, written: _Written) -> _Written:
        """Runs the frame; what is written after it."""
        used = _used(frame)
        for index, eqn in enumerate(frame.jaxpr.eqns):
            if index in frame.controls:
                written = self._control(frame, index, written)
                continue
            acc = memory.access(eqn)
            if acc is None:
                continue
            ref = frames.resolve_ref(frame, acc.ref)
            if ref not in self.shapes:
                continue
            piece = self._piece(frame, acc, ref)
            reads = not acc.stores or acc.adds or eqn.outvars[0] in used
            if reads and ref not in written and not (piece and any(
                    isinstance(one, _Piece) and one.holds(piece) for one in written)):
                self.early.add(ref)
            if acc.stores and not acc.adds:
                written = self._store(acc, ref, piece, written)
        return written

    def _store(self, acc: memory.Access, ref: RefId, piece: _Piece | None, written: _Written) -> _Written:
        if memory.is_full(acc, self.shapes[ref]):
            return written | {ref}
        if piece is None:
            return written
        written |= {piece}
        if piece.loop is None:
            reached = 0
            for one in sorted((p for p in written if isinstance(p, _Piece) and (p.ref, p.dim, p.loop)
                               == (ref, piece.dim, None)), key=lambda p: p.start):
                reached = max(reached, one.stop) if one.start <= reached else reached
            if reached >= self.shapes[ref][piece.dim]:
                return written | {ref}
        return written

    def _piece(self, frame: Frame, acc: memory.Access, ref: RefId) -> _Piece | None:
        """The part of the buffer that the access is to, where it is of a simple kind."""
        plain = jp.indexers(acc.transforms)
        if plain is None or len(plain) != 1 or plain[0].int_indexer_shape != () or acc.mask is not None:
            return None
        partial = [d for d, (index, extent) in enumerate(zip(plain[0].indices, self.shapes[ref], strict=True))
                   if not memory.takes_all(index, extent) and (jp.is_slice(index) or extent != 1)]
        if len(partial) != 1:
            return None
        (dim,) = partial
        chunk = chunks.find(frame, acc, dim)
        if chunk is not None:
            return _Piece(ref, dim, loop=chunk.loop.number)
        index = plain[0].indices[dim]
        if not jp.is_slice(index) or index.stride != 1 or not isinstance(index.size, int):
            return None
        start = index.start if isinstance(index.start, int) else self.value(frame, index.start)
        return None if start is None else _Piece(ref, dim, int(start), int(start) + index.size)

    def _control(self, frame: Frame, index: int, written: _Written) -> _Written:
        control, bodies = frame.controls[index], frame.children[index]
        if control.kind == "cond":
            choice = self.value(frame, frame.jaxpr.eqns[index].invars[0])
            if choice is not None:
                return self.frame(bodies[min(max(int(choice), 0), len(bodies) - 1)], written)
            return frozenset.intersection(*(self.frame(body, written) for body in bodies))
        if control.kind == "while":
            self.frame(bodies[1], self.frame(bodies[0], written))
            return written
        after = self.frame(bodies[0], written)
        if control.kind != "scan":
            return after
        if control.length == 0:
            return written
        over = {p for p in after if isinstance(p, _Piece) and p.loop == bodies[0].number}
        return (after - over) | {p.ref for p in over}

    def value(self, frame: Frame, atom: Any) -> Any:
        """The number a scalar is known to be, or None."""
        if jp.is_literal(atom):
            return np.asarray(atom.val, atom.aval.dtype)[()]
        key = (frame.number, atom)
        if key not in self.known:
            self.known[key] = None
            self.known[key] = self._value(frame, atom)
        return self.known[key]

    def _value(self, frame: Frame, atom: Any) -> Any:
        if atom in frame.sources:
            kind, value = frame.sources[atom]
            return self.value(frame.parent, value) if kind == "outer" and frame.parent is not None else None
        index, position = frame.definitions[atom]
        eqn = frame.jaxpr.eqns[index]
        if index in frame.controls:
            if frame.controls[index].kind != "call":
                return None
            body = frame.children[index][0]
            return self.value(body, body.jaxpr.outvars[position])
        if getattr(atom.aval, "shape", None) != ():
            return None
        name = eqn.primitive.name
        if name == "program_id":
            return self.ids.get(eqn.params["axis"])
        if name == "num_programs":
            return self.sizes.get(eqn.params["axis"])
        if name == "convert_element_type":
            value = self.value(frame, eqn.invars[0])
            return None if value is None else np.asarray(value).astype(eqn.params["new_dtype"])[()]
        if name not in _SCALAR:
            return None
        values = [self.value(frame, v) for v in eqn.invars]
        if any(v is None for v in values):
            return _absorbed(name, values)
        return _SCALAR[name](*values)


def _absorbed(name: str, values: list[Any]) -> Any:
    """`False and x` and `True or x` need no x."""
    for value in values:
        if name == "and" and isinstance(value, (bool, np.bool_)) and not value:
            return value
        if name == "or" and isinstance(value, (bool, np.bool_)) and value:
            return value
    return None


def _used(frame: Frame) -> set[Any]:
    atoms = [v for eqn in frame.jaxpr.eqns for v in eqn.invars] + list(frame.jaxpr.outvars)
    return {v for v in atoms if not jp.is_literal(v)}
