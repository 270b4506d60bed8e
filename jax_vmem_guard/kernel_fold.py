"""A kernel's body as the compiler sees it once known numbers are carried through.

A grid axis of one step has index 0, so `pl.when(k == 0)` on it is no branch at all: its code becomes part of the code
around it. What is then in one straight line of code matters twice: for values that live across branches, and for
scratch that the compiler forwards from store to load without memory.
"""

from __future__ import annotations

from collections.abc import Callable

from jax_vmem_guard.kernel_body import Body, Op, Value

_BINARY: dict[str, Callable[[int, int], int]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.andi": lambda a, b: a & b,
    "arith.ori": lambda a, b: a | b,
    "arith.xori": lambda a, b: a ^ b,
    "arith.minsi": min,
    "arith.maxsi": max,
}
_COMPARE: dict[int, Callable[[int, int], bool]] = {
    0: lambda a, b: a == b,
    1: lambda a, b: a != b,
    2: lambda a, b: a < b,
    3: lambda a, b: a <= b,
    4: lambda a, b: a > b,
    5: lambda a, b: a >= b,
}
_PURE = ("arith.", "math.", "vector.", "memref.load", "tpu.iota", "tpu.vector_load", "tpu.strided_load", "copy")
_DOES_SOMETHING = ("vector.store", "vector.transfer_write", "vector.print")
_WHOLE = ("index", "i1", "i32", "i64")
_SAME = ("arith.extui", "arith.extsi", "arith.index_cast", "arith.trunci")


def fold(body: Body, grid: tuple[int | None, ...]) -> tuple[Op, ...]:
    """The operations with known branches and plain scopes (`run_scoped`) taken in line.

    Args:
      body: the body; constants found are written into its values.
      grid: iteration bounds; None for a dynamic one.
    """
    for argument, bound in zip(body.arguments, grid, strict=False):
        if bound == 1:
            argument.constant = 0
    return _without_unused(_block(body.ops), set())


def _block(ops: tuple[Op, ...]) -> list[Op]:
    result: list[Op] = []
    for op in ops:
        if op.blocks:
            taken = _taken(op)
            if taken is None:
                blocks = tuple(tuple(_block(block)) for block in op.blocks)
                result.append(Op(op.name, op.operands, op.results, blocks, op.arguments, op.detail))
                continue
            inner = _block(taken)
            end = inner[-1] if inner and inner[-1].name in ("scf.yield", "tpu.yield") else None
            result.extend(inner[:-1] if end else inner)
            if end and op.results:
                result.append(Op("copy", end.operands, op.results))
            continue
        _evaluate(op)
        result.append(op)
    return result


def _taken(op: Op) -> tuple[Op, ...] | None:
    """The block that certainly runs, once; None where that cannot be told."""
    if op.name == "tpu.region":
        return op.blocks[0]
    if op.name == "scf.if" and op.operands and op.operands[0].constant is not None:
        if op.operands[0].constant:
            return op.blocks[0]
        return op.blocks[1] if len(op.blocks) > 1 else ()
    return None


def _without_unused(ops: list[Op], used: set[int]) -> tuple[Op, ...]:
    """The operations whose results are used, or that do something; without those on whole numbers alone.

    JAX loads what a store is about to overwrite. Addresses and grid indices need no vector registers, and their known
    values are written in the values already; kernels that start many DMAs are full of them.
    """
    kept = []
    for op in reversed(ops):
        if op.name.startswith(_PURE) and op.name not in _DOES_SOMETHING and (
                not any(id(v) in used for v in op.results) or _is_address(op)):
            continue
        if op.blocks:
            blocks = tuple(_without_unused(list(block), used) for block in reversed(op.blocks))
            op = Op(op.name, op.operands, op.results, blocks[::-1], op.arguments, op.detail)
        used.update(id(v) for v in op.operands)
        kept.append(op)
    return tuple(reversed(kept))


def _is_address(op: Op) -> bool:
    return all(v.dtype in _WHOLE and v.shape is None for v in op.results) and not any(
        v.shape is not None for v in op.operands)


def _evaluate(op: Op) -> None:
    if len(op.results) != 1 or op.results[0].shape is not None or op.results[0].constant is not None:
        return
    constants = [v.constant for v in op.operands]
    value: Value = op.results[0]
    if op.name in _SAME and constants[0] is not None:
        value.constant = constants[0]
    elif len(constants) == 2 and constants[0] is not None and constants[1] is not None:
        if op.name in _BINARY:
            value.constant = _BINARY[op.name](constants[0], constants[1])
        elif op.name == "arith.cmpi":
            compare = _COMPARE.get((op.detail.get("predicate") or (-1,))[0])
            value.constant = int(compare(constants[0], constants[1])) if compare else None
    elif op.name in ("arith.muli", "arith.andi") and 0 in constants:
        value.constant = 0
