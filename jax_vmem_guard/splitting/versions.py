"""The JAX versions splitting was tried on.

A split rewrites JAX's own intermediate form, whose meaning may change with any release: what was proved against one
version's primitives says nothing about the next. Each release earned its place by passing the tests on it: library
kernels, refusals, mutations and random kernels (`tests/test_splitting_*.py`); elsewhere splitting stands aside.
"""

from __future__ import annotations

import re

import jax

from jax_vmem_guard.splitting.errors import Refused

TESTED = ((0, 8, 1), (0, 8, 2), (0, 8, 3), (0, 9, 0), (0, 9, 1), (0, 9, 2), (0, 10, 0), (0, 10, 1), (0, 10, 2), (0, 12, 0))


def stands_aside() -> str | None:
    """Why blocks are not split under this JAX, or None where they are."""
    version = tuple(int(part) for part in re.findall(r"\d+", jax.__version__)[:3])
    if version in TESTED:
        return None
    tested = ", ".join(".".join(str(part) for part in release) for release in TESTED)
    return f"block splitting was tested on jax {tested}, not on {jax.__version__}"


def require() -> None:
    """Raises `Refused` where splitting stands aside."""
    reason = stands_aside()
    if reason is not None:
        raise Refused(reason)
