"""Checks a rebuilt kernel against the original, without trusting the proof or the way it was rebuilt.

Both kernels are read forwards and every value gets a number: the same number for the same primitive on the same
numbers, sizes left out. What a buffer holds is a value, too: a store gives it a new number made of the old one, the
place and what is stored. The split kernel's own arithmetic is recognised and given the number of what it stands for:
grid index // k is the original's grid index, iota plus (grid index % k) times its size is an iota k times as long.
In the end every buffer must hold the same number in both kernels: the same stores of the same values to the same
places in the same order, under the same conditions and loops. Declared effects must name every buffer that is written,
or JAX may delete the stores later.

What this cannot see: sizes. They are the proof's business.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting import frames, memory
from jax_vmem_guard.splitting.errors import Refused
from jax_vmem_guard.splitting.frames import Frame, RefId
from jax_vmem_guard.splitting.ways import Label

_SIZES = frozenset({"shape", "new_sizes", "limit_indices", "slice_sizes", "reps", "repeats", "sharding",
                    "out_sharding", "weak_type", "dimensions"})
#: Times a loop is read to tell carried values apart that start alike.
_STAGES = 6
_DIMENSIONS_MATTER = frozenset({"rev", "squeeze", "expand_dims"})


def same_kernel(original: Any, rebuilt: Any, *, axis: int, parts: int, steps: int, labels: Sequence[Label]) -> None:
    """Raises `Refused` unless the rebuilt kernel jaxpr does what the original does.

    Args:
      axis: the split axis, as `program_id` numbers it.
      parts: k.
      steps: programs along the axis in the original.
      labels: of the kernel's references, to say which buffer differs.
    """
    table = Table()
    before = Numbering(table=table, steps={axis: steps})
    after = Numbering(table=table, split_axis=axis, parts=parts,
                      cut={("operand", i): label for i, label in enumerate(labels) if label is not None})
    try:
        held_before, held_after = before.kernel(original), after.kernel(rebuilt)
    except Refused as error:
        raise Refused(f"the rebuilt kernel could not be checked: {error.reason}") from None
    for position in range(len(labels)):
        ref = ("operand", position)
        if held_before.get(ref) != held_after.get(ref):
            raise Refused(f"the rebuilt kernel does not leave the same value in reference {position} "
                          "as the original (rebuild check)")
    written_before, written_after = jp.declared_writes(original), jp.declared_writes(rebuilt)
    if written_before != written_after:
        raise Refused(f"the rebuilt kernel declares other writes than the original: {sorted(written_after)} "
                      f"for {sorted(written_before)} (rebuild check)")


def same_windows(original: Any, rebuilt: Any, *, axes: int, axis: int, parts: int, follows: int | None) -> None:
    """Raises `Refused` unless the rebuilt index map gives the original's blocks.

    Args:
      original, rebuilt: index map jaxprs, closed.
      axes: how many of their inputs are grid indices.
      axis: the split grid axis.
      parts: k.
      follows: the dimension that is cut and moves with the finer steps: block e becomes e*k + (grid index % k) there.
        None where the block stays the original's.
    """
    table = Table()
    before = Numbering(table=table).index_map(original, axes)
    split = Numbering(table=table, split_axis=axis, parts=parts)
    after = split.index_map(rebuilt, axes)
    for dim, (was, now) in enumerate(zip(before, after, strict=True)):
        wanted = [was]
        if dim == follows:
            wanted = [split.finer_block(was)]
            if was in (table.number(("program_id", axis)), split.literal(0, np.int32)):
                wanted.append(table.number(("fine", axis)))
        if now not in wanted:
            raise Refused(f"the rebuilt index map does not follow the original in dimension {dim} (rebuild check)")


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
                outs = self._control(frame, index)
                self._declared(frame, index)
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

    # -- control flow

    def _control(self, frame: Frame, index: int) -> list[int]:
        control, bodies = frame.controls[index], frame.children[index]
        if control.kind == "cond":
            return self._cond(frame, index, bodies)
        if control.kind in ("scan", "while"):
            return self._loop(frame, index, control, bodies)
        body = bodies[0]
        if control.kind == "scoped":
            for i, var in enumerate(body.jaxpr.invars):
                self.held["scoped", body.number, i] = self.table.number(("fresh", i, str(getattr(var.aval, "dtype", ""))))
        self.frame(body)
        return [self.read(body, v) for v in body.jaxpr.outvars]

    def _cond(self, frame: Frame, index: int, bodies: tuple[Frame, ...]) -> list[int]:
        choice = self._choice(self.read(frame, frame.jaxpr.eqns[index].invars[0]), len(bodies))
        start, ends, outs = dict(self.held), [], []
        for body in bodies:
            self.held = dict(start)
            self.frame(body)
            ends.append(self.held)
            outs.append([self.read(body, v) for v in body.jaxpr.outvars])
        self.held = dict(start)
        for ref, old in start.items():
            if any(end[ref] != old for end in ends):
                self.held[ref] = self.table.number(("cond",), choice, *(end[ref] for end in ends))
        return [self.table.number(("cond",), choice, *alternatives) for alternatives in zip(*outs, strict=True)]

    def _choice(self, number: int, branches: int) -> int:
        """The condition without what JAX wraps around it."""
        while True:
            head, args = self.table.terms[number]
            zeros = (self.literal(0, np.int32), self.literal(0, bool))
            truth = head[0] == "convert" and head[1] in ("int32", "bool")
            if truth or (branches == 2 and head[0] == "ne" and args[1] in zeros):
                number = args[0]
            elif head[0] == "clamp" and self._clamped(args):
                number = args[1]
            else:
                return number

    def _clamped(self, args: tuple[Any, ...]) -> bool:
        """Whether the clamped value was clamped to the same bounds before."""
        head, before = self.table.terms[args[1]]
        return head[0] == "clamp" and (before[0], before[2]) == (args[0], args[2])

    def _loop(self, frame: Frame, index: int, control: jp.Control, bodies: tuple[Frame, ...]) -> list[int]:
        """A loop is the number of what it does to an unknown iteration, for each carried value and buffer.

        Carried values that start alike are one symbol until they are seen to go on differently; so a value that the
        rebuilt kernel carries twice, whole and in parts, is one value here.
        """
        eqn, body = frame.jaxpr.eqns[index], bodies[-1]
        start = dict(self.held)
        init = [self.read(frame, eqn.invars[p]) for p in control.init]
        length = control.length
        if control.kind == "scan" and self._over_chunks(frame, body, control):
            length *= self.parts
        classes = [-1] * control.num_carry
        for stage in range(_STAGES):
            symbols: dict[Any, int] = {
                i: n if _passes_through(body, i) else self.table.symbol(("carry",), n, classes[i])
                for i, n in enumerate(init)}
            if length != control.length:
                local = self.table.symbol(("counter in a part",), symbols[0])
                self.local[local] = (symbols[0], control.length)
                symbols[0] = local
            changed, condition, outs = self._iteration(frame, bodies, symbols, start)
            groups: dict[int, set[int]] = {}
            for i in range(control.num_carry):
                groups.setdefault(symbols[i], set()).add(outs[i])
            if stage and all(len(group) == 1 for group in groups.values()):
                break
            classes = [self.table.number(("class",), classes[i], outs[i]) for i in range(control.num_carry)]
        else:
            raise Refused("a loop carries values that could not be told apart")
        symbols |= {i: self.local[n][0] for i, n in symbols.items() if n in self.local}
        becomes = {symbols[i]: (init[i], outs[i]) for i in range(control.num_carry) if not _passes_through(body, i)}
        becomes |= {symbols[ref]: (start[ref], self.held[ref]) for ref in changed}
        head = (control.kind, length, control.reverse)

        def finish(number: int, what: str) -> int:
            pieces = self._closure([number, condition], becomes)
            result = self.table.number((*head, what), number, condition, *pieces)
            self.table.mentions[result] -= frozenset(becomes)
            return result

        for ref in changed:
            start[ref] = finish(self.held[ref], "held")
        self.held = start
        carried = [init[i] if _passes_through(body, i) else finish(outs[i], "carry")
                   for i in range(control.num_carry)]
        return carried + [finish(n, "stacked") for n in outs[control.num_carry:]]

    def _over_chunks(self, frame: Frame, body: Frame, control: jp.Control) -> bool:
        """Whether the rebuilt loop moves its counter by (sub-step times its length)."""
        if self.split_axis is None or control.num_carry != 1:
            return False
        moved = self.table.number(("offset", str(control.length)))
        return any(
            eqn.primitive.name == "add" and body.sources.get(eqn.invars[0]) == ("carry", 0)
            and body.sources.get(eqn.invars[1], ("",))[0] == "outer" and self.read(body, eqn.invars[1]) == moved
            for eqn in body.jaxpr.eqns if not any(jp.is_literal(v) for v in eqn.invars))

    def _iteration(self, frame: Frame, bodies: tuple[Frame, ...], symbols: dict[Any, int],
                   start: dict[RefId, int]) -> tuple[list[RefId], int, list[int]]:
        """Runs the bodies on symbols; the buffers they change (added to `symbols`), the condition and the results."""
        self.held = dict(start)
        self._bodies(frame, bodies, symbols)
        changed = [ref for ref in start if self.held[ref] != start[ref]]
        self.held = dict(start)
        for ref in changed:
            symbols[ref] = self.held[ref] = self.table.symbol(("held in a loop", len(ref), ref[0], ref[-1]), start[ref])
        condition = self._bodies(frame, bodies, symbols)
        return changed, condition, [self.read(bodies[-1], v) for v in bodies[-1].jaxpr.outvars]

    def _bodies(self, frame: Frame, bodies: tuple[Frame, ...], symbols: dict[Any, int]) -> int:
        condition = -1
        for one in bodies:
            self._enter(frame, one, symbols)
            self.frame(one)
            if one is not bodies[-1]:
                condition = self.read(one, one.jaxpr.outvars[0])
        return condition

    def _enter(self, frame: Frame, body: Frame, symbols: dict[Any, int]) -> None:
        for var, (kind, value) in body.sources.items():
            if kind == "carry":
                self.values[body.number, var] = symbols[value]
            elif kind == "xs":
                self.values[body.number, var] = self.table.number(("one of",), self.read(frame, value))

    def _closure(self, numbers: list[int], becomes: dict[int, tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
        """How every symbol that matters for `numbers` starts and goes on."""
        found: dict[int, tuple[int, int, int]] = {}
        todo = list(numbers)
        while todo:
            number = todo.pop()
            for symbol in self.table.mentions[number] if number >= 0 else ():
                if symbol in becomes and symbol not in found:
                    found[symbol] = (symbol, *becomes[symbol])
                    todo.append(becomes[symbol][1])
        return tuple(found[s] for s in sorted(found))

    # -- effects

    def _declared(self, frame: Frame, index: int) -> None:
        """Every buffer written inside an equation must be in its declared effects."""
        eqn = frame.jaxpr.eqns[index]
        declared = {frames.resolve_ref(frame, var) for var in jp.written(eqn)}
        for body in frame.children[index]:
            inside = {f.number for f in body.walk()}
            for f in body.walk():
                for one in f.jaxpr.eqns:
                    acc = memory.access(one)
                    if acc is None or not acc.stores:
                        continue
                    ref = frames.resolve_ref(f, acc.ref)
                    if ref not in declared and not (ref[0] == "scoped" and ref[1] in inside):
                        raise Refused(f"`{eqn.primitive.name}` does not declare a write it makes")


def _passes_through(body: Frame, i: int) -> bool:
    out = body.jaxpr.outvars[i]
    return not jp.is_literal(out) and body.sources.get(out) == ("carry", i)


def _shape_of(place: Any) -> Any:
    if isinstance(place, tuple):
        return tuple(_shape_of(p) for p in place)
    return place if isinstance(place, str) else "#"


def _numbers_of(place: Any) -> tuple[int, ...]:
    if isinstance(place, tuple):
        return tuple(n for p in place for n in _numbers_of(p))
    return () if isinstance(place, str) else (place,)
