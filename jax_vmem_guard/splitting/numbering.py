"""Numbers every value of a kernel and everything its buffers hold, so that two kernels can be compared.

The same primitive on the same numbers has the same number; sizes are left out. What a buffer holds is a value, too: a
store gives it a new number made of the old one, the place and what is stored. In a rebuilt kernel its own arithmetic is
given the number of what it stands for in the original: grid index // k is the original's grid index, an iota plus
(grid index % k) times its size is an iota k times as long, and a loop over the chunks of one part is the loop over all.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting import frames, memory, numbering_control
from jax_vmem_guard.splitting.errors import Refused
from jax_vmem_guard.splitting.frames import Frame, RefId
from jax_vmem_guard.splitting.terms import Table

_SIZES = frozenset({"shape", "new_sizes", "limit_indices", "slice_sizes", "reps", "repeats", "sharding",
                    "out_sharding", "weak_type", "dimensions"})
_DIMENSIONS_MATTER = frozenset({"rev", "squeeze", "expand_dims"})


@dataclass
class Numbering:
    """Numbers the values of one kernel.

    Attributes:
      steps: axes whose number of programs is a constant in the other kernel.
      split_axis: in the rebuilt kernel, the axis whose grid index is the finer one; else None.
      parts: k.
      cut: in the rebuilt kernel, the buffers in parts.
      held: what each buffer holds.
      local: in the rebuilt kernel, counters of loops over the chunks of one part -> (the original's counter, length).
    """

    table: Table
    steps: dict[int, int] = field(default_factory=dict)
    split_axis: int | None = None
    parts: int = 1
    cut: dict[RefId, int] = field(default_factory=dict)
    local: dict[int, tuple[int, int]] = field(default_factory=dict)
    held: dict[RefId, int] = field(default_factory=dict)
    values: dict[tuple[int, Any], int] = field(default_factory=dict)

    def kernel(self, jaxpr: Any) -> dict[RefId, int]:
        root = frames.build(jaxpr)
        for position in range(len(jaxpr.invars)):
            self.held["operand", position] = self.table.number(("operand", position))
        self.frame(root)
        return self.held

    def index_map(self, closed: Any, axes: int) -> list[int]:
        """The numbers of the block indices."""
        jaxpr, _ = jp.open_jaxpr(closed)
        root = frames.build(jaxpr)
        for position, var in enumerate(jaxpr.invars):
            self.held["operand", position] = self.table.number(("operand", position))
            if position < axes:
                head = "fine" if position == self.split_axis else "program_id"
                self.values[root.number, var] = self.table.number((head, position))
        self.frame(root)
        return [self.read(root, v) for v in jaxpr.outvars]

    def finer_block(self, number: int) -> int:
        """Block e of the original as the e*k + (grid index % k) of the rebuilt kernel."""
        return self.table.number(("block",), number)

    def read(self, frame: Frame, atom: Any) -> int:
        if jp.is_literal(atom):
            return self.literal(atom.val, atom.aval.dtype)
        kind, value = frame.sources.get(atom, ("", None))
        if kind == "outer" and frame.parent is not None:
            return self.read(frame.parent, value)
        if kind == "const":
            return self.table.number(("const", np.asarray(value).tobytes(), str(np.asarray(value).dtype)))
        return self.values[frame.number, atom]

    def literal(self, value: Any, dtype: Any) -> int:
        return self.table.number(("literal", str(np.dtype(dtype)), repr(np.asarray(value, dtype).tolist())))

    def _converted(self, number: int, dtype: Any) -> int:
        """A literal in another type."""
        head, _ = self.table.terms[number]
        return self.literal(np.asarray(ast.literal_eval(head[2]), jnp.dtype(head[1])).astype(dtype).tolist(), dtype)

    def frame(self, frame: Frame) -> None:
        for index, eqn in enumerate(frame.jaxpr.eqns):
            acc = memory.access(eqn)
            if index in frame.controls:
                outs = numbering_control.control(self, frame, index)
                numbering_control.declared(self, frame, index)
            elif acc is not None:
                outs = [self._access(frame, acc)]
            else:
                outs = self._equation(frame, eqn)
            for var, number in zip(eqn.outvars, outs, strict=False):
                self.values[frame.number, var] = number

    # -- equations

    def _equation(self, frame: Frame, eqn: Any) -> list[int]:
        name, params = eqn.primitive.name, eqn.params
        number = self.table.number
        if name == "program_id":
            fine = params["axis"] == self.split_axis
            return [number((("fine" if fine else "program_id"), params["axis"]))]
        if name == "num_programs" and params["axis"] in self.steps:
            return [self.literal(self.steps[params["axis"]], np.int32)]
        if name == "iota":
            return [self._iota(params["dtype"], params["dimension"], params["shape"][params["dimension"]])]
        args = tuple(self.read(frame, v) for v in eqn.invars)
        if name == "multiple_of":
            return list(args)  # a hint, which places of chunks do without
        kept = tuple((key, repr(value)) for key, value in sorted(params.items())
                     if key not in _SIZES or (key == "dimensions" and name in _DIMENSIONS_MATTER))
        head = (name, kept)
        ours = self._own_arithmetic(eqn, head, args)
        if ours is not None:
            return [ours]
        if name == "convert_element_type":
            if eqn.invars[0].aval.dtype == params["new_dtype"]:
                return [args[0]]  # only the weak type goes, which no operation of a kernel sees
            if jp.is_literal(eqn.invars[0]) or self.table.terms[args[0]][0][0] == "literal":
                return [self._converted(args[0], params["new_dtype"])]  # JAX folds these while it traces
            return [number(("convert", str(params["new_dtype"])), *args)]
        if len(eqn.outvars) == 1:
            return [number(head, *args)]
        return [number((*head, i), *args) for i in range(len(eqn.outvars))]

    def _iota(self, dtype: Any, dim: int, size: int) -> int:
        plain = self.table.number(("iota", dim, size))
        return plain if np.dtype(dtype) == np.int32 else self.table.number(("convert", str(np.dtype(dtype))), plain)

    def _own_arithmetic(self, eqn: Any, head: tuple[str, Any], args: tuple[int, ...]) -> int | None:
        """The split kernel's arithmetic on its finer grid index, as what it stands for in the original."""
        if self.split_axis is None:
            return None
        number, name = self.table.number, head[0]
        fine = number(("fine", self.split_axis))
        sub = number(("sub",))
        if name in ("div", "rem") and args == (fine, self.literal(self.parts, np.int32)):
            return number(("program_id", self.split_axis)) if name == "div" else sub
        if name == "add" and args[1] == sub:
            (times, (block, *by)) = self.table.terms[args[0]] if self.table.terms[args[0]][1] else (("",), (-1,))
            if times[0] == "mul" and by == [self.literal(self.parts, np.int32)]:
                return self.finer_block(block)
        if name == "mul" and args[0] == sub:
            times, _ = self.table.terms[args[1]]
            return number(("offset", times[2])) if times[0] == "literal" else None
        if name == "broadcast_in_dim" and self.table.terms[args[0]][0][0] == "offset":
            return args[0]
        if name == "add" and args[0] in self.local:
            counter, length = self.local[args[0]]
            if args[1] == number(("offset", str(length))):
                return counter
            return number(head, counter, args[1]) if args[1] == self.literal(1, np.int32) else None
        return self._moved_iota(eqn, args) if name == "add" else None

    def _moved_iota(self, eqn: Any, args: tuple[int, ...]) -> int | None:
        (iota, _), (offset, _) = self.table.terms[args[0]], self.table.terms[args[1]]
        if iota[0] != "iota" or offset[0] != "offset":
            return None
        _, dim, size = iota
        if int(offset[1]) != size or eqn.outvars[0].aval.shape[dim] != size:
            return None
        return self._iota(np.int32, dim, size * self.parts)

    # -- memory

    def _access(self, frame: Frame, acc: memory.Access) -> int:
        ref = frames.resolve_ref(frame, acc.ref)
        place = tuple(self._place(frame, t, self.cut.get(ref)) for t in acc.transforms)
        if all(isinstance(p, tuple) and all(i == "all" for i in p) for p in place):
            place = ()
        rest = tuple(-1 if v is None else self.read(frame, v) for v in (acc.mask, acc.other))
        head: tuple[Any, ...] = (acc.eqn.primitive.name, _shape_of(place))
        numbers = (*_numbers_of(place), *rest)
        old = self.held[ref]
        if acc.stores:
            self.held[ref] = self.table.number(head, old, self.read(frame, acc.value), *numbers)
            head = ("held before", *head)
        return self.table.number(head, old, *numbers)

    def _place(self, frame: Frame, transform: Any, cut: int | None) -> Any:
        if jp.indexers((transform,)) is None:
            return (str(transform),)
        place: list[Any] = []
        for dim, (index, extent) in enumerate(zip(transform.indices, transform.shape, strict=True)):
            local = self._local_chunk(frame, index, extent) if dim == cut else None
            if local is not None:
                place.append((local, self._index(frame, index.size), f"::{index.stride}"))
            elif memory.takes_all(index, extent):
                place.append("all")
            elif dim == cut:
                raise Refused("an access to a split buffer takes neither all of a part nor the chunk of a loop")
            elif jp.is_slice(index):
                place.append((self._index(frame, index.start), self._index(frame, index.size), f"::{index.stride}"))
            else:
                place.append(self._index(frame, index))
        return tuple(place)

    def _local_chunk(self, frame: Frame, index: Any, extent: int) -> int | None:
        """Where the original's chunk starts, for a chunk of a part at (local counter) times its size."""
        if not jp.is_slice(index) or not hasattr(index.start, "aval"):
            return None
        head, args = self.table.terms[self.read(frame, index.start)]
        if head[0] != "mul" or args[0] not in self.local or args[1] != self.literal(index.size, np.int32):
            return None
        counter, length = self.local[args[0]]
        return self.table.number(head, counter, args[1]) if length * index.size == extent else None

    def _index(self, frame: Frame, value: Any) -> int:
        return self.read(frame, value) if hasattr(value, "aval") else self.literal(value, np.int32)




def _shape_of(place: Any) -> Any:
    if isinstance(place, tuple):
        return tuple(_shape_of(p) for p in place)
    return place if isinstance(place, str) else "#"


def _numbers_of(place: Any) -> tuple[int, ...]:
    if isinstance(place, tuple):
        return tuple(n for p in place for n in _numbers_of(p))
    return () if isinstance(place, str) else (place,)
