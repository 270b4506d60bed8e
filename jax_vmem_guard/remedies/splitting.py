"""Proven block splitting: the remedy's face towards the guard.

    sites = find_pallas_calls(closed_jaxpr)               # every TPU kernel of the traced program
    options, refusals = splits(site, chip)                # what can be cut, cheapest first; why the rest cannot
    smaller = apply_splits(closed_jaxpr, {site.path: options[0].split})

`apply_splits` gives a program with the same inputs and outputs, or raises `Refused`. How it is proved is in
`docs/splitting.md` and in the modules of `jax_vmem_guard.splitting`.
"""

from __future__ import annotations

from jax_vmem_guard.changes import Change
from jax_vmem_guard.chips import MiB
from jax_vmem_guard.splitting.axes import NewAxis, Split, describe
from jax_vmem_guard.splitting.errors import Refused
from jax_vmem_guard.splitting.options import Refusal, SplitOption, splits
from jax_vmem_guard.splitting.program import CallSite, Path, apply_splits, find_pallas_calls
from jax_vmem_guard.splitting.versions import stands_aside

__all__ = ["NAME", "CallSite", "NewAxis", "Path", "Refusal", "Refused", "Split", "SplitOption", "apply_splits",
           "change", "find_pallas_calls", "splits", "stands_aside"]

NAME = "split"


def change(site: CallSite, option: SplitOption, *, fingerprint: str, need_bytes: int | None = None) -> Change:
    """The record of splitting one kernel."""
    axes = " and ".join(f"{describe(axis)} in {parts} times as many steps" for axis, parts in option.split.axes)
    return Change(
        kernel=site.name, fingerprint=fingerprint, source=site.source, remedy=NAME, need_bytes=need_bytes,
        before=f"windows and scratch {option.before.vmem_bytes / MiB:.2f} MiB, {option.before.steps} grid steps",
        after=(f"windows and scratch {option.after.vmem_bytes / MiB:.2f} MiB, {option.after.steps} grid steps: "
               f"{axes}"),
        edit=f"{site.source or 'its pallas_call'}: {_edit(option)}",
        data={"axes": [[axis if isinstance(axis, int) else [axis.output, axis.dim], parts]
                       for axis, parts in option.split.axes]})


def from_data(data: dict[str, list[list[object]]]) -> Split:
    """The split that `Change.data` holds."""
    pairs = []
    for axis, parts in data["axes"]:
        assert isinstance(parts, int)
        pairs.append((axis if isinstance(axis, int) else NewAxis(*axis), parts))  # type: ignore[misc]
    return Split(axes=tuple(pairs))


def _edit(option: SplitOption) -> str:
    steps = [f"make {describe(axis)} {parts} times longer" if isinstance(axis, int) else
             f"add a grid axis of {parts} steps along dimension {axis.dim} of "
             f"output {axis.output}" for axis, parts in option.split.axes]
    blocks = [f"{name} {before} -> {after}" for name, before, after in option.blocks]
    return f"{' and '.join(steps)}; blocks: {', '.join(blocks)}"
