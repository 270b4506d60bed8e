"""Decides what to change. Pure: the same kernels, needs, chip and policy always give the same answer.

The planner never compiles. It answers with the next kernel variants whose need it has to know, or with the changes to
make; `guard.py` asks the compiler and comes back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from jax_vmem_guard.changes import Change
from jax_vmem_guard.chips import Chip, KiB
from jax_vmem_guard.kernels import Kernel
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.remedies import limit

#: A variant of a kernel: the changes made to it, its limit aside.
Variant = tuple[Change, ...]

#: proposals(remedy, kernel, need_bytes, target_bytes) -> changes that bring the need down, least first.
Proposals = Callable[[str, Kernel, int, int], tuple[Change, ...]]

#: Remedies that make the need itself smaller, as opposed to those that allow more.
SHRINKING = ("buffering", "coloring", "split")


@dataclass(frozen=True, kw_only=True)
class Need:
    """What the compiler said of one variant of a kernel, compiled alone at the chip's capacity.

    Attributes:
      bytes: scoped VMEM it uses (exact where `fits`), or what the failing compile reported; None if it said nothing.
      fits: it compiled.
      problem: why it could not be compiled alone, where VMEM was not the reason.
    """

    bytes: int | None
    fits: bool
    problem: str | None = None


@dataclass(frozen=True)
class Probe:
    """The planner has to know what this variant needs."""

    variant: Variant


@dataclass(frozen=True)
class Decision:
    """What to do with a kernel: `changes` is empty where it may stay as it is."""

    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Stuck:
    """No allowed remedy makes the kernel fit; `need_bytes` is the smallest need seen."""

    need_bytes: int | None
    reason: str


Step = Probe | Decision | Stuck


def decide(kernel: Kernel, *, limit_bytes: int, needs: Mapping[Variant, Need], refused: frozenset[Variant], chip: Chip,
           policy: Policy, proposals: Proposals) -> Step:
    """The next step for one kernel.

    Args:
      kernel: the kernel as the program has it.
      limit_bytes: the scoped VMEM limit in force for it.
      needs: what is known of its variants; `()` is the kernel unchanged.
      refused: variants that did not survive the compile of the whole program.
      chip: the chip it is compiled for.
      policy: what is allowed.
      proposals: asks one remedy for its changes.
    """
    if () not in needs:
        return Probe(())
    plain = needs[()]
    if plain.fits and plain.bytes is not None and plain.bytes <= limit_bytes and () not in refused:
        return Decision(())
    may_raise = "limit" in policy.remedies
    target = chip.capacity_bytes if may_raise else min(limit_bytes, chip.capacity_bytes)
    best = plain.bytes
    for variant in _variants(kernel, plain, target, policy, proposals):
        if variant in refused:
            continue
        need = needs.get(variant)
        if need is None:
            return Probe(variant)
        if need.bytes is not None:
            best = need.bytes if best is None else min(best, need.bytes)
        if need.fits and need.bytes is not None and need.bytes <= target:
            return Decision(_finish(kernel, variant, need.bytes, limit_bytes, chip))
    return Stuck(best, _why_stuck(kernel, plain, chip, policy))


def _variants(kernel: Kernel, plain: Need, target: int, policy: Policy, proposals: Proposals) -> Iterator[Variant]:
    """Variants in the order they are worth trying: one remedy alone first, then two together."""
    yield ()
    need = plain.bytes if plain.bytes is not None else _beyond(target)
    proposed = {remedy: proposals(remedy, kernel, need, target) for remedy in policy.remedies if remedy in SHRINKING}
    alone = {remedy: tuple(c for c in changes if not c.data.get("with_others")) for remedy, changes in proposed.items()}
    for changes in alone.values():
        yield from ((change,) for change in changes if not change.data.get("last_resort"))
    for changes in alone.values():
        yield from ((change,) for change in changes if change.data.get("last_resort"))
    # Two remedies together, each at its strongest: what one alone did not reach.
    strongest = {remedy: changes[-1] for remedy, changes in alone.items() if changes}
    yield from itertools.combinations(strongest.values(), 2)
    if len(strongest) > 2:
        yield tuple(strongest.values())
    for remedy, changes in proposed.items():
        for change in (c for c in changes if c.data.get("with_others")):
            yield from _in_company(remedy, change, strongest)


def _in_company(remedy: str, change: Change, strongest: Mapping[str, Change]) -> Iterator[Variant]:
    """A change that does not suffice alone, with each other remedy at its strongest, then with all of them."""
    others = [other for other in strongest if other != remedy]
    for count in sorted({1, len(others)} - {0}):
        for company in itertools.combinations(others, count):
            yield tuple({**strongest, remedy: change}[one] for one in SHRINKING if one in (remedy, *company))


def _beyond(target: int) -> int:
    """A stand-in for a need that is unknown but above `target` bytes."""
    return 2 * target


def _finish(kernel: Kernel, variant: Variant, need: int, limit_bytes: int, chip: Chip) -> tuple[Change, ...]:
    """The variant, its need noted, and a raised limit where the need still exceeds the one in force."""
    known = tuple(with_need(change, need) for change in variant)
    if need <= limit_bytes:
        return known
    return (*known, limit.raise_to(kernel, need_bytes=need, limit_bytes=limit_bytes, ceiling=ceiling(variant, chip)))


def ceiling(variant: Variant, chip: Chip) -> int:
    """The most a kernel's limit may be: the chip's capacity, less what the variant's coloring takes of it."""
    return min([chip.capacity_bytes, *(change.data["room_bytes"] for change in variant if "room_bytes" in change.data)])


def with_need(change: Change, need_bytes: int | None) -> Change:
    """The change, with what the kernel needs after it."""
    return replace(change, need_bytes=need_bytes)


def _why_stuck(kernel: Kernel, plain: Need, chip: Chip, policy: Policy) -> str:
    if plain.problem:
        return f"`{kernel.name}` could not be compiled alone: {plain.problem}"
    tried = ", ".join(policy.remedies) or "no remedy"
    return f"`{kernel.name}` does not fit {chip.name} with the allowed remedies ({tried})"


def limit_in_force(kernel: Kernel, *, chip: Chip, flag_bytes: int | None) -> int:
    """The limit the compiler applies: the kernel's own wins over the flag, both end at the chip's capacity."""
    own = kernel.limit_bytes if kernel.limit_bytes is not None else flag_bytes
    return min(own if own is not None else chip.default_limit_bytes, chip.capacity_bytes)


def flag_bytes(compiler_options: Mapping[str, object], init_args: str) -> int | None:
    """The process- or compile-wide limit, `xla_tpu_scoped_vmem_limit_kib`, in bytes; None where nobody set it."""
    value = compiler_options.get("xla_tpu_scoped_vmem_limit_kib")
    if value is None:
        for argument in init_args.split():
            name, _, text = argument.lstrip("-").partition("=")
            if name == "xla_tpu_scoped_vmem_limit_kib":
                value = text
    try:
        return int(str(value)) * KiB if value is not None else None
    except ValueError:
        return None
