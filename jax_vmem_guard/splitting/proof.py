"""The proof: which values a step of the split grid needs, and under which labels.

The kernel is read backwards. A store into a reference that is split needs its value in parts; the rules say what that
asks of the operands; and so on to the reads, where it becomes a claim about a reference. Conditions, indices, loop
bounds and whatever is stored into an unsplit reference are needed whole. Every need is met or the split is refused.

What follows from a proof, by induction over equations (the rules), over loop iterations (a carried value has one label
before and after) and over grid steps (`entry`): in the step (a, j) every needed value is the whole or the j-th part of
the value in step a of the original, so every store writes the j-th part of what the original writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting import chunks, frames, memory, rules
from jax_vmem_guard.splitting.errors import Refused
from jax_vmem_guard.splitting.frames import Frame, RefId
from jax_vmem_guard.splitting.needs import Needs
from jax_vmem_guard.splitting.ways import Label, Question, Way


def prove(root: Frame, allowed: Mapping[RefId, frozenset[Label]], order: Sequence[RefId], parts: int,
          names: Mapping[RefId, str]) -> Needs:
    """Finds labels for the references under which every need is met.

    Args:
      root: frames of the kernel.
      allowed: the labels each of the kernel's operands may have.
      order: the operands whose label nothing but a store may settle, in the order to try them.
      parts: k.
      names: what to call the operands, with what keeps one whole where something does: for reasons.

    Raises:
      Refused: with the first need that could not be met.
    """
    state = _State(root, allowed, parts, names)
    state.start()
    return _settle(state, order).result()


def _settle(state: _State, order: Sequence[RefId]) -> _State:
    """Gives labels to references that nothing has settled yet: those that are only written, trying the whole first;
    then those only read chunk by chunk, trying parts first where the loop runs over one part."""
    state.run()
    candidates = state.undecided(order)
    if not candidates:
        state.finish()
        return state
    ref, labels, why = candidates
    refusal = None
    for label in labels:
        trial = state.copy()
        try:
            trial.set_label(ref, label, why)
            return _settle(trial, order)
        except Refused as error:
            refusal = refusal or error
    raise refusal or Refused(f"no label is possible for {state.names.get(ref)}")


class _State:
    def __init__(self, root: Frame, allowed: Mapping[RefId, frozenset[Label]], parts: int,
                 names: Mapping[RefId, str]) -> None:
        self.root, self.allowed, self.parts, self.names = root, dict(allowed), parts, names
        self.labels: dict[RefId, Label] = {}
        self.pending: dict[RefId, list[tuple[Frame, int]]] = {}
        self.values: dict[tuple[int, Any], list[Label]] = {}
        self.ways: dict[tuple[int, int, int, int], Way] = {}
        self.queue: deque[tuple[Frame, Any, Label]] = deque()
        self.chunked: dict[int, Frame] = {}
        self.deferred: dict[RefId, list[tuple[Frame, memory.Access]]] = {}

    def copy(self) -> _State:
        other = _State(self.root, self.allowed, self.parts, self.names)
        other.labels, other.ways, other.queue = dict(self.labels), dict(self.ways), deque(self.queue)
        other.pending = {ref: list(stores) for ref, stores in self.pending.items()}
        other.values = {value: list(labels) for value, labels in self.values.items()}
        other.chunked = dict(self.chunked)
        other.deferred = {ref: list(loads) for ref, loads in self.deferred.items()}
        return other

    def undecided(self, order: Sequence[RefId]) -> tuple[RefId, list[Label], str] | None:
        """The next reference to settle, with the labels to try and why."""
        written = [r for r in self.pending if r not in self.labels]
        if written:
            ref = min(written, key=lambda r: order.index(r) if r in order else len(order))
            return ref, sorted(self.allowed_labels(ref), key=lambda d: -1 if d is None else d), "it is only written"
        for ref, loads in self.deferred.items():
            if ref not in self.labels:
                found = [(d, chunks.find(frame, acc, d)) for frame, acc in loads for d in self.allowed_labels(ref)
                         if d is not None]
                cut: list[Label] = [d for d, chunk in found if chunk and chunk.loop.number in self.chunked]
                return ref, [*cut[:1], None], "it is read chunk by chunk"
        return None

    def finish(self) -> None:
        """What can only be checked when every label is known."""
        for loop in self.chunked.values():
            chunks.check(loop, self.labels, self.values, self.parts)

    def result(self) -> Needs:
        return Needs(root=self.root, parts=self.parts, labels=self.labels, ways=self.ways,
                     chunked=frozenset(self.chunked), values={value: tuple(labels) for value, labels in self.values.items()})

    # -- roots of the need: effects

    def start(self) -> None:
        for ref, labels in self.allowed.items():
            if len(labels) == 1:
                self.labels[ref] = next(iter(labels))
        for frame in self.root.walk():
            for index, eqn in enumerate(frame.jaxpr.eqns):
                self._effect(frame, index, eqn)

    def _effect(self, frame: Frame, index: int, eqn: Any) -> None:
        if index in frame.controls:
            if any(_has_stores(child) for child in frame.children[index]):
                self._need_control(frame, index)
            return
        acc = memory.access(eqn)
        if acc is None:
            if not rules.known(eqn.primitive.name):
                raise Refused(f"`{eqn.primitive.name}` has no rule")
            return
        if acc.stores:
            ref = frames.resolve_ref(frame, acc.ref)
            if ref[0] == "operand" and ref not in self.allowed:
                raise Refused("a store into an input")
            if ref in self.labels:
                self._need_store(frame, index)
            self.pending.setdefault(ref, []).append((frame, index))

    def _need_control(self, frame: Frame, index: int) -> None:
        """What decides whether and how often the bodies run is needed whole."""
        control, eqn = frame.controls[index], frame.jaxpr.eqns[index]
        if control.kind == "cond":
            self.need(frame, eqn.invars[0], None)
        if control.kind == "while":
            condition = frame.children[index][0]
            self.need(condition, condition.jaxpr.outvars[0], None)

    def _need_store(self, frame: Frame, index: int) -> None:
        acc = memory.access(frame.jaxpr.eqns[index])
        assert acc is not None
        label = self.labels[frames.resolve_ref(frame, acc.ref)]
        part = None if label is None or self._chunk(frame, acc, label) else memory.value_dim(acc, label)
        self.need(frame, acc.value, part)
        if acc.mask is not None:
            self.need(frame, acc.mask, part)
        for atom in acc.indices:
            self.need(frame, atom, None)

    def _chunk(self, frame: Frame, acc: memory.Access, dim: int) -> bool:
        """Whether the access is to a chunk of the split dimension; then its loop runs over one part only."""
        chunk = chunks.find(frame, acc, dim)
        if chunk is not None:
            self.chunked[chunk.loop.number] = chunk.loop
        return chunk is not None

    # -- labels of references

    def allowed_labels(self, ref: RefId) -> frozenset[Label]:
        if ref[0] == "operand":
            return self.allowed[ref]
        frame = next(f for f in self.root.walk() if f.number == ref[1])
        aval = frame.jaxpr.invars[ref[2]].aval
        if jp.memory_space(aval) not in ("vmem", "default"):
            return frozenset([None])
        return frozenset([None, *(d for d, size in enumerate(aval.shape) if size % self.parts == 0 and size > 1)])

    def set_label(self, ref: RefId, label: Label, why: str) -> None:
        if ref in self.labels:
            if self.labels[ref] != label:
                raise Refused(f"{self.names.get(ref, 'a scoped buffer')} is {_in(self.labels[ref])}, but {why} {_in(label)}")
            return
        if label not in self.allowed_labels(ref):
            raise Refused(f"{self.names.get(ref, 'a scoped buffer')} cannot be {_in(label)}; {why} so")
        self.labels[ref] = label
        for frame, index in self.pending.get(ref, ()):
            self._need_store(frame, index)
        for frame, acc in self.deferred.pop(ref, ()):
            self._read_whole(frame, acc, ref)

    def _read_whole(self, frame: Frame, acc: memory.Access, ref: RefId) -> None:
        """What the access reads is needed as it is: all of it from a whole buffer, or one chunk of a split one."""
        label = self.labels.get(ref)
        if ref in self.labels and label is not None and self._chunk(frame, acc, label):
            return
        dims = range(len(getattr(acc.ref.aval, "shape", ())))
        if ref not in self.labels and any(chunks.find(frame, acc, d) for d in dims):
            self.deferred.setdefault(ref, []).append((frame, acc))
        else:
            self.set_label(ref, None, "a read needs it")

    # -- values

    def need(self, frame: Frame, atom: Any, label: Label) -> None:
        if jp.is_literal(atom):
            if label is not None:
                raise Refused("a constant cannot be had in parts")
            return
        if label is not None and atom.aval.shape[label] % self.parts:
            raise Refused(f"a value of shape {tuple(atom.aval.shape)} does not divide by {self.parts} along "
                          f"dimension {label}")
        known = self.values.setdefault((frame.number, atom), [])
        if label not in known:
            known.append(label)
            self.queue.append((frame, atom, label))

    def run(self) -> None:
        while self.queue:
            frame, atom, label = self.queue.popleft()
            if atom in frame.sources:
                self._input(frame, atom, label)
                continue
            index, position = frame.definitions[atom]
            if index in frame.controls:
                self._control_output(frame, index, position, label)
            else:
                self._equation(frame, index, position, label)

    def _input(self, frame: Frame, var: Any, label: Label) -> None:
        kind, value = frame.sources[var]
        if kind == "outer":
            assert frame.parent is not None
            self.need(frame.parent, value, label)
        elif kind == "carry":
            assert frame.parent is not None
            loop = frame.parent.controls[frame.eqn_index]
            eqn = frame.parent.jaxpr.eqns[frame.eqn_index]
            self.need(frame.parent, eqn.invars[loop.init[value]], label)
            body = frame.parent.children[frame.eqn_index][-1]
            self.need(body, body.jaxpr.outvars[value], label)
            for other in frame.parent.children[frame.eqn_index]:
                self._same_carry(other, value, label)
            self._need_control(frame.parent, frame.eqn_index)
        elif kind == "xs":
            assert frame.parent is not None
            self.need(frame.parent, value, None if label is None else label + 1)
        elif kind == "const":
            if label is not None:
                raise Refused("a constant cannot be had in parts")
        else:
            raise Refused(f"a reference is used as a value ({kind})")

    def _same_carry(self, frame: Frame, position: int, label: Label) -> None:
        """A carried value has the same labels in the condition, in the body and outside."""
        for var, source in frame.sources.items():
            if source == ("carry", position):
                self.need(frame, var, label)

    def _control_output(self, frame: Frame, index: int, position: int, label: Label) -> None:
        control, bodies = frame.controls[index], frame.children[index]
        self._need_control(frame, index)
        if control.kind in ("call", "cond", "scoped"):
            for body in bodies:
                self.need(body, body.jaxpr.outvars[position], label)
        elif position < control.num_carry:
            eqn, body = frame.jaxpr.eqns[index], bodies[-1]
            self.need(frame, eqn.invars[control.init[position]], label)
            self.need(body, body.jaxpr.outvars[position], label)
            for child in bodies:
                self._same_carry(child, position, label)
        else:
            if label == 0:
                raise Refused("`scan` stacks its results along the split dimension")
            body = bodies[0]
            self.need(body, body.jaxpr.outvars[position], None if label is None else label - 1)

    def _equation(self, frame: Frame, index: int, position: int, label: Label) -> None:
        eqn = frame.jaxpr.eqns[index]
        acc = memory.access(eqn)
        if acc is not None:
            self._loaded(frame, acc, label)
            return
        if label is None:
            for atom in eqn.invars:
                self.need(frame, atom, None)
            return
        way = rules.answer(Question(eqn=eqn, out=position, dim=label, parts=self.parts))
        self.ways[frame.number, index, position, label] = way
        for atom, wanted in zip(eqn.invars, way.labels, strict=True):
            self.need(frame, atom, wanted)

    def _loaded(self, frame: Frame, acc: memory.Access, label: Label) -> None:
        ref = frames.resolve_ref(frame, acc.ref)
        if label is None:
            self._read_whole(frame, acc, ref)
        else:
            self.set_label(ref, memory.ref_dim(acc, label), "a read needs it")
        for atom in (acc.mask, acc.other):
            if atom is not None:
                self.need(frame, atom, None if not atom.aval.shape else label)
        for atom in acc.indices:
            self.need(frame, atom, None)


def _has_stores(frame: Frame) -> bool:
    return any(eqn.primitive.name in memory.STORES for f in frame.walk() for eqn in f.jaxpr.eqns)


def _in(label: Label) -> str:
    return "whole" if label is None else f"in parts along dimension {label}"
