"""Finds the `pallas_call`s of a traced program and replaces them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting import axes, kernel, versions
from jax_vmem_guard.splitting.axes import Axis, Split
from jax_vmem_guard.splitting.errors import Refused

#: Opens the reason of a refusal that no rule asked for.
INTERNAL = "the kernel could not be analysed"

Path = tuple[tuple[int, str, int], ...]  # one (equation, parameter, position in a tuple) per level; then (eqn, "", 0)


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """One TPU `pallas_call` of a traced program.

    Attributes:
      path: addresses it in the program.
      name: the kernel's name.
      source: "file:line" of the call, or None.
      grid: steps per axis; None for a size computed at run time; () for a kernel without a grid.
      blocks: block shapes of inputs and outputs, in order; () for an operand of rank 0.
      unused: positions of results that nothing in the program reads.
      eqn: the equation.
    """

    path: Path
    name: str
    source: str | None
    grid: tuple[int | None, ...]
    blocks: tuple[tuple[int, ...], ...]
    unused: frozenset[int]
    eqn: Any = field(repr=False, hash=False, compare=False)


def find_pallas_calls(closed_jaxpr: Any) -> tuple[CallSite, ...]:
    """Every `pallas_call` of the program that runs on a TensorCore, nested ones included, in program order."""
    return tuple(_find(jp.open_jaxpr(closed_jaxpr)[0], ()))


def _find(jaxpr: Any, path: Path) -> Iterator[CallSite]:
    used = {v for eqn in jaxpr.eqns for v in eqn.invars if not jp.is_literal(v)}
    used |= {v for v in jaxpr.outvars if not jp.is_literal(v)}
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == "pallas_call":
            if jp.for_tpu(eqn):
                yield _site(eqn, (*path, (index, "", 0)), used)
            continue
        for key, position, inner in _inner(eqn):
            yield from _find(jp.open_jaxpr(inner)[0], (*path, (index, key, position)))


def _site(eqn: Any, path: Path, used: set[Any]) -> CallSite:
    grid_mapping = eqn.params["grid_mapping"]
    return CallSite(
        path=path, name=jp.pallas_name(eqn), source=jp.source_of(eqn), eqn=eqn,
        grid=tuple(None if jp.is_dynamic_dim(s) else s for s in grid_mapping.grid),
        blocks=tuple(tuple(jp.block_size(b) for b in m.block_shape) for m in grid_mapping.block_mappings),
        unused=frozenset(i for i, v in enumerate(eqn.outvars) if jp.is_dropped(v) or v not in used))


def _inner(eqn: Any) -> Iterator[tuple[str, int, Any]]:
    for key, value in eqn.params.items():
        if jp.is_jaxpr(value):
            yield key, 0, value
        elif type(value) in (tuple, list):  # exactly: named tuples of parameters are no containers of jaxprs
            for position, one in enumerate(value):
                if jp.is_jaxpr(one):
                    yield key, position, one


def apply_splits(closed_jaxpr: Any, splits: Mapping[Path, Split]) -> Any:
    """The program with some of its kernels in smaller blocks; inputs and outputs stay as they are.

    Args:
      closed_jaxpr: a traced program.
      splits: what to do with the call at each path (`CallSite.path`).

    Raises:
      Refused: a split could not be proved right, or the JAX version is not one splitting was tried on.
      KeyError: a path leads to no call.
    """
    versions.require()
    sites = {site.path: site for site in find_pallas_calls(closed_jaxpr)}
    replaced = {path: split_call(sites[path], split) for path, split in splits.items()}
    return _replace(closed_jaxpr, (), replaced)


def _replace(value: Any, path: Path, replaced: Mapping[Path, Any]) -> Any:
    """`value`, a jaxpr at `path`, with the equations of `replaced` in the place of those they replace."""
    if not any(p[:len(path)] == path for p in replaced):
        return value
    jaxpr, _ = jp.open_jaxpr(value)
    eqns = []
    for index, eqn in enumerate(jaxpr.eqns):
        whole = replaced.get((*path, (index, "", 0)))
        if whole is not None:
            eqns.append(whole)
            continue
        params = dict(eqn.params)
        for key, position, inner in _inner(eqn):
            changed = _replace(inner, (*path, (index, key, position)), replaced)
            if changed is not inner:
                params[key] = _with_item(params[key], position, changed)
        eqns.append(eqn if all(params[k] is eqn.params[k] for k in params) else eqn.replace(params=params))
    return jp.with_jaxpr(value, jaxpr.replace(eqns=eqns))


def _with_item(container: Any, position: int, item: Any) -> Any:
    if type(container) not in (tuple, list):
        return item
    items = list(container)
    items[position] = item
    return type(container)(items)


def split_call(site: CallSite, split: Split) -> Any:
    """The call's equation after all axes of `split`, one after the other.

    Raises:
      Refused: with the reason, which names the axis.
    """
    eqn = site.eqn
    for axis, parts in axes.in_order(split):
        eqn = _one(eqn, axis, parts, site.unused, kernel.build)
    return eqn


def prove_call(site: CallSite, split: Split) -> tuple[kernel.ProvenSplit, ...]:
    """The proofs of all axes, without building the last kernel."""
    eqn, proofs = site.eqn, []
    for i, (axis, parts) in enumerate(axes.in_order(split)):
        proven = _one(eqn, axis, parts, site.unused, lambda p: p)
        proofs.append(proven)
        if i + 1 < len(split.axes):
            eqn = kernel.build(proven)
    return tuple(proofs)


def _one(eqn: Any, axis: Axis, parts: int, unused: frozenset[int], then: Callable[[kernel.ProvenSplit], Any]) -> Any:
    try:
        eqn, position, target = axes.with_axis(eqn, axis)
        return then(kernel.prove(eqn, position, parts, unused, target))
    except Refused as refusal:
        raise Refused(f"{axes.describe(axis)} in {parts} parts: {refusal.reason}") from None
    except Exception as error:  # whatever a kernel of a kind never seen does to the proof, its program is left alone
        raise Refused(f"{axes.describe(axis)} in {parts} parts: {INTERNAL}: {type(error).__name__}: {error}") from error
