"""A bound on what the kernels of a traced program can need, in microseconds, without decoding any of them.

Decoding a kernel takes about 3 ms, compiling a small one about 30 ms. Most kernels are far below their limit, and their
traced form shows it at once: twice the blocks of all operands, and the scratch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jax_vmem_guard import _jax
from jax_vmem_guard import _jax_pallas as jp


def far_below(closed_jaxpr: Any, limit_bytes: int) -> bool:
    """Whether windows and scratch of every kernel are within half of the limit, or of the one it sets itself.

    False where that is not certain, also for kernels that are no `pallas_call`. The other half is for what a body
    allocates or spills, which is not counted: this decides only whether to look closer before the first compile.
    """
    return _fits(jp.open_jaxpr(closed_jaxpr)[0], limit_bytes)


def _fits(jaxpr: Any, limit: int) -> bool:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            if 2 * _bound(eqn) > min(limit, _own_limit(eqn) or limit):
                return False
        elif eqn.primitive.name == "mpmd_map" or not all(
                _fits(jp.open_jaxpr(inner)[0], limit) for inner in _jax.subjaxprs(eqn.params)):
            return False
    return True


def _own_limit(eqn: Any) -> int | None:
    params = eqn.params.get("compiler_params")
    if hasattr(params, "values"):  # a mapping from the platform to its parameters, up to jax 0.9
        params = next((value for value in params.values()), None)
    return getattr(params, "vmem_limit_bytes", None)


def _bound(eqn: Any) -> int:
    total = 0
    for var in jp.open_jaxpr(eqn.params["jaxpr"])[0].invars:
        if jp.is_ref(var) and jp.memory_space(var.aval) in ("vmem", "default"):
            shape: tuple[int, ...] = (1, 1, *var.aval.shape)
            rows, columns = shape[-2:]
            total += 2 * math.prod(shape[:-2]) * -(-rows // 8) * 8 * -(-columns // 128) * 128 * _item_bytes(var.aval.dtype)
    return total


def _item_bytes(dtype: Any) -> int:
    try:
        return max(np.dtype(dtype).itemsize, 1)
    except TypeError:
        return 4
