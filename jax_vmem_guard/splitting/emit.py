"""Traces the split kernel: exactly the needed values, under the labels they are needed under, in the original order.

Nothing is copied and then cleaned up: what was not asked for is not emitted, and every effect is emitted once. Control
flow is traced again through JAX's own functions, so that effects, constants and carried values are laid out as the
JAX version in use wants them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting import chunks, frames, memory
from jax_vmem_guard.splitting.frames import Frame, RefId
from jax_vmem_guard.splitting.needs import Needs
from jax_vmem_guard.splitting.ways import Label, Way

Wanted = tuple[int, Label]


@dataclass
class Emitter:
    """Emits the frames of one kernel, under a trace.

    Attributes:
      needs: the proof.
      axis: the split axis as `program_id` numbers it.
      steps: how many programs the original had along it.
      coarse, sub: scalars: the original grid index, and which of its k parts this step is.
      refs: the references, by buffer.
    """

    needs: Needs
    axis: int
    steps: int
    coarse: Any
    sub: Any
    refs: dict[RefId, Any]
    env: dict[tuple[int, Any, Label], Any] = field(default_factory=dict)
    local: dict[int, Any] = field(default_factory=dict)  # counters of chunk loops, counted within the part

    def read(self, frame: Frame, atom: Any, label: Label) -> Any:
        if jp.is_literal(atom):
            return np.asarray(atom.val, atom.aval.dtype)[()] if atom.aval.shape == () else atom.val
        source = frame.sources.get(atom)
        if source is not None and source[0] == "outer":
            assert frame.parent is not None
            return self.read(frame.parent, source[1], label)
        if source is not None and source[0] == "const":
            return source[1]
        return self.env[frame.number, atom, label]

    def write(self, frame: Frame, var: Any, label: Label, value: Any) -> None:
        self.env[frame.number, var, label] = value

    def frame(self, frame: Frame) -> None:
        for index, eqn in enumerate(frame.jaxpr.eqns):
            if index in frame.controls:
                self._control(frame, index)
                continue
            acc = memory.access(eqn)
            if acc is not None:
                self._access(frame, acc)
                continue
            done: set[Label] = set()
            for position, var in enumerate(eqn.outvars):
                for label in self.needs.of(frame, var):
                    if label not in done:
                        self._equation(frame, index, position, label)
                        done.add(label)

    # -- plain equations

    def _equation(self, frame: Frame, index: int, position: int, label: Label) -> None:
        eqn = frame.jaxpr.eqns[index]
        name = eqn.primitive.name
        if name in ("program_id", "num_programs") and eqn.params["axis"] == self.axis:
            value = self.coarse if name == "program_id" else np.int32(self.steps)
            self.write(frame, eqn.outvars[0], label, value)
            return
        way = Way(labels=(None,) * len(eqn.invars), params=eqn.params) if label is None else \
            self.needs.ways[frame.number, index, position, label]
        if way.offset_dim is not None:
            self.write(frame, eqn.outvars[0], label, self._iota(eqn, way.params, way.offset_dim))
            return
        values = [self.read(frame, v, wanted) for v, wanted in zip(eqn.invars, way.labels, strict=True)]
        for var, out in zip(eqn.outvars, jp.bind(eqn, values, dict(way.params)), strict=True):
            self.write(frame, var, label, out)

    def _iota(self, eqn: Any, params: Any, dim: int) -> Any:
        """A part of an iota. The offset is added in int32: a narrow type need not hold the numbers in between."""
        dtype = params["dtype"]
        small = jp.bind(eqn, [], {**params, "dtype": np.dtype(np.int32)})[0]
        offset = lax.mul(self.sub, np.int32(params["shape"][dim]))
        moved = lax.add(small, lax.broadcast_in_dim(offset, params["shape"], ()))
        return moved if dtype == np.int32 else lax.convert_element_type(moved, dtype)

    # -- memory

    def _access(self, frame: Frame, acc: memory.Access) -> None:
        out = acc.eqn.outvars[0] if acc.eqn.outvars else None
        wanted = self.needs.of(frame, out) if out is not None else ()
        if not acc.stores and not wanted:
            return
        ref_id = frames.resolve_ref(frame, acc.ref)
        label = self.needs.labels[ref_id]
        chunk = None if label is None else chunks.find(frame, acc, label)
        part = None if label is None or chunk is not None else memory.value_dim(acc, label)
        value = None if acc.value is None else self.read(frame, acc.value, part)
        mask, other = (None if v is None else self.read(frame, v, part if v.aval.shape else None)
                       for v in (acc.mask, acc.other))
        transforms = self._whole(frame, acc.transforms)
        if chunk is not None and label is not None:
            start = lax.mul(self.local[chunk.loop.number], np.int32(chunk.size))
            (indexer,) = transforms
            transforms = (jp.reslice(indexer, label, start, chunk.size, indexer.shape[label] // self.needs.parts),)
        else:
            transforms = memory.shrink(acc, transforms, label, self.needs.parts)
        outs = memory.bind(acc, self.refs[ref_id], transforms, value, mask, other)
        for one in wanted:
            self.write(frame, out, one, outs[0])

    def _whole(self, frame: Frame, transforms: tuple[Any, ...]) -> tuple[Any, ...]:
        return jax.tree_util.tree_map(
            lambda leaf: self.read(frame, leaf, None) if hasattr(leaf, "aval") else leaf, transforms)

    # -- control flow

    def _wanted(self, frame: Frame, eqn: Any) -> list[Wanted]:
        return [(i, label) for i, var in enumerate(eqn.outvars) for label in self.needs.of(frame, var)]

    def _control(self, frame: Frame, index: int) -> None:
        control, bodies = frame.controls[index], frame.children[index]
        eqn = frame.jaxpr.eqns[index]
        wanted = self._wanted(frame, eqn)
        if not wanted and not any(self._has_effect(body) for body in bodies):
            return
        emit = {"call": self._call, "cond": self._cond, "scan": self._scan, "while": self._while,
                "scoped": self._scoped}[control.kind]
        for (position, label), value in zip(wanted, emit(frame, eqn, control, bodies, wanted), strict=True):
            self.write(frame, eqn.outvars[position], label, value)

    def _has_effect(self, frame: Frame) -> bool:
        return any(eqn.primitive.name in memory.STORES for f in frame.walk() for eqn in f.jaxpr.eqns)

    def _run(self, body: Frame, wanted: Sequence[Wanted]) -> list[Any]:
        self.frame(body)
        return [self.read(body, body.jaxpr.outvars[i], label) for i, label in wanted]

    def _call(self, frame: Frame, eqn: Any, control: jp.Control, bodies: tuple[Frame, ...],
              wanted: list[Wanted]) -> list[Any]:
        return self._run(bodies[0], wanted)

    def _cond(self, frame: Frame, eqn: Any, control: jp.Control, bodies: tuple[Frame, ...],
              wanted: list[Wanted]) -> list[Any]:
        index = self.read(frame, eqn.invars[0], None)
        branches = [lambda body=body: self._run(body, wanted) for body in bodies]
        if len(branches) == 1:
            return branches[0]()
        if len(branches) == 2:
            return list(lax.cond(index != 0, branches[1], branches[0]))
        return list(lax.switch(index, branches))

    def _carry(self, body: Frame, control: jp.Control) -> list[Wanted]:
        """The carried values that are needed, each under its labels."""
        found = []
        for i in range(control.num_carry):
            out = body.jaxpr.outvars[i]
            labels = {source: self.needs.of(body, var) for var, source in body.sources.items()}
            needed = list(labels.get(("carry", i), ()))
            if not jp.is_literal(out):
                needed += [label for label in self.needs.of(body, out) if label not in needed]
            found += [(i, label) for label in needed]
        return found

    def _enter(self, frame: Frame, body: Frame, carry: list[Wanted], values: Sequence[Any]) -> None:
        variables = {source: var for var, source in body.sources.items() if source[0] == "carry"}
        for (i, label), value in zip(carry, values, strict=True):
            if ("carry", i) in variables:
                self.write(body, variables["carry", i], label, value)

    def _init(self, frame: Frame, eqn: Any, control: jp.Control, carry: list[Wanted]) -> tuple[Any, ...]:
        return tuple(self.read(frame, eqn.invars[control.init[i]], label) for i, label in carry)

    def _scan(self, frame: Frame, eqn: Any, control: jp.Control, bodies: tuple[Frame, ...],
              wanted: list[Wanted]) -> list[Any]:
        body = bodies[0]
        if body.number in self.needs.chunked:
            return self._chunks(body, control)
        carry = self._loop_carry(body, control, wanted)
        stacked = [(i, label) for i, label in wanted if i >= control.num_carry]
        inner = [(i, None if label is None else label - 1) for i, label in stacked]
        xs_vars = [(var, atom, label) for var, (kind, atom) in body.sources.items() if kind == "xs"
                   for label in self.needs.of(body, var)]
        xs = [self.read(frame, atom, None if label is None else label + 1) for _, atom, label in xs_vars]

        def step(values: Any, x: Any) -> Any:
            self._enter(frame, body, carry, values)
            for (var, _, label), one in zip(xs_vars, x, strict=True):
                self.write(body, var, label, one)
            outs = self._run(body, [*carry, *inner])
            return tuple(outs[:len(carry)]), tuple(outs[len(carry):])

        last, ys = lax.scan(step, self._init(frame, eqn, control, carry), tuple(xs), length=control.length,
                            reverse=control.reverse, unroll=control.unroll)
        results = {**dict(zip(carry, last, strict=True)), **dict(zip(stacked, ys, strict=True))}
        return [results[w] for w in wanted]

    def _chunks(self, body: Frame, control: jp.Control) -> list[Any]:
        """A loop over the chunks of this part. Its counter is the one of the original, save where chunks are."""
        length = control.length // self.needs.parts
        moved = lax.mul(self.sub, np.int32(length))
        (counter,) = (var for var, source in body.sources.items() if source == ("carry", 0))

        def step(i: Any, _: None) -> tuple[Any, None]:
            self.local[body.number] = i
            self.write(body, counter, None, lax.add(i, moved))
            self.frame(body)
            return lax.add(i, np.int32(1)), None

        unroll = control.unroll if isinstance(control.unroll, bool) else min(control.unroll, length)
        lax.scan(step, np.int32(0), None, length=length, unroll=unroll)
        return []

    def _loop_carry(self, body: Frame, control: jp.Control, wanted: list[Wanted]) -> list[Wanted]:
        carry = self._carry(body, control)
        return carry + [w for w in wanted if w[0] < control.num_carry and w not in carry]

    def _while(self, frame: Frame, eqn: Any, control: jp.Control, bodies: tuple[Frame, ...],
               wanted: list[Wanted]) -> list[Any]:
        condition, body = bodies
        carry = self._loop_carry(body, control, wanted)
        carry += [w for w in self._inputs(condition) if w not in carry]

        def going(values: Any) -> Any:
            self._enter(frame, condition, carry, values)
            return self._run(condition, [(0, None)])[0]

        def step(values: Any) -> Any:
            self._enter(frame, body, carry, values)
            return tuple(self._run(body, carry))

        last = dict(zip(carry, lax.while_loop(going, step, self._init(frame, eqn, control, carry)), strict=True))
        return [last[w] for w in wanted]

    def _inputs(self, frame: Frame) -> list[Wanted]:
        return [(i, label) for var, (kind, i) in frame.sources.items() if kind == "carry"
                for label in self.needs.of(frame, var)]

    def _scoped(self, frame: Frame, eqn: Any, control: jp.Control, bodies: tuple[Frame, ...],
                wanted: list[Wanted]) -> list[Any]:
        body = bodies[0]
        avals = []
        for i, var in enumerate(body.jaxpr.invars):
            label = self.needs.labels.get(("scoped", body.number, i))
            shape = [s // self.needs.parts if d == label else s for d, s in enumerate(getattr(var.aval, "shape", ()))]
            avals.append(var.aval if label is None else jp.resize_ref(var.aval, shape))

        def run(*refs: Any) -> Any:
            for i, ref in enumerate(refs):
                self.refs["scoped", body.number, i] = ref
            return tuple(self._run(body, wanted))

        return list(jp.run_scoped(run, avals))
