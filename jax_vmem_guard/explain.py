"""Words for people: what a diagnosis means and what to do about it."""

from __future__ import annotations

from jax_vmem_guard.chips import Chip
from jax_vmem_guard.diagnosis import Diagnosis


def explain(diagnosis: Diagnosis, chip: Chip | None = None) -> str:
    """What failed, in a sentence."""
    return f"{diagnosis.instruction or 'an instruction'} ran out of scoped VMEM" + (f" on {chip.name}" if chip else "")
