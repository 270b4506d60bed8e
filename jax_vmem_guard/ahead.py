"""What can be said before the first compile: whether it is sure to fail, or likely to."""

from __future__ import annotations

import os

from jax_vmem_guard import _jax, custom_call, planner
from jax_vmem_guard.chips import Chip, chip_for_device_kind
from jax_vmem_guard.kernels import Kernel, read_kernels
from jax_vmem_guard.learned import LEARNED
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.quick_bound import far_below


def outlook(program: _jax.Program, policy: Policy) -> str:
    """"certain": the program needs a change before the compiler sees it; "likely": it may well fail; or "open".

    With `Policy.ahead` at "certain" (default) a program is changed first only if one of its kernels needs more than its
    limit whatever XLA does; with "expected" also if that is only expected.
    """
    chip = chip_for_device_kind(program.device_kind)
    if chip is None or (policy.ahead == "never" and not policy.speculate):
        return "open"
    flag = planner.flag_bytes(program.compiler_options, os.environ.get("LIBTPU_INIT_ARGS", ""))
    default = flag if flag is not None else chip.default_limit_bytes
    traced = program.lowering.closed_jaxpr if program.lowering is not None else None
    only_sure = policy.ahead == "certain" and not policy.speculate
    if only_sure and traced is not None and far_below(traced, min(default, chip.capacity_bytes)):
        return "open"
    if not custom_call.custom_calls(program.module):
        return "open"
    sure, expected = _exceeding(read_kernels(program.module), chip, flag)
    if (sure and policy.ahead != "never") or (expected and policy.ahead == "expected"):
        return "certain"
    return "likely" if sure or expected else "open"


def _exceeding(kernels: tuple[Kernel, ...], chip: Chip, flag_bytes: int | None) -> tuple[bool, bool]:
    """Whether a kernel exceeds its limit for sure, and whether one is expected to."""
    sure = expected = False
    for kernel in kernels:
        if kernel.core != "tc" or not kernel.readable:
            continue
        limit = planner.limit_in_force(kernel, chip=chip, flag_bytes=flag_bytes)
        need = LEARNED.footprint(kernel, chip, limit)
        sure |= need.certain_bytes > limit
        expected |= need.expected_bytes > limit
    return sure, expected
