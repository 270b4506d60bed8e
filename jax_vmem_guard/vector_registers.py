"""How many vector registers a value of a kernel's body takes, and which of its elements are copies of each other."""

from __future__ import annotations

import math
from functools import cache

from jax_vmem_guard.kernel_body import Op
from jax_vmem_guard.tiling import LANES, SUBLANES, element_bits

Vary = tuple[bool, ...]
"""For each dimension of a value: its elements differ along it (False after a broadcast)."""


@cache
def _packing(dtype: str) -> int:
    return max(1, 32 // (element_bits(dtype) or 32))


def registers(shape: tuple[int, ...], dtype: str, vary: Vary | None = None) -> int:
    """Registers of 8 x 128 words a value takes; what is equal along a dimension is kept once.

    A register holds 8 x 128 elements of 32 bits, 16 x 128 of 16, 32 x 128 of 8.
    """
    count = 1
    last = len(shape) - 1
    for axis, size in enumerate(shape):
        if vary is not None and not vary[axis]:
            continue
        if axis == last:
            count *= -(-size // LANES)
        elif axis == last - 1:
            count *= -(-size // (SUBLANES * _packing(dtype)))
        else:
            count *= size
    return count


def vary_after_broadcast(source: tuple[int, ...], vary: Vary, result: tuple[int, ...]) -> Vary:
    """Which dimensions of a broadcast value vary."""
    new = len(result) - len(source)
    return (False,) * new + tuple(v and a == b for v, a, b in zip(vary, source, result[new:], strict=True))


def vary_after_cast(source: tuple[int, ...], vary: Vary, result: tuple[int, ...]) -> Vary:
    """Which dimensions vary after a shape cast: known where it only adds or drops dimensions of 1."""
    if not all(vary):
        kept = [(size, v) for size, v in zip(source, vary, strict=True) if size != 1]
        if [size for size, _ in kept] == [size for size in result if size != 1]:
            remaining = iter(kept)
            return tuple(True if size == 1 else next(remaining)[1] for size in result)
    return (True,) * len(result)


def moves_between_registers(source: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether a shape cast is work: rows become blocks of their own, or lanes are dealt out anew."""
    if len(source) < 2 or len(result) < 2 or source[-2:] == result[-2:]:
        return False
    if source[-1] != result[-1]:
        return source[-1] != 1 and result[-1] != 1
    if source[-2] % SUBLANES == 0 and result[-2] % SUBLANES == 0:
        return False
    return math.prod(source[:-1]) != 1 and math.prod(result[:-1]) != 1


def crosses_lanes(op: Op) -> bool:
    """Whether a slice or concatenation starts or ends inside a register's 128 lanes, so that lanes must be shifted."""
    last = len(op.results[0].shape or ()) - 1
    if op.name == "tpu.concatenate":
        return op.detail.get("dimension", (0,))[0] == last and any((v.shape or (0,))[-1] % LANES for v in op.operands)
    if op.name == "vector.extract_strided_slice":
        source, result = op.operands[0].shape or (0,), op.results[0].shape or (0,)
        return source[-1] != result[-1] and result[-1] % LANES != 0
    return False
