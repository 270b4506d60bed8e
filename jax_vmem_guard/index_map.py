"""What the block index of a window depends on, read from its index map's code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jax_vmem_guard import _jax


@dataclass(frozen=True, kw_only=True)
class IndexMap:
    """What a window's block index depends on.

    Attributes:
      axes: grid axes it depends on, those with a bound of 1 left out.
      reads_memory: it reads prefetched scalars, so the data decide too.
    """

    axes: tuple[int, ...]
    reads_memory: bool

    @property
    def constant(self) -> bool:
        """The block index is the same in every grid step.

        Prefetched scalars stay what they are while a kernel runs, so an index map that reads them at a fixed place is
        constant too; the compiler gives such a window one buffer (libtpu 0.0.30 and 0.0.52, v4 to tpu7x).
        """
        return not self.axes


@dataclass(frozen=True)
class _Value:
    """A value of the index map: a known integer, or what an unknown one depends on."""

    constant: int | None = None
    axes: frozenset[int] = frozenset()
    reads_memory: bool = False


_FOLD = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
}


def read_index_map(function: Any, grid: tuple[int | None, ...]) -> IndexMap:
    """What the results of an index map depend on.

    A grid axis of bound 1 counts as 0, as it does for the compiler; additions and multiplications of known numbers are
    carried out, everything else depends on all it takes.

    Args:
      function: the index map, an MLIR function of the grid indices, then of the prefetched scalars.
      grid: iteration bounds; None for a dynamic one.
    """
    block = function.regions[0].blocks[0]
    values: dict[Any, _Value] = {}
    for axis, argument in enumerate(block.arguments):
        if axis >= len(grid):
            values[argument] = _Value()
        elif grid[axis] == 1:
            values[argument] = _Value(constant=0)
        else:
            values[argument] = _Value(axes=frozenset([axis]))
    result = _run(block, values)
    return IndexMap(axes=tuple(sorted(result.axes)), reads_memory=result.reads_memory)


def read_affine_map(text: str, grid: tuple[int | None, ...]) -> IndexMap:
    """The same for an affine map in MLIR's text form: "affine_map<(d0, d1) -> (d0, 0)>"."""
    results = text.partition("->")[2]
    axes = sorted({int(d) for d in re.findall(r"\bd(\d+)\b", results)})
    return IndexMap(axes=tuple(a for a in axes if a < len(grid) and grid[a] != 1), reads_memory=False)


def _run(block: Any, values: dict[Any, _Value]) -> _Value:
    result = _Value()
    for op in block.operations:
        operation = op.operation
        # A value from elsewhere may depend on everything.
        operands = [values[v] if v in values else _union(list(values.values())) for v in operation.operands]
        value = _evaluate(operation, operands)
        for region in operation.regions:
            for inner in region.blocks:
                for argument in inner.arguments:
                    values[argument] = value
                value = _union([value, _run(inner, values)])
        for v in operation.results:
            values[v] = value
        if operation.name in ("func.return", "scf.yield"):
            result = _union([result, value])
    return result


def _evaluate(operation: Any, operands: list[_Value]) -> _Value:
    ir = _jax.ir()
    if operation.name == "arith.constant":
        try:
            return _Value(constant=int(ir.IntegerAttr(operation.attributes["value"]).value))
        except (ValueError, TypeError):
            return _Value()
    constants = [o.constant for o in operands]
    if operation.name in _FOLD and None not in constants:
        return _Value(constant=_FOLD[operation.name](*constants))
    if operation.name == "arith.muli" and 0 in constants:
        return _Value(constant=0)
    if operation.name in ("arith.index_cast", "arith.extsi", "arith.trunci") and constants[0] is not None:
        return _Value(constant=constants[0])
    value = _union(operands)
    return _union([value, _Value(reads_memory=True)]) if "load" in operation.name else value


def _union(values: list[_Value]) -> _Value:
    return _Value(
        axes=frozenset().union(*(v.axes for v in values)),
        reads_memory=any(v.reads_memory for v in values),
    )
