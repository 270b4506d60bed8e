"""What can be split: a grid axis, or any dimension of an output.

The second needs an axis first: a new outermost one with a single step, which changes nothing (`program_id` and the
index maps count one further, and ignore it). Splitting that axis then runs the whole old grid once per part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting.errors import Refused


@dataclass(frozen=True, order=True)
class NewAxis:
    """A new outermost grid axis along dimension `dim` of the block of output `output`."""

    output: int
    dim: int


Axis = int | NewAxis


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which axes of one kernel run in how many times more steps.

    Attributes:
      axes: (axis, k) pairs, applied in this order. Grid axes are numbered as in the original grid, whatever new
        axes are put before them.
    """

    axes: tuple[tuple[Axis, int], ...]


def in_order(split: Split) -> list[tuple[Axis, int]]:
    """The axes as they are numbered when their turn comes: every new axis before moves the old ones by one."""
    pairs: list[tuple[Axis, int]] = []
    added = 0
    for axis, parts in split.axes:
        pairs.append((axis + added if isinstance(axis, int) else axis, parts))
        added += isinstance(axis, NewAxis)
    return pairs


def describe(axis: Axis) -> str:
    if isinstance(axis, int):
        return f"grid axis {axis}"
    return f"a new grid axis along dimension {axis.dim} of output {axis.output}"


def with_axis(eqn: Any, axis: Axis) -> tuple[Any, int, tuple[int, int] | None]:
    """(equation, position of the axis in its grid, what the axis is for), the new axis put in where it is one.

    Raises:
      Refused: the kernel has no such axis.
    """
    grid_mapping = eqn.params["grid_mapping"]
    added = eqn.params["grid_mapping"].grid
    if isinstance(axis, int):
        if not 0 <= axis < len(added):
            raise Refused(f"the grid has {len(added)} axes")
        target = None
        if added[axis] == 1:
            target = _target(eqn, axis)
        return eqn, axis, target
    first_output = grid_mapping.num_index_operands + grid_mapping.num_inputs
    if not 0 <= axis.output < grid_mapping.num_outputs:
        raise Refused(f"the kernel has {grid_mapping.num_outputs} outputs")
    return insert_axis(eqn), 0, (first_output + axis.output, axis.dim)


def _target(eqn: Any, axis: int) -> tuple[int, int] | None:
    """The first output dimension that the one-step axis moves along by name."""
    from jax_vmem_guard.splitting import windows

    for operand in windows.operands(eqn, frozenset()):
        if operand.role != "output":
            continue
        for dim, where in enumerate(operand.dims):
            if operand.index[where].axis == axis:
                return operand.position, dim
    raise Refused(f"no output block is named by grid axis {axis}, which has one step")


def insert_axis(eqn: Any) -> Any:
    """The call with a new grid axis of one step before all others."""
    old = eqn.params["grid_mapping"]
    if old.grid_names is not None or old.get_grid_indices is not None or old.local_grid_env is not None:
        raise Refused("the kernel names or computes its grid axes")
    avals = (jp.int32_aval(), *old.index_map_avals)
    tree = jp.index_map_tree(len(old.grid) + 1, old.index_map_tree, len(old.grid))
    mapping = old.replace(grid=(1, *old.grid), index_map_avals=avals, index_map_tree=tree, block_mappings=(),
                          num_inputs=0, num_outputs=0, vmapped_dims=tuple(d + 1 for d in old.vmapped_dims))
    blocks = []
    for block in old.block_mappings:
        traced = jp.trace_index_map(mapping, avals, lambda *a, b=block: jp.eval_jaxpr(b.index_map_jaxpr, a[1:]),
                                    block.index_map_jaxpr)
        blocks.append(block.replace(index_map_jaxpr=traced))
    mapping = mapping.replace(block_mappings=tuple(blocks), num_inputs=old.num_inputs, num_outputs=old.num_outputs)
    params = {**eqn.params, "grid_mapping": mapping, "jaxpr": _renumbered(eqn.params["jaxpr"])}
    semantics = getattr(jp.compiler_params(eqn), "dimension_semantics", None)
    if semantics is not None:
        params["compiler_params"] = jp.with_compiler_params(
            eqn, dimension_semantics=(type(semantics[0])("arbitrary") if semantics and not isinstance(semantics[0], str)
                                      else "arbitrary", *semantics))
    return eqn.replace(params=params)


def _renumbered(jaxpr: Any) -> Any:
    """The kernel with every grid axis one further."""
    eqns = []
    for eqn in jaxpr.eqns:
        params = dict(eqn.params)
        if eqn.primitive.name in ("program_id", "num_programs"):
            params["axis"] += 1
        for key, value in eqn.params.items():
            if jp.is_jaxpr(value):
                params[key] = jp.with_jaxpr(value, _renumbered(jp.open_jaxpr(value)[0]))
            elif type(value) in (tuple, list) and any(jp.is_jaxpr(v) for v in value):
                params[key] = type(value)(jp.with_jaxpr(v, _renumbered(jp.open_jaxpr(v)[0])) if jp.is_jaxpr(v) else v
                                          for v in value)
        eqns.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=eqns)
