"""How many vector registers' worth of values a kernel's body holds at once, and the spill slots that follow.

Mosaic unrolls every vector operation to registers of 8 x 128 words; what does not stay in the 64 there are gets a spill
slot of 4 KiB. The compiler schedules operations as soon as their operands are there, so the model asks which values are
waiting at the same time:

* Work between two *waits* (reductions across rows or lanes, matmuls, transposes, shifts of lanes) streams register by
  register and holds nothing. A value made before a wait and used after it is held whole.
* Loads, constants and what follows from constants alone are made again instead of held; so are comparisons of them.
* Matmuls run either as their operands are ready or one after the other; both schedules are looked at.
* Several stores of one stage run one after the other: what a later one uses again is held.
* Around a branch or a loop what lives through it is held, and in a loop what it carries.

Constants are fitted to kernels measured with libtpu 0.0.52 (jax 0.10.2) on v5e, v6e and tpu7x.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jax_vmem_guard.kernel_body import Op, Value
from jax_vmem_guard.matmul_pressure import MatmulShape, held_registers, matmul_shape
from jax_vmem_guard.vector_registers import (
    Vary,
    crosses_lanes,
    moves_between_registers,
    registers,
    vary_after_broadcast,
    vary_after_cast,
)

LOADS = ("vector.load", "tpu.vector_load", "tpu.strided_load", "memref.load")
STORES = ("tpu.vector_store", "vector.store", "tpu.strided_store", "memref.store")
_WAITS = ("vector.multi_reduction", "tpu.matmul", "tpu.transpose", "vector.transpose", "tpu.all_reduce",
          "tpu.reduce_index")
_DMA_WAITS = ("tpu.wait_dma2", "tpu.wait_dma", "tpu.wait_indirect_dma")
_ROTATES = ("tpu.dynamic_rotate", "tpu.rotate")
_CHEAP = frozenset(
    f"arith.{name}" for name in ("cmpi", "cmpf", "addi", "subi", "muli", "divsi", "remsi", "andi", "ori", "xori",
                                 "extui", "extsi", "trunci", "select"))

REGISTERS = 64
UNCHAINED_SHARE = 0.8
"""How far unrolled sub-blocks run ahead of each other: 0 is one matmul after the other, 1 all at once."""
WAITING_SHARE = 0.5
"""Part of a computed left side that waits while the matrix unit is busy."""
LONG_CHAIN = 8
"""Operations on a matmul's result from which on tpu7x the result waits whole."""
PILE_UP = {5: (0.055, -0.2), 6: (0.037, -0.2)}
"""By generation: part of a matmul's result that waits for each operation done on it, and without any.

Measured on bodies of one function between two matmuls: on v5e a polynomial of 16 operations holds the result once, an
exact division twice, an exponential a third of it; v6e holds two thirds of that, tpu7x a third."""
DIVISION = 24
"""Operations a division of whole arrays counts for up to v5."""
OVERLAP = 0.3
"""Part taken off what is held beyond two arrays at a time where no matmul paces the work."""


@dataclass(frozen=True, kw_only=True)
class HeldRegisters:
    """The most registers a body holds at once: expected, and at most."""

    expected: float
    at_most: float


def spill_slots(held: float) -> float:
    """Spill slots for so many registers held at once; fitted, since the allocator loses some and saves a few."""
    if held <= REGISTERS * 0.6:
        return 0
    return max(0.0, 1.14 * held - 16 - 50 * math.exp(-held / 128))


def held_by(ops: tuple[Op, ...], generation: int) -> HeldRegisters:
    """The registers a folded body (`kernel_fold.fold`) holds at once on a TPU generation."""
    together = _Schedule(ops, generation, chained=False).peak()
    chained = _Schedule(ops, generation, chained=True).peak()
    expected = chained if chained >= together else chained + UNCHAINED_SHARE * (together - chained)
    return HeldRegisters(expected=expected, at_most=max(together, chained))


class _Held:
    """A value that takes registers: how many, from which stage to which, and what made it."""

    __slots__ = ("registers", "ready", "last", "op")

    def __init__(self, count: int, ready: int, op: Op | None) -> None:
        self.registers = count
        self.ready = self.last = ready
        self.op = op


