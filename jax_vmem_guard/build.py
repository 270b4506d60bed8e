"""Builds what is compiled: the program with its changes, and one kernel of it alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_vmem_guard import _jax, custom_call
from jax_vmem_guard.changes import Change
from jax_vmem_guard.chips import Chip
from jax_vmem_guard.kernels import Kernel, read_kernels
from jax_vmem_guard.planner import Variant
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.remedies import MODULE_REMEDIES, limit


class Builder:
    """Makes changed copies of one program. JAX's own module is never edited."""

    def __init__(self, program: _jax.Program, chip: Chip, policy: Policy):
        self._program, self._chip, self._policy = program, chip, policy
        self.kernels: tuple[Kernel, ...] = read_kernels(program.module)
        self._by_fingerprint = {kernel.fingerprint: kernel for kernel in self.kernels}
        self._ordinals = {kernel.ordinal: kernel.fingerprint for kernel in self.kernels}

    def proposals(self, remedy: str, kernel: Kernel, need_bytes: int, target_bytes: int) -> tuple[Change, ...]:
        """What one remedy proposes to bring the kernel's need down to `target_bytes`."""
        module_remedy = MODULE_REMEDIES.get(remedy)
        if module_remedy is None:
            return ()
        return module_remedy.propose(kernel, need_bytes=need_bytes, target_bytes=target_bytes, chip=self._chip,
                                     policy=self._policy)

    def alone(self, fingerprint: str, variant: Variant) -> Any:
        """A module with only this kernel, changed, its limit at the chip's capacity."""
        kernel = self._by_fingerprint[fingerprint]
        at_capacity = limit.set_to(kernel, self._chip.capacity_bytes, need_bytes=None, limit_bytes=0)
        module = custom_call.isolate(self._program.module, kernel.ordinal)
        return _edited(module, {0: (*variant, at_capacity)})

    def changed(self, plan: Mapping[str, tuple[Change, ...]]) -> Any:
        """A copy of the program's module with the plan applied, its kernels labelled."""
        labelled = custom_call.label(self._program.module)
        return _edited(labelled, {ordinal: plan.get(fingerprint, ()) for ordinal, fingerprint in self._ordinals.items()})

    def is_label_of(self, label: str | None, fingerprint: str) -> bool:
        """Whether a label the compiler shows belongs to a kernel with this fingerprint."""
        ordinal = labelled_ordinal(label)
        return ordinal is not None and self._ordinals.get(ordinal) == fingerprint


def labelled_ordinal(label: str | None) -> int | None:
    """The ordinal in a label that `custom_call.label` gave ("k7" -> 7), or None."""
    return int(label[1:]) if label and label[:1] == "k" and label[1:].isdigit() else None


def _edited(module: Any, changes: Mapping[int, tuple[Change, ...]]) -> Any:
    """A copy of `module` with changes made to its custom calls, by ordinal.

    Limits come first: coloring lowers the limit to what the colored arrays leave of the chip.
    """

    def change(ordinal: int, config: dict[str, Any]) -> bool:
        for one in sorted(changes.get(ordinal, ()), key=lambda c: c.remedy != limit.NAME):
            MODULE_REMEDIES[one.remedy].apply(config, one)
        return bool(changes.get(ordinal))

    return custom_call.edit(module, change)
