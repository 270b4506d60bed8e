"""Numbers of what control flow gives and does: conditions, loops, nested functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting import frames, memory
from jax_vmem_guard.splitting.errors import Refused
from jax_vmem_guard.splitting.frames import Frame, RefId

if TYPE_CHECKING:
    from jax_vmem_guard.splitting.numbering import Numbering

#: Times a loop is read to tell carried values apart that start alike.
STAGES = 6


def control(numbering: Numbering, frame: Frame, index: int) -> list[int]:
    """The numbers of a control-flow equation's results; what it does to buffers goes into `numbering.held`."""
    control, bodies = frame.controls[index], frame.children[index]
    if control.kind == "cond":
        return _cond(numbering, frame, index, bodies)
    if control.kind in ("scan", "while"):
        return _loop(numbering, frame, index, control, bodies)
    body = bodies[0]
    if control.kind == "scoped":
        for i, var in enumerate(body.jaxpr.invars):
            dtype = str(getattr(var.aval, "dtype", ""))
            numbering.held["scoped", body.number, i] = numbering.table.number(("fresh", i, dtype))
    numbering.frame(body)
    return [numbering.read(body, v) for v in body.jaxpr.outvars]


def _cond(numbering: Numbering, frame: Frame, index: int, bodies: tuple[Frame, ...]) -> list[int]:
    choice = _choice(numbering, numbering.read(frame, frame.jaxpr.eqns[index].invars[0]), len(bodies))
    start, ends, outs = dict(numbering.held), [], []
    for body in bodies:
        numbering.held = dict(start)
        numbering.frame(body)
        ends.append(numbering.held)
        outs.append([numbering.read(body, v) for v in body.jaxpr.outvars])
    numbering.held = dict(start)
    for ref, old in start.items():
        if any(end[ref] != old for end in ends):
            numbering.held[ref] = numbering.table.number(("cond",), choice, *(end[ref] for end in ends))
    return [numbering.table.number(("cond",), choice, *alternatives) for alternatives in zip(*outs, strict=True)]


def _choice(numbering: Numbering, number: int, branches: int) -> int:
    """The condition without what JAX wraps around it."""
    while True:
        head, args = numbering.table.terms[number]
        zeros = (numbering.literal(0, np.int32), numbering.literal(0, bool))
        truth = head[0] == "convert" and head[1] in ("int32", "bool")
        if truth or (branches == 2 and head[0] == "ne" and args[1] in zeros):
            number = args[0]
        elif head[0] == "clamp" and _clamped(numbering, args):
            number = args[1]
        else:
            return number


def _clamped(numbering: Numbering, args: tuple[Any, ...]) -> bool:
    """Whether the clamped value was clamped to the same bounds before."""
    head, before = numbering.table.terms[args[1]]
    return head[0] == "clamp" and (before[0], before[2]) == (args[0], args[2])


def _loop(numbering: Numbering, frame: Frame, index: int, control: jp.Control, bodies: tuple[Frame, ...]) -> list[int]:
    """A loop is the number of what it does to an unknown iteration, for each carried value and buffer.

    Carried values that start alike are one symbol until they are seen to go on differently; so a value that the
    rebuilt kernel carries twice, whole and in parts, is one value here.
    """
    eqn, body = frame.jaxpr.eqns[index], bodies[-1]
    start = dict(numbering.held)
    init = [numbering.read(frame, eqn.invars[p]) for p in control.init]
    length = control.length
    if control.kind == "scan" and _over_chunks(numbering, frame, body, control):
        length *= numbering.parts
    classes = [-1] * control.num_carry
    for stage in range(STAGES):
        symbols: dict[Any, int] = {
            i: n if _passes_through(body, i) else numbering.table.symbol(("carry",), n, classes[i])
            for i, n in enumerate(init)}
        if length != control.length:
            local = numbering.table.symbol(("counter in a part",), symbols[0])
            numbering.local[local] = (symbols[0], control.length)
            symbols[0] = local
        changed, condition, outs = _iteration(numbering, frame, bodies, symbols, start)
        groups: dict[int, set[int]] = {}
        for i in range(control.num_carry):
            groups.setdefault(symbols[i], set()).add(outs[i])
        if stage and all(len(group) == 1 for group in groups.values()):
            break
        classes = [numbering.table.number(("class",), classes[i], outs[i]) for i in range(control.num_carry)]
    else:
        raise Refused("a loop carries values that could not be told apart")
    symbols |= {i: numbering.local[n][0] for i, n in symbols.items() if n in numbering.local}
    becomes = {symbols[i]: (init[i], outs[i]) for i in range(control.num_carry) if not _passes_through(body, i)}
    becomes |= {symbols[ref]: (start[ref], numbering.held[ref]) for ref in changed}
    head = (control.kind, length, control.reverse)

    def finish(number: int, what: str) -> int:
        pieces = _closure(numbering, [number, condition], becomes)
        result = numbering.table.number((*head, what), number, condition, *pieces)
        numbering.table.mentions[result] -= frozenset(becomes)
        return result

    for ref in changed:
        start[ref] = finish(numbering.held[ref], "held")
    numbering.held = start
    carried = [init[i] if _passes_through(body, i) else finish(outs[i], "carry")
               for i in range(control.num_carry)]
    return carried + [finish(n, "stacked") for n in outs[control.num_carry:]]


