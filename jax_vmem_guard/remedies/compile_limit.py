"""Raises the limit of one whole compile, where the instruction that failed is not a kernel.

The limit goes to the compiler as the option `xla_tpu_scoped_vmem_limit_kib` of that one compile, never through the
environment, which libtpu reads only once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax_vmem_guard.changes import Change
from jax_vmem_guard.chips import Chip, KiB, MiB
from jax_vmem_guard.diagnosis import Diagnosis
from jax_vmem_guard.remedies.limit import with_margin
from jax_vmem_guard.used_vmem import InstructionVmem

NAME = "compile_limit"
OPTION = "xla_tpu_scoped_vmem_limit_kib"


def next_change(diagnosis: Diagnosis, *, previous: Change | None, flag_bytes: int, chip: Chip) -> Change | None:
    """The next limit to try: what the message asks for, and the chip's capacity if that was not enough.

    Args:
      diagnosis: the failure of an instruction that is no kernel; its size is a lower bound of the need.
      previous: the change that was in force when it failed, or None.
      flag_bytes: the limit without any change, in bytes: the caller's own option, the process's flag or the default.
      chip: the chip; its capacity is the most that can be asked for.

    Returns:
      A change, or None where the limit is at the chip's capacity already.
    """
    floor = max(flag_bytes, previous.data["limit_bytes"] if previous else 0)
    if floor >= chip.capacity_bytes:
        return None
    wanted = with_margin(diagnosis.size_bytes, chip) if diagnosis.size_bytes else chip.capacity_bytes
    if previous is not None or wanted <= floor:
        wanted = chip.capacity_bytes
    return _change(diagnosis.instruction, diagnosis.source, wanted, need=diagnosis.size_bytes, flag_bytes=flag_bytes,
                   chip=chip)


def tightened(change: Change, used: Iterable[InstructionVmem], chip: Chip) -> Change:
    """The change with its limit at what the instructions that follow it really used."""
    most = max((row.used_bytes or 0 for row in used if not row.is_kernel), default=0)
    before = change.data["flag_bytes"]
    if change.data["limit_bytes"] < chip.capacity_bytes or not before < with_margin(most, chip) < chip.capacity_bytes:
        return change
    return _change(change.kernel, change.source, with_margin(most, chip), need=most, flag_bytes=before, chip=chip)


def _change(instruction: str | None, source: str | None, limit_bytes: int, *, need: int | None, flag_bytes: int,
            chip: Chip) -> Change:
    kib = -(-limit_bytes // KiB)
    return Change(
        kernel=instruction or "(an XLA instruction)", fingerprint="", source=source, remedy=NAME,
        before=f"limit of the compile {flag_bytes / MiB:.2f} MiB", after=f"limit of the compile {kib / KiB:.2f} MiB",
        need_bytes=need, edit=f'compiler_options={{"{OPTION}": "{kib}"}} in jax.jit(...) or .compile(...)',
        data={"limit_bytes": min(kib * KiB, chip.capacity_bytes), "flag_bytes": flag_bytes})


def options(change: Change) -> dict[str, Any]:
    """The compiler options that make the change. libtpu wants the number as a string (0.0.30 to 0.0.52)."""
    return {OPTION: str(-(-change.data["limit_bytes"] // KiB))}
