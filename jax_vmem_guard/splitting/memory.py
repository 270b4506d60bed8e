"""Reads and writes of references, and how a part of a reference shows in them.

A reference in parts along `dim` can be read and written only where the access takes all of `dim`: then the value is in
parts along the dimension that `dim` becomes. An access that picks, slices or gathers along `dim` refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting.errors import Refused
from jax_vmem_guard.splitting.ways import Label

LOADS = frozenset({"get", "masked_load"})
STORES = frozenset({"swap", "addupdate", "masked_swap"})


@dataclass(frozen=True, kw_only=True)
class Access:
    """One load or store.

    Attributes:
      ref: the reference's variable.
      transforms: what is applied to it, with variables in the place of values.
      value: what is stored; None for a load.
      mask: mask of a masked access; other: what a masked load returns elsewhere.
      whole: variables that are needed whole: indices.
      adds: the store adds to what is there.
    """

    eqn: Any
    ref: Any
    transforms: tuple[Any, ...]
    value: Any = None
    mask: Any = None
    other: Any = None
    adds: bool = False

    @property
    def stores(self) -> bool:
        return self.value is not None

    @property
    def indices(self) -> list[Any]:
        return [leaf for leaf in jax.tree_util.tree_leaves(self.transforms) if hasattr(leaf, "aval")]


def access(eqn: Any) -> Access | None:
    """What the equation does to memory, or None where it is no access."""
    name = eqn.primitive.name
    if name == "get":
        return Access(eqn=eqn, ref=eqn.invars[0],
                      transforms=jax.tree_util.tree_unflatten(eqn.params["tree"], eqn.invars[1:]))
    if name in ("swap", "addupdate"):
        return Access(eqn=eqn, ref=eqn.invars[0], value=eqn.invars[1], adds=name == "addupdate",
                      transforms=jax.tree_util.tree_unflatten(eqn.params["tree"], eqn.invars[2:]))
    if name == "masked_load":
        ref, transforms, mask, other = jax.tree_util.tree_unflatten(eqn.params["args_tree"], eqn.invars)
        return Access(eqn=eqn, ref=ref, transforms=transforms, mask=mask, other=other)
    if name == "masked_swap":
        ref, transforms, value, mask = jax.tree_util.tree_unflatten(eqn.params["args_tree"], eqn.invars)
        return Access(eqn=eqn, ref=ref, transforms=transforms, value=value, mask=mask)
    return None


def bind(acc: Access, ref: Any, transforms: tuple[Any, ...], value: Any, mask: Any, other: Any) -> list[Any]:
    """Performs the access on other values."""
    name, params = acc.eqn.primitive.name, dict(acc.eqn.params)
    if name in ("get", "swap", "addupdate"):
        flat, params["tree"] = jax.tree_util.tree_flatten(transforms)
        return jp.bind(acc.eqn, [ref, *([] if name == "get" else [value]), *flat], params)
    args = (ref, transforms, mask, other) if name == "masked_load" else (ref, transforms, value, mask)
    flat, params["args_tree"] = jax.tree_util.tree_flatten(args)
    return jp.bind(acc.eqn, flat, params)


def ref_dim(acc: Access, dim: int) -> int:
    """The reference's dimension that becomes dimension `dim` of the value, taken as a whole on the way.

    Raises:
      Refused: a part of it is taken, or the access is of a kind that cannot be followed.
    """
    for indexer in reversed(_plain(acc)):
        kept = [d for d, index in enumerate(indexer.indices) if jp.is_slice(index)]
        dim = kept[dim]
        index = indexer.indices[dim]
        if not takes_all(index, indexer.shape[dim]):
            raise Refused(f"`{acc.eqn.primitive.name}` takes a part of a dimension that is split")
    return dim


def value_dim(acc: Access, dim: int) -> int:
    """The value's dimension that the reference's `dim` becomes.

    Raises:
      Refused: as `ref_dim`, or the access picks one element of it.
    """
    for indexer in _plain(acc):
        index = indexer.indices[dim]
        if not jp.is_slice(index):
            raise Refused(f"`{acc.eqn.primitive.name}` picks one index of a dimension that is split")
        if not takes_all(index, indexer.shape[dim]):
            raise Refused(f"`{acc.eqn.primitive.name}` takes a part of a dimension that is split")
        dim = sum(jp.is_slice(i) for i in indexer.indices[:dim])
    return dim


def _plain(acc: Access) -> tuple[Any, ...]:
    plain = jp.indexers(acc.transforms)
    if plain is None:
        raise Refused(f"`{acc.eqn.primitive.name}` reads a split reference through a bitcast, reshape or transpose")
    if any(indexer.int_indexer_shape != () for indexer in plain):
        raise Refused(f"`{acc.eqn.primitive.name}` indexes a split reference by an array")
    return plain


def takes_all(index: Any, extent: int) -> bool:
    """Whether the index is a slice of the whole dimension. One as long as the dimension starts at 0, whatever its
    start is computed from: any other start would run out of the buffer."""
    return jp.is_slice(index) and _static(index.size) == extent and index.stride == 1


def _static(value: Any) -> int | None:
    if isinstance(value, int):
        return value
    if hasattr(value, "aval") and jp.is_literal(value):
        return int(value.val)
    return None


def is_full(acc: Access, shape: tuple[int, ...]) -> bool:
    """Whether the access covers the whole reference, unmasked."""
    plain = jp.indexers(acc.transforms)
    if plain is None or acc.mask is not None:
        return False
    return all(takes_all(index, extent) or (extent == 1 and not jp.is_slice(index)) for indexer in plain
               for index, extent in zip(indexer.indices, indexer.shape, strict=True))


def shrink(acc: Access, transforms: tuple[Any, ...], label: Label, parts: int) -> tuple[Any, ...]:
    """`transforms` (values in the place of variables) for a reference in parts along `label`."""
    if label is None:
        return transforms
    dim, changed = label, []
    for indexer in transforms:
        extent = indexer.shape[dim] // parts
        changed.append(jp.reslice(indexer, dim, 0, extent, extent))
        dim = sum(jp.is_slice(i) for i in indexer.indices[:dim])
    return tuple(changed)
