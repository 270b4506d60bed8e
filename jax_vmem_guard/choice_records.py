"""What is recorded and said of declared choices."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from jax_vmem_guard.changes import Change
from jax_vmem_guard.declared import FALLBACK, Declaration
from jax_vmem_guard.kernels import Kernel

logger = logging.getLogger("jax_vmem_guard")


def change_of(key: str, site: Declaration, before: int, after: int, owned: tuple[Kernel, ...],
              need_bytes: int | None) -> Change:
    """The record of another choice at one site; `owned` are kernels the program has with the first one."""
    kernel = owned[0] if owned else None
    if site.kind == FALLBACK:
        edit = f"{site.where}: call `{site.choices[after].words}` where the kernel does not fit"
    else:
        edit = f"{site.where}: put {site.choices[after].words} first among the choices of `{site.name}`"
    return Change(
        kernel=kernel.name if kernel else site.name, fingerprint=kernel.fingerprint if kernel else "",
        source=kernel.source if kernel else site.where, remedy=site.kind, before=site.describe(before),
        after=site.describe(after), need_bytes=need_bytes, edit=edit,
        data={"site": key, "choice": after, "words": site.choices[after].words})


def references_to_try(sites: Mapping[str, Declaration], chosen: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Sites whose reference is asked for where a kernel is refused: one at a time first, then all of them."""
    keys = tuple(key for key, site in sites.items()
                 if site.kind == FALLBACK and "lowering" in site.reasons and not chosen.get(key, 0))
    yield from ((key,) for key in keys)
    if len(keys) > 1:
        yield keys


_said: set[tuple[Declaration, str]] = set()


def say_reference_is_used(site: Declaration, where: str, reason: str) -> None:
    """One warning for each fallback and chip."""
    if (site, where) not in _said:
        _said.add((site, where))
        kernel, reference = (choice.words for choice in site.choices)
        logger.warning("FALLBACK on %s: `%s` runs in the place of `%s` (%s), because %s. It may be much slower.",
                       where, reference, kernel, site.where, reason)
