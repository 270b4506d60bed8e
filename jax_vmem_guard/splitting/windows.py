"""The operands of a kernel as a split sees them: what each block index is made of, and what may be cut.

For a grid axis a, an operand's dimension can be cut where its block index is the plain grid index a and no other
dimension of the operand uses a. For an axis with one step (one that a kernel without a grid is given, too) every
dimension whose block index is a constant can be cut: block e of size B becomes blocks e*k .. e*k+k-1 of size B/k.
Where that axis is the outermost, the whole grid runs once per part, and the index may be anything, a looked-up one too:
each run visits the j-th parts of the blocks in the original's order, whatever that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting.errors import Refused
from jax_vmem_guard.splitting.ways import Label


@dataclass(frozen=True, kw_only=True)
class BlockIndex:
    """One dimension of an index map.

    Attributes:
      axis: the grid axis it returns as it is; None where it returns something else.
      constant: the number it always returns; None where it is no constant.
      uses: grid axes it depends on.
      table: it depends on a prefetched operand.
    """

    axis: int | None
    constant: int | None
    uses: frozenset[int]
    table: bool


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One reference the kernel gets.

    Attributes:
      position: position among the kernel's references.
      role: "prefetch", "input", "output" or "scratch".
      aval: the abstract reference.
      mapping: the block mapping of inputs and outputs.
      index: one entry per dimension of the array.
      dims: array dimension of each dimension of the reference (squeezed ones left out).
      unused: an output whose result nobody reads.
      alias: position of the operand it shares its array with.
    """

    position: int
    role: str
    aval: Any
    mapping: Any = None
    index: tuple[BlockIndex, ...] = ()
    dims: tuple[int, ...] = ()
    unused: bool = False
    alias: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def name(self) -> str:
        origin = getattr(self.mapping, "origin", "")
        return f"{self.role} `{origin}`" if origin else f"{self.role} {self.position}"


def operands(eqn: Any, unused: frozenset[int]) -> tuple[Operand, ...]:
    """The references of a `pallas_call`'s kernel, in order; `unused` holds positions of results nobody reads."""
    grid_mapping, jaxpr = eqn.params["grid_mapping"], eqn.params["jaxpr"]
    prefetch, inputs = grid_mapping.num_index_operands, grid_mapping.num_inputs
    outputs = grid_mapping.num_outputs
    alias: dict[int, int] = {}
    for i, o in eqn.params["input_output_aliases"]:  # counted without dynamic grid bounds
        alias[i] = prefetch + inputs + o
        alias[prefetch + inputs + o] = i
    found = []
    for position, var in enumerate(jaxpr.invars):
        block = position - prefetch
        mapping = grid_mapping.block_mappings[block] if 0 <= block < inputs + outputs else None
        role = "prefetch" if block < 0 else "input" if block < inputs else "output" if mapping is not None else "scratch"
        found.append(Operand(
            position=position, role=role, aval=var.aval, mapping=mapping,
            unused=role == "output" and block - inputs in unused, alias=alias.get(position),
            index=block_index(mapping, len(grid_mapping.grid)) if mapping is not None else (),
            dims=tuple(d for d, b in enumerate(mapping.block_shape) if not jp.is_squeezed(b)) if mapping else ()))
    return tuple(found)


def block_index(mapping: Any, num_axes: int) -> tuple[BlockIndex, ...]:
    """What each dimension of the index map returns."""
    jaxpr, _ = jp.open_jaxpr(mapping.index_map_jaxpr)
    uses: dict[Any, frozenset[int]] = {v: frozenset([i]) if i < num_axes else frozenset([-1])
                                       for i, v in enumerate(jaxpr.invars)}
    same: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        deps: frozenset[int] = frozenset().union(*(uses.get(v, frozenset()) for v in eqn.invars
                                                   if not jp.is_literal(v)))
        if any(jp.is_ref(v) for v in eqn.invars) or eqn.effects:
            deps |= {-1}
        for out in eqn.outvars:
            uses[out] = deps
        if eqn.primitive.name == "convert_element_type" and not jp.is_literal(eqn.invars[0]):
            same[eqn.outvars[0]] = same.get(eqn.invars[0], eqn.invars[0])
    result = []
    for out in jaxpr.outvars:
        if jp.is_literal(out):
            result.append(BlockIndex(axis=None, constant=int(out.val), uses=frozenset(), table=False))
            continue
        root = same.get(out, out)
        axis = jaxpr.invars.index(root) if root in jaxpr.invars[:num_axes] else None
        deps = uses.get(out, frozenset([-1]))
        result.append(BlockIndex(axis=axis, constant=None, uses=deps - {-1}, table=-1 in deps))
    return tuple(result)


