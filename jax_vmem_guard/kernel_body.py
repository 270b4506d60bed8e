"""A kernel's body as plain records: operations, the vectors they take and give, their regions.

Walking MLIR through its Python bindings costs microseconds for each question asked, so everything the model of the
spill slots asks is read here once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Value:
    """A value of the body.

    Attributes:
      shape: shape of a vector; None for scalars, memrefs and other values.
      dtype: element type of a vector, in MLIR's short form; the whole type as text for other values.
      constant: the integer it is, where it is a known one.
    """

    shape: tuple[int, ...] | None
    dtype: str
    constant: int | None = None


@dataclass(slots=True, eq=False)
class Op:
    """One operation.

    Attributes:
      name: "vector.load", "tpu.matmul", ...
      operands, results: its values.
      blocks: the operations of its regions, block by block; empty for most.
      arguments: arguments of these blocks.
      detail: what else the model asks: dimensions of a reduction or transpose, of a matmul's contraction, ...
    """

    name: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    blocks: tuple[tuple[Op, ...], ...] = ()
    arguments: tuple[tuple[Value, ...], ...] = ()
    detail: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)


@dataclass(slots=True, eq=False)
class Body:
    """A kernel's function: its arguments (grid indices first) and operations."""

    arguments: tuple[Value, ...]
    ops: tuple[Op, ...]


_VECTOR = re.compile(r"vector<((?:\d+x)*)([^>]+)>$")
_INTEGER = re.compile(r"(-?\d+) : ")
_LEAVES = ("arith.", "math.", "vector.load", "vector.broadcast", "vector.shape_cast", "tpu.memref_", "tpu.vector_store",
           "tpu.enqueue_dma", "tpu.wait_dma", "memref.load", "memref.store")  # these have no regions
_DETAILS = {
    "arith.cmpi": "predicate",
    "vector.multi_reduction": "reduction_dims",
    "tpu.matmul": "dimension_numbers",
    "tpu.transpose": "permutation",
    "vector.transpose": "permutation",
    "tpu.dynamic_rotate": "dimension",
    "tpu.rotate": "dimension",
    "tpu.concatenate": "dimension",
    "tpu.all_reduce": "dim",
    "tpu.reduce_index": "axis",
}


def read_body(function: Any) -> Body:
    """The body of a kernel's MLIR function."""
    block = function.regions[0].blocks[0]
    values: dict[Any, Value] = {}
    types: dict[Any, tuple[tuple[int, ...] | None, str]] = {}
    arguments = tuple(_value(a, values, types) for a in block.arguments)
    return Body(arguments=arguments, ops=_read_block(block, values, types))


def _read_block(block: Any, values: dict[Any, Value], types: dict[Any, Any]) -> tuple[Op, ...]:
    ops = []
    for operation in block.operations:
        op = operation.operation
        name = op.name
        record = Op(
            name,
            tuple([values.get(v) or _value(v, values, types) for v in op.operands]),
            tuple([_value(v, values, types) for v in op.results]),
        )
        ops.append(record)
        if name == "arith.constant":
            if record.results[0].shape is None:
                record.results[0].constant = _constant(str(op.attributes["value"]))
        elif name in _DETAILS:
            detail = _DETAILS[name]
            attributes = op.attributes
            if detail in attributes:
                record.detail = {detail: _numbers(str(attributes[detail]))}
        elif not name.startswith(_LEAVES):
            regions = op.regions
            if len(regions):
                blocks, arguments = [], []
                for region in regions:
                    for inner in region.blocks:
                        arguments.append(tuple([_value(a, values, types) for a in inner.arguments]))
                        blocks.append(_read_block(inner, values, types))
                record.blocks, record.arguments = tuple(blocks), tuple(arguments)
    return tuple(ops)


def _constant(text: str) -> int | None:
    if text in ("true", "false"):
        return int(text == "true")
    found = _INTEGER.match(text)
    return int(found.group(1)) if found else None


def _value(v: Any, values: dict[Any, Value], types: dict[Any, Any]) -> Value:
    type_ = v.type
    known = types.get(type_)
    if known is None:
        text = str(type_)
        vector = _VECTOR.match(text)
        known = types[type_] = (
            (tuple(int(d) for d in vector.group(1).split("x") if d), vector.group(2)) if vector else (None, text))
    value = values[v] = Value(known[0], known[1])
    return value


def _numbers(text: str) -> tuple[Any, ...]:
    """Integers of an attribute: a tuple, or for a matmul's dimension numbers a tuple of tuples, one for each list."""
    if "[[" in text or text.count("[") > 1:
        return tuple(tuple(int(n) for n in re.findall(r"-?\d+", part)) for part in re.findall(r"\[([^\]]*)\]", text))
    inside = text.split(":", 1)[-1] if text.startswith("array<") else text.split(" : ")[0].removeprefix("#")
    return tuple(int(n) for n in re.findall(r"-?\d+", inside))
