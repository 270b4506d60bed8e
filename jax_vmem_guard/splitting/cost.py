"""What a split saves and what it costs, by arithmetic: for ordering, not for deciding whether a kernel fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard import tiling
from jax_vmem_guard.chips import Chip
from jax_vmem_guard.splitting.ways import Label, shrunk
from jax_vmem_guard.splitting.windows import Operand

#: What one more grid step costs, in bytes fetched meanwhile: about 0.35 us of step overhead at about 1 TB/s. It only
#: weighs steps against fetches when axes are compared.
STEP_BYTES = 350_000


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one kernel, before or after a split.

    Attributes:
      window_bytes: VMEM of all windows, buffering included.
      scratch_bytes: VMEM of scratch operands.
      fetched_bytes: what all steps together move between HBM and VMEM.
      steps: grid steps; axes whose size is computed at run time count once.
    """

    window_bytes: int
    scratch_bytes: int
    fetched_bytes: int
    steps: int

    @property
    def vmem_bytes(self) -> int:
        return self.window_bytes + self.scratch_bytes


def cost(operands: Sequence[Operand], grid: Sequence[Any], chip: Chip, parts: Mapping[int, Mapping[int, int]],
         finer: Mapping[int, int], new_axis_parts: int = 1) -> Cost:
    """The cost of a kernel whose blocks are cut.

    Args:
      operands: the kernel's references before the split.
      grid: its grid before the split.
      chip: whose tiling counts.
      parts: operand position -> dimension of the reference -> k.
      finer: grid axis -> k.
      new_axis_parts: k of new outermost axes together.
    """
    sizes = [(1 if jp.is_dynamic_dim(n) else n) * finer.get(a, 1) for a, n in enumerate(grid)]
    window = scratch = fetched = 0
    for operand in operands:
        shape = operand.shape
        for dim, k in parts.get(operand.position, {}).items():
            shape = shrunk(shape, dim, k)
        if operand.role == "prefetch" or jp.memory_space(operand.aval) not in ("vmem", "default"):
            continue
        size = tiling.padded_bytes(shape, mlir_type(operand.aval.dtype), chip.generation)
        if operand.role == "scratch":
            scratch += size
            continue
        cut = parts.get(operand.position, {})
        moves = [a for index in operand.index for a in index.uses if sizes[a] > 1]
        moves_with_new = new_axis_parts > 1 and bool(cut)
        window += size * (2 if moves or moves_with_new else 1)
        last = max(moves, default=-1)
        times = math.prod(sizes[:last + 1]) * (new_axis_parts if moves or moves_with_new else 1)
        if last >= 0 and not cut and last in finer and all(a != last or index.axis != last
                                                           for index in operand.index for a in index.uses):
            times //= finer[last]  # it stays in place over the steps that replace one
        fetched += size * times
    return Cost(window_bytes=window, scratch_bytes=scratch, fetched_bytes=fetched,
                steps=math.prod(sizes) * new_axis_parts)


def aligned(operands: Sequence[Operand], labels: Sequence[Label], parts: int) -> str | None:
    """Why the parts of the windows are no whole tiles, or None where they are.

    The last dimension of a block goes in multiples of 128, the one before in multiples of 8 rows of 32 bits (16 rows of
    16 bits, 32 of 8).
    """
    for operand, label in zip(operands, labels, strict=True):
        if label is None or operand.mapping is None:
            continue
        where, rank = operand.dims[label], len(operand.mapping.block_shape)
        size = operand.shape[label] // parts
        packing = max(1, 4 // np.dtype(operand.aval.dtype).itemsize)
        tile = 1
        if where == rank - 1:
            tile = 128 if rank > 1 else 128 * packing
        elif where == rank - 2:
            tile = 8 * packing
        if size % tile:
            return f"{operand.name} would get blocks of {size} where tiles are {tile}"
    return None


def mlir_type(dtype: Any) -> str:
    """The element type in MLIR's short form."""
    name = np.dtype(dtype).name if not hasattr(dtype, "_rules") else ""
    if name == "bool":
        return "i1"
    for long, short in (("bfloat", "bf"), ("float8_", "f8_"), ("float4_", "f4_"), ("float", "f"), ("uint", "ui"),
                        ("int", "i")):
        if name.startswith(long):
            return name.replace(long, short, 1)
    return name
