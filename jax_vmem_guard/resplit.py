"""Block splitting inside the compile loop: from a kernel of the lowered program to its equation, and back.

A kernel read from the module and the equation it came from are matched by fingerprint: the equation, lowered alone,
gives the same kernel.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax_vmem_guard import _jax
from jax_vmem_guard.changes import Change
from jax_vmem_guard.chips import Chip
from jax_vmem_guard.kernels import Kernel, read_kernels
from jax_vmem_guard.policy import Policy

#: What a split leaves is partly hope: how the kernel's temporaries shrink only a compile shows. So after splits that
#: should just fit come some that should fit with room to spare: (share of the target, how many, how many of one axis).
ROOM = ((1.0, 4, 2), (0.5, 3, 1), (0.25, 2, 1))

#: How many splits that do not suffice alone are worth trying together with another remedy.
MOST_IN_COMPANY = 3


class Resplitter:
    """Splits kernels of one program."""

    NAME = "split"

    def __init__(self, program: _jax.Program, chip: Chip):
        self._program, self._chip = program, chip
        self._known_options: dict[str, tuple[Any, ...]] = {}

    @functools.cached_property
    def _sites(self) -> dict[str, list[Any]]:
        """Fingerprint -> the `pallas_call`s of the traced program that lower to it."""
        from jax_vmem_guard.remedies import splitting

        closed_jaxpr = self._program.lowering.closed_jaxpr if self._program.lowering is not None else None
        sites: dict[str, list[Any]] = {}
        if closed_jaxpr is None:
            return sites
        for site in splitting.find_pallas_calls(closed_jaxpr):
            try:
                with self._settings():
                    [kernel] = read_kernels(self._lower(site.eqn))
            except Exception:  # an equation that cannot stand alone, by whatever error of JAX's, is not split
                continue
            sites.setdefault(kernel.fingerprint, []).append(site)
        return sites

    def _settings(self) -> contextlib.AbstractContextManager[Any]:
        lowering = self._program.lowering
        return lowering.in_its_settings() if lowering is not None else contextlib.nullcontext()

    @property
    def without_trace(self) -> bool:
        """Whether the traced program is not there: it was lowered before the guard was, or its function is gone."""
        return self._program.lowering is None or self._program.lowering.closed_jaxpr is None

    def _lower(self, equation: Any) -> Any:
        return _jax.lower_equation(equation, self._program.devices[0])

    def propose(self, kernel: Kernel, *, need_bytes: int, target_bytes: int, chip: Chip,
                policy: Policy) -> tuple[Change, ...]:
        """Splits that should bring the need down to the target, those that cost least first.

        Then those that leave too much alone, but not if the windows had one buffer each: `data["with_others"]` marks them.
        """
        from jax_vmem_guard.remedies import splitting

        del policy
        sites = self._sites.get(kernel.fingerprint)
        if not sites:
            return ()
        options = self._options(kernel.fingerprint, chip)
        alone = _with_room(options, need_bytes, target_bytes)
        company = [o for o in options if _hoped(need_bytes, o) > target_bytes
                   >= _hoped(need_bytes, o) - o.after.window_bytes // 2][:MOST_IN_COMPANY]
        changes = [splitting.change(sites[0], option, fingerprint=kernel.fingerprint) for option in (*alone, *company)]
        return tuple(change if i < len(alone) else replace(change, data={**change.data, "with_others": True})
                     for i, change in enumerate(changes))

    def _options(self, fingerprint: str, chip: Chip) -> tuple[Any, ...]:
        """What the kernel's splits are; proved once, asked for at every step of the planner."""
        from jax_vmem_guard.remedies import splitting

        if fingerprint not in self._known_options:
            with self._settings():
                self._known_options[fingerprint], _ = splitting.splits(self._sites[fingerprint][0], chip)
        return self._known_options[fingerprint]

    def lowered_alone(self, fingerprint: str, change: Change) -> Any:
        """The split kernel, lowered for one device with nothing around it."""
        from jax_vmem_guard.remedies import splitting
        from jax_vmem_guard.splitting.program import split_call

        with self._settings():
            return self._lower(split_call(self._sites[fingerprint][0], splitting.from_data(change.data)))

    def lowered_again(self, changes: Mapping[str, Change]) -> tuple[Any, dict[str, str]]:
        """The program's module with kernels split, and the fingerprint each split kernel had before."""
        from jax_vmem_guard.remedies import splitting

        assert self._program.lowering is not None
        wanted = {site.path: splitting.from_data(change.data)
                  for fingerprint, change in changes.items() for site in self._sites[fingerprint]}
        with self._settings():
            rewritten = splitting.apply_splits(self._program.lowering.closed_jaxpr, wanted)
        before = {}
        for fingerprint, change in changes.items():
            [kernel] = read_kernels(self.lowered_alone(fingerprint, change))
            before[kernel.fingerprint] = fingerprint
        return self._program.lower_again(rewritten).module, before


def _with_room(options: Sequence[Any], need_bytes: int, target_bytes: int) -> list[Any]:
    """The cheapest options that should fit, then the cheapest that should fit with more and more room."""
    kept: list[Any] = []
    for share, most, most_of_one in ROOM:
        taken: list[Any] = []
        for option in options:
            axes = _axes(option)
            if (len(taken) < most and option not in kept and _hoped(need_bytes, option) <= share * target_bytes
                    and sum(axes == _axes(other) for other in taken) < most_of_one):
                taken.append(option)
        kept += taken
    return kept


def _axes(option: Any) -> list[Any]:
    return [axis for axis, _ in option.split.axes]


def _hoped(need_bytes: int, option: Any) -> int:
    """The need after a split: windows and scratch by arithmetic; what the body adds shrinks with the parts, at best."""
    parts = math.prod(count for _, count in option.split.axes)
    body = max(0, need_bytes - option.before.vmem_bytes)
    return option.after.vmem_bytes + body // parts
