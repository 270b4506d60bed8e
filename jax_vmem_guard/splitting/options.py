"""What can be split in a kernel, in how many parts, at what cost; and why the rest cannot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.chips import Chip
from jax_vmem_guard.splitting import cost, versions, windows
from jax_vmem_guard.splitting.axes import Axis, NewAxis, Split
from jax_vmem_guard.splitting.cost import STEP_BYTES, Cost
from jax_vmem_guard.splitting.errors import Refused
from jax_vmem_guard.splitting.program import CallSite, prove_call
from jax_vmem_guard.splitting.ways import Label
from jax_vmem_guard.splitting.windows import Operand

PARTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)

#: A pair of axes is only offered with these, so that the list stays short.
PAIR_PARTS = (2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class SplitOption:
    """One way to make a kernel's blocks smaller.

    Attributes:
      split: what to hand to `apply_splits`.
      proven: the proof went through for these numbers of parts; of a pair, for the smallest ones.
      before, after: VMEM, traffic and steps, estimated.
      blocks: what becomes smaller: (name, block shape before, block shape after); scratch buffers included.
    """

    split: Split
    proven: bool
    before: Cost
    after: Cost
    blocks: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def refetched_bytes(self) -> int:
        """What is moved between HBM and VMEM in addition."""
        return max(0, self.after.fetched_bytes - self.before.fetched_bytes)

    @property
    def added_steps(self) -> int:
        return self.after.steps - self.before.steps

    @property
    def price(self) -> int:
        """Orders options: bytes fetched again, and steps in bytes."""
        return self.refetched_bytes + self.added_steps * STEP_BYTES


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An axis that cannot be split, and why. `axis` is None for the kernel as a whole."""

    axis: Axis | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Found:
    axis: Axis
    parts: int
    labels: tuple[Label, ...]
    chain: tuple[tuple[Axis, int], ...]  # usually ((axis, parts),)


def splits(site: CallSite, chip: Chip) -> tuple[tuple[SplitOption, ...], tuple[Refusal, ...]]:
    """All single axes with every k that is proved and gives whole tiles, and pairs of those; cheapest first.

    Args:
      site: a kernel of a traced program.
      chip: whose tiles and VMEM count.
    """
    aside = versions.stands_aside()
    if aside is not None:
        return (), (Refusal(axis=None, reason=aside),)
    operands = windows.operands(site.eqn, site.unused)
    found: list[_Found] = []
    refusals: list[Refusal] = []
    seen: set[tuple[Label, ...]] = set()
    for axis in _axes(site, operands, found):
        try:
            ways = _one_axis(site, axis)
        except Refused as refusal:
            refusals.append(Refusal(axis=axis, reason=refusal.reason))
            continue
        labels = ways[0].labels
        if isinstance(axis, NewAxis) and labels in seen:
            continue  # the same cut, named after another output
        seen.add(labels)
        found += ways
    grid = site.eqn.params["grid_mapping"].grid
    before = cost.cost(operands, grid, chip, {}, {})
    options = [_option((one,), operands, grid, chip, before) for one in found]
    options += [_option(pair, operands, grid, chip, before) for pair in _pairs(site, found)]
    return tuple(sorted(options, key=lambda o: (not o.proven, o.price, o.after.vmem_bytes))), tuple(refusals)


def _axes(site: CallSite, operands: Sequence[Operand], found: Sequence[_Found]) -> Iterator[Axis]:
    """Grid axes, then new ones along dimensions of outputs that no grid axis `found` so far cuts."""
    yield from range(len(site.grid))
    grid = site.eqn.params["grid_mapping"].grid
    named = {a for a in range(len(grid)) if grid[a] == 1}
    outputs = [o for o in operands if o.role == "output"]
    for position, output in enumerate(outputs):
        if output.unused:
            continue
        for dim, size in enumerate(output.shape):
            index = output.index[output.dims[dim]]
            if size > 1 and index.axis not in named and all(one.axis != index.axis or index.axis is None for one in found):
                yield NewAxis(position, dim)


def _one_axis(site: CallSite, axis: Axis) -> list[_Found]:
    """Every k that works; `Refused` with the reason of the first k where none does."""
    ways, first = [], None
    for parts in PARTS:
        chains: list[tuple[tuple[Axis, int], ...]] = [((axis, parts),)]
        if isinstance(axis, int):  # a loop over chunks is cut into single chunks first, and these then
            chains += [((axis, one), (axis, parts // one)) for one in PARTS if parts % one == 0 and one < parts]
        for chain in chains:
            try:
                labels = _whole_tiles(site, chain)
            except Refused as refusal:
                first = first or refusal
                if "loop over" not in refusal.reason:
                    break
            else:
                ways.append(_Found(axis=axis, parts=parts, labels=labels, chain=chain))
                break
    if not ways:
        raise first or Refused("no number of parts divides the block")
    return ways


def _whole_tiles(site: CallSite, chain: tuple[tuple[Axis, int], ...]) -> tuple[Label, ...]:
    """The labels under which the chain is proved; `Refused` where it is not, or where its parts are no whole tiles."""
    proofs = prove_call(site, Split(axes=chain))
    why = cost.aligned(proofs[-1].operands, proofs[-1].labels, chain[-1][1])
    if why is not None:
        raise Refused(why)
    return proofs[-1].labels


def _pairs(site: CallSite, found: Sequence[_Found]) -> Iterator[tuple[_Found, _Found]]:
    """Two axes that cut something different. New axes come first: they are put before the grid."""
    usable = [one for one in found if one.parts in PAIR_PARTS]
    together: dict[tuple[Axis, Axis], bool] = {}
    for first in usable:
        for second in usable:
            ordered = _rank(first.axis) < _rank(second.axis)
            if not ordered or any(a is not None and a == b for a, b in zip(first.labels, second.labels, strict=True)):
                continue
            axes = first.axis, second.axis
            if axes not in together:
                together[axes] = _proved(site, (*first.chain, *second.chain))
            if together[axes]:
                yield first, second


def _proved(site: CallSite, chain: tuple[tuple[Axis, int], ...]) -> bool:
    try:
        prove_call(site, Split(axes=chain))
    except Refused:
        return False
    return True


def _rank(axis: Axis) -> tuple[int, int, int]:
    return (1, axis, 0) if isinstance(axis, int) else (0, axis.output, axis.dim)


def _option(ways: Sequence[_Found], operands: Sequence[Operand], grid: Sequence[object], chip: Chip,
            before: Cost) -> SplitOption:
    parts: dict[int, dict[int, int]] = {}
    for one in ways:
        for operand, label in zip(operands, one.labels, strict=True):
            if label is not None:
                parts.setdefault(operand.position, {})[label] = one.parts
    finer = {one.axis: one.parts for one in ways if isinstance(one.axis, int)}
    new = math.prod(one.parts for one in ways if not isinstance(one.axis, int))
    return SplitOption(split=Split(axes=tuple(pair for one in ways for pair in one.chain)), proven=len(ways) == 1,
                       before=before, after=cost.cost(operands, grid, chip, parts, finer, new),
                       blocks=tuple(_block(operands[position], cut) for position, cut in sorted(parts.items())))


def _block(operand: Operand, cut: Mapping[int, int]) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    if operand.mapping is None:
        before, places = operand.shape, tuple(range(len(operand.shape)))
    else:
        before, places = tuple(jp.block_size(b) for b in operand.mapping.block_shape), operand.dims
    after = list(before)
    for dim, parts in cut.items():
        after[places[dim]] //= parts
    return operand.name, before, tuple(after)


