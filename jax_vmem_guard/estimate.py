"""Needs that need no probe: what a kernel's own code shows for sure enough.

An estimate that turns out wrong costs a compile of the program, after which the guard probes; a probe costs a compile of
the kernel each time. So only two kinds of estimates are used: of kernels that work value by value, which have no spill
slots and whose windows and scratch follow an exact rule (footprint.py), and of kernels whose upper bound is within their
limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jax_vmem_guard.chips import Chip
from jax_vmem_guard.footprint import Footprint, footprint
from jax_vmem_guard.kernel_analysis import analyse
from jax_vmem_guard.kernel_body import Op
from jax_vmem_guard.kernels import Kernel
from jax_vmem_guard.planner import Need


def estimated_need(kernel: Kernel, chip: Chip, limit_bytes: int) -> Need | None:
    """The kernel's need without asking the compiler, or None where a probe must tell."""
    known = footprint(kernel, chip, limit_bytes)
    if known.unknown or not kernel.readable:
        return None
    if known.at_most_bytes <= limit_bytes or _is_exact(kernel, known):
        return Need(bytes=known.expected_bytes, fits=known.expected_bytes <= chip.capacity_bytes)
    return None


#: Operations on one value at a time, or on none: the compiler holds nothing of a block while it works through it.
#: Transposes, reductions, matmuls and changes of shape may hold parts (a transpose of 32 MiB of windows: 1.6 MiB).
_VALUE_BY_VALUE = ("arith.", "math.", "scf.", "vector.load", "vector.store", "vector.broadcast", "tpu.vector_load",
                   "tpu.vector_store", "tpu.iota", "memref.load", "memref.store", "copy",
                   "func.return")


def _is_exact(kernel: Kernel, known: Footprint) -> bool:
    analysis = analyse(kernel.code) if kernel.code is not None else None
    return (known.spill_bytes == 0 and known.forwarded_bytes == 0 and analysis is not None
            and all(op.name.startswith(_VALUE_BY_VALUE) for op in _operations(analysis.ops)))


def _operations(ops: Iterable[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        for block in op.blocks:
            yield from _operations(block)
