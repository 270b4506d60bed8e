"""Loops over chunks of a split dimension.

    for i in range(L): out[i*c : i*c + c] += f(x[i*c : i*c + c], i, ...)          with L * c the size of the dimension

Such a loop touches chunk i of every split buffer in iteration i and nothing else of it, so part j of the buffers only
needs iterations j*L/k .. (j+1)*L/k - 1. It then runs L/k times; its counter, wherever it is not the place of a chunk,
is moved by j*L/k.

Conditions, checked for the whole loop body: the counter starts at 0, goes up by 1 and is all the loop carries; every
access to a split buffer is at the chunk of the counter; no buffer that stays whole is written; k divides L.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting import frames, memory
from jax_vmem_guard.splitting.errors import Refused
from jax_vmem_guard.splitting.frames import Frame, RefId
from jax_vmem_guard.splitting.ways import Label


@dataclass(frozen=True)
class Chunk:
    """An access to `size` elements at `counter * size`, where `counter` counts the iterations of `loop`."""

    loop: Frame
    size: int


def find(frame: Frame, acc: memory.Access, dim: int) -> Chunk | None:
    """The chunk of the reference's dimension `dim` that the access is to, or None where it is no chunk."""
    plain = jp.indexers(acc.transforms)
    if plain is None or len(plain) != 1 or plain[0].int_indexer_shape != ():
        return None
    index, extent = plain[0].indices[dim], plain[0].shape[dim]
    if not jp.is_slice(index) or index.stride != 1 or not isinstance(index.size, int):
        return None
    if memory.takes_all(index, extent) or not hasattr(index.start, "aval"):
        return None
    found = _counter(frame, index.start)
    if found is None or found[1] != index.size:
        return None
    loop, size = found
    return Chunk(loop, size) if control_of(loop).length * size == extent else None


def control_of(loop: Frame) -> jp.Control:
    """The loop that the frame is the body of."""
    assert loop.parent is not None
    return loop.parent.controls[loop.eqn_index]


def _counter(frame: Frame, atom: Any) -> tuple[Frame, int] | None:
    """(loop, c) where the value is c times the loop's counter."""
    times = 1
    while not jp.is_literal(atom):
        source = frame.sources.get(atom)
        if source is not None:
            if source[0] == "outer" and frame.parent is not None:
                frame, atom = frame.parent, source[1]
                continue
            return (frame, times) if source[0] == "carry" and _counts(frame, source[1]) else None
        eqn = frame.jaxpr.eqns[frame.definitions[atom][0]]
        name = eqn.primitive.name
        if name == "multiple_of" or (name == "convert_element_type" and atom.aval.dtype == np.int32):
            atom = eqn.invars[0]
        elif name == "mul" and jp.is_literal(eqn.invars[1]):
            times, atom = times * int(eqn.invars[1].val), eqn.invars[0]
        elif name == "mul" and jp.is_literal(eqn.invars[0]):
            times, atom = times * int(eqn.invars[0].val), eqn.invars[1]
        else:
            return None
    return None


def _counts(loop: Frame, position: int) -> bool:
    """Whether the carried value is 0, 1, 2, ... in the iterations of a scan."""
    if loop.role != "scan" or loop.parent is None:
        return False
    control = control_of(loop)
    start = loop.outer(control.init[position])
    if control.reverse or not jp.is_literal(start) or int(start.val) != 0:
        return False
    out = loop.jaxpr.outvars[position]
    if jp.is_literal(out) or out not in loop.definitions:
        return False
    step = loop.jaxpr.eqns[loop.definitions[out][0]]
    counter = next((v for v, source in loop.sources.items() if source == ("carry", position)), None)
    return (step.primitive.name == "add" and step.invars[0] is counter and jp.is_literal(step.invars[1])
            and int(step.invars[1].val) == 1)


def check(loop: Frame, labels: Mapping[RefId, Label], values: Mapping[tuple[int, Any], list[Label]], parts: int) -> None:
    """Raises `Refused` unless the loop may run over the chunks of one part only."""
    control = control_of(loop)
    if control.length % parts:
        raise Refused(f"a loop over {control.length} chunks of the split dimension does not divide by {parts}")
    if control.num_carry != 1 or len(loop.jaxpr.outvars) != 1:
        raise Refused("a loop over chunks of the split dimension carries values from chunk to chunk")
    assert loop.parent is not None
    out = loop.parent.jaxpr.eqns[loop.eqn_index].outvars[0]
    if (loop.parent.number, out) in values:
        raise Refused("the counter of a loop over chunks is used after the loop")
    inside = {frame.number for frame in loop.walk()}
    for frame in loop.walk():
        for index, eqn in enumerate(frame.jaxpr.eqns):
            acc = memory.access(eqn)
            if acc is None or index in frame.controls:
                continue
            ref = frames.resolve_ref(frame, acc.ref)
            if ref[0] == "scoped" and ref[1] in inside:
                continue
            if not acc.stores and not any((frame.number, v) in values for v in eqn.outvars):
                continue
            label = labels.get(ref)
            if label is None:
                if acc.stores:
                    raise Refused("a loop over chunks of the split dimension writes a buffer that stays whole")
                continue
            chunk = find(frame, acc, label)
            if chunk is None or chunk.loop is not loop:
                raise Refused("a loop over chunks of the split dimension touches other chunks than its own")
    for (number, _), wanted in values.items():
        if number in inside and any(label is not None for label in wanted):
            raise Refused("a loop over chunks of the split dimension needs a value in parts")
