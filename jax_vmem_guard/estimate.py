"""Needs that need no probe: what a kernel's own code shows for sure enough.

An estimate that turns out wrong costs a compile of the program, after which the guard probes; a probe costs a compile of
the kernel each time. So only two kinds of estimates are used: of kernels without spill slots, whose windows and scratch
follow an exact rule (footprint.py), and of kernels whose upper bound is within their limit.
"""

from __future__ import annotations

from jax_vmem_guard.chips import Chip
from jax_vmem_guard.footprint import Footprint, footprint
from jax_vmem_guard.kernels import Kernel
from jax_vmem_guard.planner import Need


def estimated_need(kernel: Kernel, chip: Chip, limit_bytes: int) -> Need | None:
    """The kernel's need without asking the compiler, or None where a probe must tell."""
    known = footprint(kernel, chip, limit_bytes)
    if known.unknown or not kernel.readable:
        return None
    if known.at_most_bytes <= limit_bytes or _is_exact(known):
        return Need(bytes=known.expected_bytes, fits=known.expected_bytes <= chip.capacity_bytes)
    return None


def _is_exact(known: Footprint) -> bool:
    return known.spill_bytes == 0 and known.forwarded_bytes == 0
