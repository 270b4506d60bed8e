"""The only file that touches JAX's private parts.

Every touch names the JAX versions it was seen in. What is missing fails loudly, with the version, at the time of use.
"""

from __future__ import annotations

from typing import Any

import jax


class IncompatibleJax(RuntimeError):
    """A private part of JAX that the guard needs is not where it was."""


def _require(obj: Any, name: str) -> Any:
    """`obj.name`, or `IncompatibleJax` that names the attribute and the version."""
    try:
        return getattr(obj, name)
    except AttributeError:
        where = getattr(obj, "__name__", type(obj).__name__)
        raise IncompatibleJax(
            f"jax_vmem_guard needs `{where}.{name}`, which jax {jax.__version__} does not have; it was seen in jax "
            "0.8.1 to 0.12.0. Install a jax from that range, or a newer jax_vmem_guard."
        ) from None
