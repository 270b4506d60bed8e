"""One `pallas_call` equation split along one grid axis: windows, proof, entry, rebuild, check, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting import check, entry, frames, memory, proof, windows
from jax_vmem_guard.splitting.emit import Emitter
from jax_vmem_guard.splitting.errors import Refused
from jax_vmem_guard.splitting.needs import Needs
from jax_vmem_guard.splitting.ways import Label, shrunk
from jax_vmem_guard.splitting.windows import Operand


@dataclass(frozen=True, kw_only=True)
class ProvenSplit:
    """A split of one axis that was proved right, not yet built.

    Attributes:
      eqn: the original equation.
      axis: grid axis; parts: k; steps: programs along it before; fine_steps: after.
      operands: the kernel's references; labels: one per operand, None where it stays whole.
      needs: the proof.
    """

    eqn: Any
    axis: int
    parts: int
    steps: int
    fine_steps: int
    operands: tuple[Operand, ...]
    labels: tuple[Label, ...]
    needs: Needs


def prove(eqn: Any, axis: int, parts: int, unused: frozenset[int], target: tuple[int, int] | None = None) -> \
        ProvenSplit:
    """Proves that `axis` can run in `parts` times as many steps over blocks `parts` times smaller.

    Args:
      eqn: a `pallas_call` equation.
      axis: position in the grid.
      parts: k, 2 or more.
      unused: positions of the call's results that nobody reads.
      target: for an axis of one step, the (operand, dimension) to cut.

    Raises:
      Refused: with the reason.
    """
    grid_mapping = eqn.params["grid_mapping"]
    grid = grid_mapping.grid
    if axis in grid_mapping.vmapped_dims:
        raise Refused(f"grid axis {axis} is one that `vmap` added: its blocks are single already")
    if jp.is_dynamic_dim(grid[axis]):
        raise Refused(f"the size of grid axis {axis} is computed at run time")
    if grid_mapping.get_grid_indices is not None or grid_mapping.local_grid_env is not None:
        raise Refused("the kernel computes its grid indices itself")
    operands = windows.operands(eqn, unused)
    for operand in operands:
        if operand.mapping is not None and operand.mapping.transforms:
            raise Refused(f"{operand.name} is transformed on its way in")
        _no_revisit_mode(operand)
    allowed = {("operand", o.position): windows.labels(o, axis, grid, parts, target) for o in operands}
    if not any(label is not None for o in operands if o.role in ("input", "output")
               for label in allowed["operand", o.position]):
        raise Refused(f"no block moves with grid axis {axis}")
    root = frames.build(eqn.params["jaxpr"])
    _no_input_stores(root, operands)
    order = [("operand", o.position) for o in operands]
    names = {("operand", o.position): windows.say(o, axis, parts) for o in operands}
    needs = proof.prove(root, allowed, order, parts, names)
    labels = _settled(operands, needs, allowed)
    if all(label is None for o, label in zip(operands, labels, strict=True) if o.role == "output"):
        raise Refused(f"no output is cut along grid axis {axis}: every step would write all of it again")
    cut = [(o, label) for o, label in zip(operands, labels, strict=True) if label is not None]
    fine = windows.fine_steps(cut, grid[axis], parts)
    _aliases(operands, labels, axis, grid)
    _dead_on_entry(eqn, root, operands, labels, axis)
    return ProvenSplit(eqn=eqn, axis=axis, parts=parts, steps=grid[axis], fine_steps=fine, operands=operands,
                       labels=labels, needs=needs)


def _no_revisit_mode(operand: Operand) -> None:
    mode = getattr(getattr(operand.mapping, "pipeline_mode", None), "revisit_mode", None)
    if mode is not None and str(getattr(mode, "name", mode)).lower() == "any":
        raise Refused(f"{operand.name} is fetched in revisit mode `any`")


def _no_input_stores(root: frames.Frame, operands: Sequence[Operand]) -> None:
    for frame in root.walk():
        for eqn in frame.jaxpr.eqns:
            acc = memory.access(eqn)
            if acc is None or not acc.stores:
                continue
            ref = frames.resolve_ref(frame, acc.ref)
            if ref[0] == "operand" and operands[ref[1]].role in ("input", "prefetch"):
                raise Refused(f"the kernel writes into {operands[ref[1]].name}")


def _settled(operands: Sequence[Operand], needs: Needs, allowed: Any) -> tuple[Label, ...]:
    """The labels of all operands; one that is never touched follows the axis where it can."""
    labels = []
    for operand in operands:
        ref = ("operand", operand.position)
        if ref in needs.labels:
            labels.append(needs.labels[ref])
        else:
            cut = sorted(d for d in allowed[ref] if d is not None)
            labels.append(cut[0] if len(cut) == 1 and operand.role in ("input", "output") else None)
    return tuple(labels)


def _aliases(operands: Sequence[Operand], labels: Sequence[Label], axis: int, grid: Sequence[Any]) -> None:
    """An array that is input and output: both are cut alike, and no block is visited again from an outer axis."""
    for operand in operands:
        if operand.alias is None or operand.role != "output":
            continue
        other = operands[operand.alias]
        if labels[operand.position] is None or labels[other.position] != labels[operand.position] \
                or operand.mapping.block_shape != other.mapping.block_shape \
                or str(operand.mapping.index_map_jaxpr) != str(other.mapping.index_map_jaxpr):
            raise Refused(f"{operand.name} shares its array with {other.name}, but they are not cut alike")
        plain = {index.axis for index in operand.index}
        for outer in range(axis):
            if grid[outer] != 1 and outer not in plain:
                raise Refused(f"{operand.name} shares its array with an input and is visited again by grid axis {outer}")


def _dead_on_entry(eqn: Any, root: frames.Frame, operands: Sequence[Operand], labels: Sequence[Label],
                   axis: int) -> None:
    grid_mapping = eqn.params["grid_mapping"]
    grid = grid_mapping.grid
    if grid[axis] == 1 and all(grid[outer] == 1 for outer in range(axis)):
        return  # the only step: what buffers hold when it begins is undefined in the original, too
    shapes, final = {}, set()
    for operand, label in zip(operands, labels, strict=True):
        if operand.role not in ("scratch", "output"):
            continue
        ref = ("operand", operand.position)
        if operand.role == "output" and label is not None and not operand.unused:
            if grid[axis] != 1:
                continue  # its block is another one in each step of the axis: nothing stays in place
            final.add(ref)
        shapes[ref] = operand.shape
    numbers = axis_numbers(grid_mapping)
    sizes = {number: grid[a] for a, number in numbers.items() if not jp.is_dynamic_dim(grid[a])}
    inner = frozenset(number for a, number in numbers.items() if a > axis)
    found = entry.carried(root, shapes, frozenset(final), entry.Grid(inner=inner, sizes=sizes))
    for ref, why in found.items():
        raise Refused(f"{operands[ref[1]].name} {why}: it may carry values along grid axis {axis}")


def axis_numbers(grid_mapping: Any) -> dict[int, int]:
    """Grid axis -> its number in `program_id`, which does not count axes that `vmap` added."""
    own = [a for a in range(len(grid_mapping.grid)) if a not in grid_mapping.vmapped_dims]
    return {a: number for number, a in enumerate(own)}


def build(split: ProvenSplit) -> Any:
    """The split `pallas_call` equation.

    Raises:
      Refused: the rebuilt kernel does not check against the original.
    """
    eqn, parts = split.eqn, split.parts
    grid_mapping = eqn.params["grid_mapping"]
    grid = tuple(split.fine_steps if a == split.axis else size for a, size in enumerate(grid_mapping.grid))
    new_mapping = grid_mapping.replace(grid=grid)
    avals, blocks, scratch, out_avals = [], [], [], list(eqn.params["out_avals"])
    first_output = grid_mapping.num_index_operands + grid_mapping.num_inputs
    for operand, label in zip(split.operands, split.labels, strict=True):
        aval = operand.aval if label is None else jp.resize_ref(operand.aval, shrunk(operand.shape, label, parts))
        avals.append(aval)
        if operand.role == "scratch":
            scratch.append(aval)
        elif operand.mapping is not None:
            block = _block(split, operand, label, aval, new_mapping)
            blocks.append(block)
            if operand.role == "output":
                position = operand.position - first_output
                out_avals[position] = out_avals[position].update(shape=block.array_aval.shape)
    new_mapping = new_mapping.replace(block_mappings=tuple(blocks), scratch_avals=tuple(scratch))
    number = axis_numbers(grid_mapping)[split.axis]

    def kernel(*refs: Any) -> tuple[()]:
        fine = jp.program_id(number)
        emitter = Emitter(needs=split.needs, axis=number, steps=split.steps, coarse=lax.div(fine, np.int32(parts)),
                          sub=lax.rem(fine, np.int32(parts)),
                          refs={("operand", i): ref for i, ref in enumerate(refs)})
        emitter.frame(split.needs.root)
        return ()

    jaxpr = jp.trace_kernel(new_mapping, avals, kernel, eqn.params["jaxpr"])
    check.same_kernel(eqn.params["jaxpr"], jaxpr, axis=number, parts=parts, steps=split.steps, labels=split.labels)
    params = {**eqn.params, "jaxpr": jaxpr, "grid_mapping": new_mapping, "out_avals": tuple(out_avals)}
    return jp.replace_eqn(eqn, params=params, out_avals=out_avals)


def _block(split: ProvenSplit, operand: Operand, label: Label, aval: Any, grid_mapping: Any) -> Any:
    mapping, parts, axis = operand.mapping, split.parts, split.axis
    array_aval, shape = mapping.array_aval, mapping.block_shape
    where = None if label is None else operand.dims[label]
    follows = where is not None and (operand.index[where].axis == axis or split.steps == 1)
    if where is not None:
        size = jp.block_size(shape[where]) // parts
        shape = tuple(jp.blocked(size) if d == where else b for d, b in enumerate(shape))
        if not follows:  # an unused output that stays in place: the array shrinks with its block
            array_aval = array_aval.update(shape=shrunk(array_aval.shape, where, parts))

    def index_map(*args: Any) -> list[Any]:
        fine = args[axis]
        coarse = lax.div(fine, np.int32(parts))
        out = jp.eval_jaxpr(mapping.index_map_jaxpr, [*args[:axis], coarse, *args[axis + 1:]])
        # Under x64 JAX writes int64 constants into index maps of kernels without a grid; Mosaic takes int32 only.
        out = [np.int32(i) if isinstance(i, (int, np.integer, np.ndarray)) else i for i in out]
        if follows and where is not None:
            plain = operand.index[where].axis == axis or operand.index[where].constant == 0
            block = lax.mul(out[where], np.int32(parts))
            out[where] = fine if plain else lax.add(block, lax.rem(fine, np.int32(parts)))
        return out

    traced = jp.trace_index_map(grid_mapping, grid_mapping.index_map_avals, index_map, mapping.index_map_jaxpr)
    check.same_windows(mapping.index_map_jaxpr, traced, axes=len(grid_mapping.grid), axis=axis, parts=parts,
                       follows=where if follows else None)
    return mapping.replace(block_shape=shape, transformed_block_aval=aval, index_map_jaxpr=traced,
                           array_aval=array_aval)