class _Seen:
    """What is known of a value: the stage it is ready in, what must be held for it, whether it can be made again."""

    __slots__ = ("ready", "held", "free", "constant", "vary")

    def __init__(self, ready: int, vary: Vary, held: tuple[_Held, ...] = (), free: bool = True,
                 constant: bool = False) -> None:
        self.ready = ready
        self.vary = vary
        self.held = held
        self.free = free
        self.constant = constant


class _Schedule:
    """One straight line of code: the stage of every operation, and what is held between stages."""

    def __init__(self, ops: tuple[Op, ...], generation: int, chained: bool, carried: Iterable[Value] = ()) -> None:
        self.ops = ops
        self.generation = generation
        self.chained = chained
        self.seen: dict[int, _Seen] = {}
        self.held: list[_Held] = []
        self.stage: list[int] = []
        self.users: dict[int, list[int]] = {}  # value -> positions of the operations that take it
        self.matmuls: list[tuple[int, float, Op]] = []
        self.carried = sum(self._hold(v, None, 0, (True,) * len(v.shape)).registers
                           for v in carried if v.shape is not None)
        next_matmul = 0
        for position, op in enumerate(ops):
            stage = max((self.seen[id(v)].ready for v in op.operands if id(v) in self.seen), default=0)
            if op.name == "tpu.matmul":
                if chained:
                    stage = max(stage, next_matmul)
                next_matmul = stage + 1
            elif op.name == "scf.yield":
                stage = max([stage, *(h.ready for h in self.held)])
            self.stage.append(stage)
            for v in op.operands:
                self.users.setdefault(id(v), []).append(position)
                if id(v) in self.seen:
                    for held in self.seen[id(v)].held:
                        held.last = max(held.last, stage)
            if op.name == "tpu.matmul":
                self._run_matmul(op, stage)
            for index, result in enumerate(op.results):
                self._make(op, index, result, stage)
        if generation >= 7:
            self._hold_results_of_long_chains()
        else:
            self._pile_up_results()
        self._hold_lane_rotates()
        self._delay_idle_reductions()

    # ---- values

    def _hold(self, value: Value, op: Op | None, ready: int, vary: Vary) -> _Held:
        held = _Held(registers(value.shape or (), value.dtype, vary), ready, op)
        self.held.append(held)
        self.seen[id(value)] = _Seen(ready, vary, (held,), free=False)
        return held

    def _make(self, op: Op, index: int, result: Value, stage: int) -> None:
        shape = result.shape
        if shape is None:
            self.seen[id(result)] = _Seen(stage, ())
            return
        sources = [self.seen[id(v)] for v in op.operands if v.shape is not None and id(v) in self.seen]
        varies = (True,) * len(shape)
        if op.name == "arith.constant":
            self.seen[id(result)] = _Seen(stage, (False,) * len(shape), constant=True)
        elif op.name == "tpu.iota" or op.name in LOADS:
            self.seen[id(result)] = _Seen(stage, varies, constant=op.name == "tpu.iota")
        elif self._is_view(op, sources):
            self.seen[id(result)] = self._view(op, index, shape, sources, stage)
        else:
            wait = _is_wait(op) or op.name == "vector.shape_cast" or crosses_lanes(op)
            if op.name not in _WAITS and sources and all(len(s.vary) == len(shape) for s in sources):
                varies = tuple(any(s.vary[axis] for s in sources) for axis in range(len(shape)))
            constant = op.name not in _WAITS and bool(sources) and all(s.constant for s in sources)
            if constant or (op.name in _CHEAP and sources and all(s.free for s in sources)):
                self.seen[id(result)] = _Seen(stage, varies, constant=constant)
            else:
                self._hold(result, op, stage + wait, varies)

    def _is_view(self, op: Op, sources: list[_Seen]) -> bool:
        """The result is the operand's registers, read in another way."""
        if op.name in ("vector.broadcast", "copy"):
            return True
        if op.name == "vector.shape_cast":
            return bool(sources) and not moves_between_registers(op.operands[0].shape or (), op.results[0].shape or ())
        if op.name == "tpu.concatenate":  # a value repeated along its lanes
            return bool(sources) and len({id(v) for v in op.operands}) == 1 and not crosses_lanes(op)
        return False

    def _view(self, op: Op, index: int, shape: tuple[int, ...], sources: list[_Seen], stage: int) -> _Seen:
        if op.name == "copy":
            return self.seen.get(id(op.operands[index])) or _Seen(stage, (True,) * len(shape))
        operand = op.operands[0].shape
        if operand is None or not sources:  # a scalar spread out
            return _Seen(stage, (operand is not None,) * len(shape), constant=operand is None)
        source = sources[0]
        if op.name == "vector.broadcast":
            vary = vary_after_broadcast(operand, source.vary, shape)
        elif op.name == "vector.shape_cast":
            vary = vary_after_cast(operand, source.vary, shape)
        else:
            repeated = op.detail.get("dimension", (-1,))[0]
            vary = tuple(v and axis != repeated for axis, v in enumerate(source.vary))
        return _Seen(stage, vary, source.held, source.free, source.constant)

    # ---- what is held longer than its uses say

    def _run_matmul(self, op: Op, stage: int) -> None:
        sizes: MatmulShape | None = matmul_shape(op)
        if sizes is None:
            return
        left = self.seen.get(id(op.operands[0]))
        computed = left is not None and not left.free
        held = held_registers(sizes, self.generation, computed)
        if computed and left is not None and stage > 0 and left.ready == stage:
            held = max(held, WAITING_SHARE * sizes.left_registers)
        self.matmuls.append((stage, held, op))

    def _hold_results_of_long_chains(self) -> None:
        for op in self.ops:
            if op.name == "tpu.matmul":
                for held in self.seen[id(op.results[0])].held:
                    if held.last == held.ready and self._chain_length(op.results[0]) >= LONG_CHAIN:
                        held.last = held.ready + 1

    def _pile_up_results(self) -> None:
        """The matrix units go on while the vector unit still works on their first results."""
        slope, start = PILE_UP[min(6, max(5, self.generation))]
        for op in self.ops:
            if op.name == "tpu.matmul":
                for held in self.seen[id(op.results[0])].held:
                    if held.last == held.ready:
                        share = min(2.0, max(0.0, start + slope * self._chain_length(op.results[0])))
                        self.matmuls.append((held.ready, share * held.registers, op))

    def _chain_length(self, value: Value) -> int:
        """Arithmetic on a value before it is reduced, multiplied as a matrix or stored; a division counts for many."""
        size = registers(value.shape or (), "f32")
        counted: set[int] = set()
        todo, length = [value], 0
        while todo:
            for position in self.users.get(id(todo.pop()), ()):
                op = self.ops[position]
                if position in counted or op.name in _WAITS or not op.results or op.results[0].shape is None:
                    continue
                counted.add(position)
                todo.append(op.results[0])
                moves = op.name in ("vector.shape_cast", "vector.broadcast", "arith.truncf", "arith.extf")
                if moves or registers(op.results[0].shape, "f32") < size:
                    continue
                divides = op.name == "arith.divf" and self.generation <= 5 and self._is_full(op.operands[1])
                length += DIVISION if divides else 1
        return length

    def _is_full(self, value: Value) -> bool:
        return id(value) in self.seen and all(self.seen[id(value)].vary) and not self.seen[id(value)].constant

    def _hold_lane_rotates(self) -> None:
        """Several rotations of one value along its lanes are all made before the first is used up."""
        rotates: dict[int, list[Op]] = {}
        for op in self.ops:
            if op.name in _ROTATES and op.detail.get("dimension", (None,))[0] == len(op.results[0].shape or ()) - 1:
                rotates.setdefault(id(op.operands[0]), []).append(op)
        for several in rotates.values():
            if len(several) > 1:
                for op in several:
                    for held in self.seen[id(op.results[0])].held:
                        held.last = max(held.last, held.ready + 1)

    def _delay_idle_reductions(self) -> None:
        """A reduction nobody waits for is done late, and its operand lives until then."""
        uses: dict[int, int] = {}
        for op in self.ops:
            for v in op.operands:
                for held in self.seen[id(v)].held if id(v) in self.seen else ():
                    uses[id(held)] = uses.get(id(held), 0) + 1
        for position in range(len(self.ops) - 1, -1, -1):
            op = self.ops[position]
            if op.name == "vector.multi_reduction" and _is_wait(op):
                needed = self._first_need(op.results[0])
                if needed is not None and needed - 1 > self.stage[position] and id(op.operands[0]) in self.seen:
                    for held in self.seen[id(op.operands[0])].held:
                        self._delay(held, needed, uses)

    def _first_need(self, value: Value) -> int | None:
        stages = []
        for position in self.users.get(id(value), ()):
            op = self.ops[position]
            if op.name in ("vector.shape_cast", "vector.broadcast"):
                stages.append(self._first_need(op.results[0]))
            else:
                stages.append(self.stage[position])
        return min((s for s in stages if s is not None), default=None)

    def _delay(self, held: _Held, until: int, uses: dict[int, int]) -> None:
        op = held.op
        if op is None or uses.get(id(held), 0) > 1 or op.name in _WAITS or held.last > until:
            held.last = max(held.last, until)
            return
        held.ready = held.last = until
        for v in op.operands:
            for source in self.seen[id(v)].held if id(v) in self.seen else ():
                self._delay(source, until, uses)

    # ---- peaks

    def peak(self) -> float:
        """The most registers held at once, regions inside included."""
        return max(self._between_stages(), self._between_stores(), self._in_matmuls(), self._around_regions(),
                   self.carried + min(self.carried, REGISTERS - 4))

    def _between_stages(self) -> float:
        live: dict[int, int] = {}
        largest: dict[int, int] = {}
        for held in self.held:
            for stage in range(held.ready, held.last):
                live[stage] = live.get(stage, 0) + held.registers
                largest[stage] = max(largest.get(stage, 0), held.registers)
        off = 0 if self.matmuls else OVERLAP
        return max((n - off * max(0, n - 2 * largest[stage]) for stage, n in live.items()), default=0)

    def _in_matmuls(self) -> float:
        return max((extra + sum(h.registers for h in self.held if h.ready <= stage < h.last and h.op is not op)
                    for stage, extra, op in self.matmuls if extra), default=0)

    def _between_stores(self) -> float:
        """What is made for one store and used again for a later one of the same stage."""
        by_stage: dict[int, list[Op]] = {}
        for position, op in enumerate(self.ops):
            if op.name in STORES:
                by_stage.setdefault(self.stage[position], []).append(op)
        made_by = {id(v): op for op in self.ops for v in op.results}
        most = 0
        for stage, stores in by_stage.items():
            if len(stores) < 2:
                continue
            spans: dict[int, tuple[_Held, int, int]] = {}
            done: set[int] = set()
            for number, store in enumerate(stores):
                todo = [v for v in store.operands if v.shape is not None]
                visited: set[int] = set()
                while todo:
                    value = todo.pop()
                    seen = self.seen.get(id(value))
                    if seen is None or id(value) in visited:
                        continue
                    visited.add(id(value))
                    for held in seen.held:
                        first = spans[id(held)][1] if id(held) in spans else number
                        spans[id(held)] = (held, first, number)
                    if seen.ready < stage or id(value) in done:
                        continue  # made in an earlier stage, or for an earlier store
                    done.add(id(value))
                    maker = made_by.get(id(value))
                    if maker is not None and not _is_wait(maker):
                        todo.extend(v for v in maker.operands if v.shape is not None)
            for number in range(len(stores) - 1):
                most = max(most, sum(h.registers for h, first, last in spans.values()
                                     if first <= number < last and h.ready <= stage))
        return most

    def _around_regions(self) -> float:
        """What lives through branches, loops and waits for a DMA (across these loads are held too)."""
        last_use = {value: positions[-1] for value, positions in self.users.items()}
        most = 0.0
        places = [p for p, op in enumerate(self.ops) if op.blocks or op.name in _DMA_WAITS]
        if not places:
            return 0
        spans = [
            (position, last_use.get(id(v), -1), v, op) for position, op in enumerate(self.ops) for v in op.results
            if v.shape is not None
        ]
        for place in places:
            op = self.ops[place]
            through = 0
            counted: set[int] = set()
            for made, used, value, maker in spans:
                if not made < place < used:
                    continue
                held = self.seen[id(value)].held
                for h in held:
                    if id(h) not in counted:
                        counted.add(id(h))
                        through += h.registers
                if not held and maker.name in LOADS and not op.blocks:
                    through += registers(value.shape or (), value.dtype)
            inside = max((_Schedule(block, self.generation, self.chained, arguments).peak()
                          for block, arguments in zip(op.blocks, op.arguments, strict=True)), default=0)
            most = max(most, through + inside)
        return most


def _is_wait(op: Op) -> bool:
    """Whether the result is there only when all of the operand is: reductions over leading dimensions stream."""
    if op.name == "vector.multi_reduction":
        rank = len(op.operands[0].shape or ())
        return any(axis >= rank - 2 for axis in op.detail.get("reduction_dims", ()))
    return op.name in _WAITS
