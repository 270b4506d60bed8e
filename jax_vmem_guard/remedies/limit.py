"""Raises the scoped VMEM limit of one kernel: `vmem_limit_bytes`, written into its custom call."""

from __future__ import annotations

from typing import Any

from jax_vmem_guard.changes import Change
from jax_vmem_guard.chips import Chip, KiB, MiB
from jax_vmem_guard.kernels import Kernel

NAME = "limit"

#: Room above the measured need. The need of a kernel inside a program was never above its need alone by more than a
#: few spill slots (4 KiB each); the margin is rounded so that limits read well.
MARGIN_BYTES = 128 * KiB
GRANULE_BYTES = 64 * KiB


def with_margin(need_bytes: int, chip: Chip) -> int:
    """The limit for a kernel that needs `need_bytes`: at most 192 KiB above the need, never above the chip."""
    return _with_margin(need_bytes, chip.capacity_bytes)


def _with_margin(need_bytes: int, ceiling: int) -> int:
    rounded = -(-(need_bytes + MARGIN_BYTES) // GRANULE_BYTES) * GRANULE_BYTES
    # A small kernel gets less margin: 10 % of its need is the most that this project promises.
    capped = min(rounded, need_bytes + need_bytes // 10)
    return min(max(capped, need_bytes), ceiling)


def raise_to(kernel: Kernel, *, need_bytes: int, limit_bytes: int, ceiling: int) -> Change:
    """Raise the kernel's limit from `limit_bytes` to its need plus the margin, at most to `ceiling` bytes."""
    return set_to(kernel, _with_margin(need_bytes, ceiling), need_bytes=need_bytes, limit_bytes=limit_bytes)


def set_to(kernel: Kernel, after_bytes: int, *, need_bytes: int | None, limit_bytes: int) -> Change:
    """Set the kernel's limit to exactly `after_bytes`."""
    whose = "set by the kernel" if kernel.limit_bytes is not None else "default"
    return Change(
        kernel=kernel.name, fingerprint=kernel.fingerprint, source=kernel.source, remedy=NAME,
        before=f"limit {limit_bytes / MiB:.2f} MiB ({whose})", after=f"limit {after_bytes / MiB:.2f} MiB",
        need_bytes=need_bytes,
        edit=(f"{kernel.source or 'its pallas_call'}: "
              f"compiler_params=pltpu.CompilerParams(vmem_limit_bytes={after_bytes})"),
        data={"limit_bytes": after_bytes})


def apply(config: dict[str, Any], change: Change) -> None:
    """Write the limit into a custom call's backend config."""
    config["scoped_memory_configs"] = [{"memory_space": 1, "offset": 0, "size": change.data["limit_bytes"]}]
