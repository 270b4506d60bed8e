"""Builds what is compiled: the program with its changes, and one kernel of it alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from jax_vmem_guard import _jax, custom_call, planner
from jax_vmem_guard.changes import Change
from jax_vmem_guard.chips import Chip
from jax_vmem_guard.kernels import Kernel, read_kernels
from jax_vmem_guard.planner import Variant
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.remedies import MODULE_REMEDIES, limit
from jax_vmem_guard.resplit import Resplitter

logger = logging.getLogger("jax_vmem_guard")


class Builder:
    """Makes changed copies of one program. JAX's own module is never edited.

    Changes of a kernel's custom call are written into a copy of the module; a split goes back to the traced program,
    which is rewritten and lowered again first.
    """

    def __init__(self, program: _jax.Program, chip: Chip, policy: Policy):
        self._program, self._chip, self._policy = program, chip, policy
        self.kernels: tuple[Kernel, ...] = read_kernels(program.module)
        self._by_fingerprint = {kernel.fingerprint: kernel for kernel in self.kernels}
        self._resplitter = Resplitter(program, chip)
        #: Which kernel of the program each custom call of the module built last stands for.
        self._ordinals = {kernel.ordinal: kernel.fingerprint for kernel in self.kernels}

    def proposals(self, remedy: str, kernel: Kernel, need_bytes: int, target_bytes: int) -> tuple[Change, ...]:
        """What one remedy proposes to bring the kernel's need down to `target_bytes`."""
        proposer = MODULE_REMEDIES.get(remedy, self._resplitter)
        try:
            return proposer.propose(kernel, need_bytes=need_bytes, target_bytes=target_bytes, chip=self._chip,
                                    policy=self._policy)
        except Exception:
            # A fault in one remedy must not take the others along.
            logger.exception("jax_vmem_guard: the remedy `%s` failed on `%s`; the others are tried", remedy, kernel.name)
            return ()

    @property
    def cannot_split(self) -> bool:
        """Whether the traced program, which splitting rewrites, is not there."""
        return self._resplitter.without_trace

    def alone(self, fingerprint: str, variant: Variant) -> Any:
        """A module with only this kernel, changed, its limit at what the chip can give it.

        Raises:
          Exception: of JAX or of a remedy, where the kernel cannot be changed or lowered so.
        """
        kernel = self._by_fingerprint[fingerprint]
        at_most = limit.set_to(kernel, planner.ceiling(variant, self._chip), need_bytes=None, limit_bytes=0)
        split = _split_of(variant)
        if split is None:
            module = custom_call.isolate(self._program.module, kernel.ordinal)
        else:
            module = custom_call.isolate(self._resplitter.lowered_alone(fingerprint, split), 0)
        return _edited(module, {0: (*variant, at_most)})

    def changed(self, plan: Mapping[str, tuple[Change, ...]]) -> Any:
        """A copy of the program's module with the plan applied, its kernels labelled."""
        splits = {f: split for f, changes in plan.items() if (split := _split_of(changes)) is not None}
        module = self._program.module
        if splits:
            module, split_into = self._resplitter.lowered_again(splits)
            self._ordinals = {k.ordinal: split_into.get(k.fingerprint, k.fingerprint) for k in read_kernels(module)}
        else:
            self._ordinals = {kernel.ordinal: kernel.fingerprint for kernel in self.kernels}
        labelled = custom_call.label(module)
        return _edited(labelled, {ordinal: plan.get(fingerprint, ()) for ordinal, fingerprint in self._ordinals.items()})

    def labelled(self, label: str | None) -> str | None:
        """The fingerprint of the kernel that a label of the module built last ("k7") stands for, or None."""
        known = label and label[:1] == "k" and label[1:].isdigit()
        return self._ordinals.get(int(label[1:])) if known and label else None


def _split_of(changes: tuple[Change, ...]) -> Change | None:
    return next((change for change in changes if change.remedy == Resplitter.NAME), None)


def _edited(module: Any, changes: Mapping[int, tuple[Change, ...]]) -> Any:
    """A copy of `module` with changes made to its custom calls, by ordinal."""

    def change(ordinal: int, config: dict[str, Any]) -> bool:
        written = [one for one in changes.get(ordinal, ()) if one.remedy in MODULE_REMEDIES]
        for one in written:
            MODULE_REMEDIES[one.remedy].apply(config, one)
        return bool(written)

    return custom_call.edit(module, change)
