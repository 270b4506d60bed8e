"""The JAX versions splitting was tried on.

A split rewrites JAX's own intermediate form, whose meaning may change with any release: what was proved against one
version's primitives says nothing about the next. Each version earned its place by passing the numeric tests
(`tests/test_splitting_*.py`) on it; elsewhere splitting stands aside.
"""

from __future__ import annotations

import jax

from jax_vmem_guard.splitting.errors import Refused

TESTED = ((0, 8), (0, 9), (0, 10), (0, 12))


def stands_aside() -> str | None:
    """Why blocks are not split under this JAX, or None where they are."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version in TESTED:
        return None
    tested = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
    return f"block splitting was tested on jax {tested}, not on {jax.__version__}"


def require() -> None:
    """Raises `Refused` where splitting stands aside."""
    reason = stands_aside()
    if reason is not None:
        raise Refused(reason)