def labels(operand: Operand, axis: int, grid: Sequence[Any], parts: int, target: tuple[int, int] | None) -> \
        frozenset[Label]:
    """The labels an operand may have when `axis` is split.

    Args:
      target: for an axis of one step, (position, dimension) of the reference the split is for.

    Raises:
      Refused: an output uses the axis in a way that cannot be split.
    """
    if operand.role == "prefetch":
        return frozenset([None])
    vector = jp.memory_space(operand.aval) in ("vmem", "default")
    cuttable = [d for d, size in enumerate(operand.shape) if size % parts == 0 and size > 1] if vector else []
    if operand.role == "scratch":
        return frozenset([None, *cuttable])
    single = grid[axis] == 1
    users = [d for d, index in enumerate(operand.index) if axis in index.uses]
    cuttable = [d for d in cuttable if jp.is_blocked(operand.mapping.block_shape[operand.dims[d]])]
    if single:
        outermost = all(size == 1 for size in grid[:axis])
        fixed = [d for d in cuttable if _fixed(operand.index[operand.dims[d]], axis, grid)
                 or (outermost and _whole_blocks(operand, operand.dims[d]))]
        if target is not None and target[0] == operand.position:
            if target[1] not in fixed:
                raise Refused(f"{operand.name} cannot be cut along dimension {target[1]}: its block of "
                              f"{_size(operand, target[1])} there does not divide by {parts}, or moves with the grid over "
                              "an array that ends inside a block")
            return frozenset([target[1]])
        return frozenset([None, *fixed])
    if not users:
        if operand.unused:
            return frozenset([None, *(d for d in cuttable if _resident(operand, operand.dims[d]))])
        return frozenset([None])
    plain = [d for d in cuttable if users == [operand.dims[d]] and operand.index[operand.dims[d]].axis == axis]
    if operand.role == "input":
        return frozenset([None, *plain])
    if not plain:
        raise Refused(_why_not(operand, axis, users, parts, vector))
    return frozenset(plain)


def say(operand: Operand, axis: int, parts: int) -> str:
    """The operand's name, with what keeps an input whole that moves with the axis."""
    users = [d for d, index in enumerate(operand.index) if axis in index.uses]
    if operand.role != "input" or not users:
        return operand.name
    vector = jp.memory_space(operand.aval) in ("vmem", "default")
    where = users[0]
    plain = vector and len(users) == 1 and operand.index[where].axis == axis and where in operand.dims
    if plain and operand.shape[operand.dims.index(where)] % parts == 0:
        return operand.name
    return f"{operand.name} (it {_why_not(operand, axis, users, parts, vector).removeprefix(operand.name + ' ')})"


def _why_not(operand: Operand, axis: int, users: list[int], parts: int, vector: bool) -> str:
    if not vector:
        return f"{operand.name} is not in VMEM blocks: it is in memory space `{jp.memory_space(operand.aval)}`"
    if len(users) > 1:
        return f"{operand.name} uses grid axis {axis} in {len(users)} dimensions"
    index = operand.index[users[0]]
    if index.table:
        return f"{operand.name} looks its block up in a prefetched table"
    if index.axis != axis:
        return f"{operand.name} uses grid axis {axis} in index arithmetic"
    size = jp.block_size(operand.mapping.block_shape[users[0]])
    return f"{operand.name} has a block of {size} along grid axis {axis}, which {parts} parts do not divide"


def _fixed(index: BlockIndex, axis: int, grid: Sequence[Any]) -> bool:
    """The block never moves along this dimension: a constant, or an axis of one step."""
    return index.constant is not None or (index.axis is not None and grid[index.axis] == 1)


def _whole_blocks(operand: Operand, dim: int) -> bool:
    """The array has no partial block along this dimension: wherever a block moves, all of its parts are in the array."""
    return operand.mapping.array_aval.shape[dim] % jp.block_size(operand.mapping.block_shape[dim]) == 0


def _resident(operand: Operand, dim: int) -> bool:
    size = jp.block_size(operand.mapping.block_shape[dim])
    return operand.index[dim].constant == 0 and operand.mapping.array_aval.shape[dim] == size


def _size(operand: Operand, dim: int) -> int | None:
    return operand.shape[dim] if dim < len(operand.shape) else None


def fine_steps(chosen: Sequence[tuple[Operand, int]], steps: int, parts: int) -> int:
    """Steps of the split axis; fewer than steps*parts where arrays end inside the last block.

    Args:
      chosen: the operands in parts, with the dimension of the reference.

    Raises:
      Refused: the arrays end in different steps, or the grid runs past an array.
    """
    needed = set()
    for operand, dim in chosen:
        if operand.mapping is None or (operand.unused and operand.role == "output"):
            continue
        where = operand.dims[dim]
        block = jp.block_size(operand.mapping.block_shape[where])
        first = (operand.index[where].constant or 0) * block
        extent = operand.mapping.array_aval.shape[where] - first
        if extent <= (steps - 1) * block:
            raise Refused(f"{operand.name} ends before the last step of the grid axis")
        needed.add(min(-(-extent // (block // parts)), steps * parts))
    if len(needed) > 1:
        raise Refused(f"the arrays end in different steps of the split axis: {sorted(needed)}")
    return needed.pop() if needed else steps * parts
