"""What a matmul holds in vector registers while it runs, beside its operands and result.

Fitted to 292 measured matmuls (libtpu 0.0.52, v5e, v6e, tpu7x): where the right side needs more columns than the matrix
units take at once, the left side is gone over again and stays in registers; where the contraction is longer than they
take at once, the sums wait in registers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_vmem_guard.kernel_body import Op
from jax_vmem_guard.tiling import LANES, SUBLANES, element_bits

REGISTER_BYTES = 4096
TURNED_SHARE = 0.6
"""Part of a computed left side that is held while it is turned (contracted along its rows)."""


@dataclass(frozen=True, kw_only=True)
class MatmulShape:
    """(batch) rows x depth times depth x columns; `turned`: the left side is contracted along its rows."""

    batch: int
    rows: int
    depth: int
    columns: int
    bits: int
    turned: bool

    @property
    def left_registers(self) -> float:
        """Registers of the left side of the whole batch."""
        return self.batch * self.rows * self.depth * self.bits / 8 / REGISTER_BYTES


def matmul_shape(op: Op) -> MatmulShape | None:
    """The sizes of a `tpu.matmul`; None where its dimension numbers are not known."""
    left, right = op.operands[0].shape, op.operands[1].shape
    numbers = op.detail.get("dimension_numbers")
    if left is None or right is None or not numbers:
        return None
    contracted, batch_axes = numbers[0], numbers[5] if len(numbers) > 5 else ()
    depth = math.prod(left[axis] for axis in contracted)
    batch = math.prod(left[axis] for axis in batch_axes)
    return MatmulShape(
        batch=batch, rows=math.prod(left) // depth // batch, depth=depth, columns=math.prod(right) // depth // batch,
        bits=element_bits(op.operands[0].dtype), turned=contracted[0] != len(left) - 1)


def held_registers(matmul: MatmulShape, generation: int, computed_left: bool) -> float:
    """Registers a matmul of bf16 holds while it runs; none was seen for other types.

    Args:
      matmul: its sizes.
      generation: TPU generation: four matrix units of 128 x 128 up to v5, two of 256 x 256 from v6 on.
      computed_left: the left side was computed in the kernel, so it cannot be loaded again.
    """
    if matmul.bits != 16:
        return 0
    width, units = (128, 4) if generation <= 5 else (256, 2)
    deep = math.ceil(matmul.depth / width)
    wide = math.ceil(matmul.columns / width)
    left = matmul.rows * matmul.depth * 2 / REGISTER_BYTES
    held = 0.0
    if math.ceil(wide / max(1, units // deep)) > 1:
        again = {5: True, 6: matmul.depth > 512 or computed_left}.get(
            max(5, generation), matmul.depth > 512 and matmul.columns > 512)
        held += left if again else 0
    if math.ceil(deep / units) > 1 and generation < 7:
        held += math.ceil(matmul.rows / SUBLANES) * min(width // LANES, math.ceil(matmul.columns / LANES))
    if matmul.turned:
        held = max(held, left * (TURNED_SHARE if computed_left else 1))
    return held