def _over_chunks(numbering: Numbering, frame: Frame, body: Frame, control: jp.Control) -> bool:
    """Whether the rebuilt loop moves its counter by (sub-step times its length)."""
    if numbering.split_axis is None or control.num_carry != 1:
        return False
    moved = numbering.table.number(("offset", str(control.length)))
    return any(
        eqn.primitive.name == "add" and body.sources.get(eqn.invars[0]) == ("carry", 0)
        and body.sources.get(eqn.invars[1], ("",))[0] == "outer" and numbering.read(body, eqn.invars[1]) == moved
        for eqn in body.jaxpr.eqns if not any(jp.is_literal(v) for v in eqn.invars))


def _iteration(numbering: Numbering, frame: Frame, bodies: tuple[Frame, ...], symbols: dict[Any, int],
               start: dict[RefId, int]) -> tuple[list[RefId], int, list[int]]:
    """Runs the bodies on symbols; the buffers they change (added to `symbols`), the condition and the results."""
    numbering.held = dict(start)
    _bodies(numbering, frame, bodies, symbols)
    changed = [ref for ref in start if numbering.held[ref] != start[ref]]
    numbering.held = dict(start)
    for ref in changed:
        head = ("held in a loop", len(ref), ref[0], ref[-1])
        symbols[ref] = numbering.held[ref] = numbering.table.symbol(head, start[ref])
    condition = _bodies(numbering, frame, bodies, symbols)
    return changed, condition, [numbering.read(bodies[-1], v) for v in bodies[-1].jaxpr.outvars]


def _bodies(numbering: Numbering, frame: Frame, bodies: tuple[Frame, ...], symbols: dict[Any, int]) -> int:
    condition = -1
    for one in bodies:
        _enter(numbering, frame, one, symbols)
        numbering.frame(one)
        if one is not bodies[-1]:
            condition = numbering.read(one, one.jaxpr.outvars[0])
    return condition


def _enter(numbering: Numbering, frame: Frame, body: Frame, symbols: dict[Any, int]) -> None:
    for var, (kind, value) in body.sources.items():
        if kind == "carry":
            numbering.values[body.number, var] = symbols[value]
        elif kind == "xs":
            numbering.values[body.number, var] = numbering.table.number(("one of",), numbering.read(frame, value))


def _closure(numbering: Numbering, numbers: list[int], becomes: dict[int, tuple[int, int]]) -> \
        tuple[tuple[int, int, int], ...]:
    """How every symbol that matters for `numbers` starts and goes on."""
    found: dict[int, tuple[int, int, int]] = {}
    todo = list(numbers)
    while todo:
        number = todo.pop()
        for symbol in numbering.table.mentions[number] if number >= 0 else ():
            if symbol in becomes and symbol not in found:
                found[symbol] = (symbol, *becomes[symbol])
                todo.append(becomes[symbol][1])
    return tuple(found[s] for s in sorted(found))

# -- effects


def declared(numbering: Numbering, frame: Frame, index: int) -> None:
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
