"""Which needs the guard takes from a kernel's own code, without a probe."""

import jax
import jax.numpy as jnp
import public_cases as cases
import pytest
from kernels_on_chips import MiB, add, array, lower_with

import jax_vmem_guard as vmem_guard
from jax_vmem_guard.chips import chip_named
from jax_vmem_guard.estimate import estimated_need
from jax_vmem_guard.kernels import read_kernels


def estimate(case, chip):
    fun, arguments = case
    [kernel] = read_kernels(lower_with(jax.jit(fun), *arguments, chip=chip).compiler_ir("stablehlo"))
    known = chip_named(chip)
    return estimated_need(kernel, known, known.default_limit_bytes)


def elementwise(block):
    return (lambda x: add(x, x, block=block)), [array(8192, 4096)]


def test_a_kernel_that_works_value_by_value_needs_no_probe():
    assert estimate(elementwise(256), "v5e").bytes == 24 * MiB
    assert estimate(cases.whole_copy(), "v6e").bytes == 64 * MiB


def test_a_kernel_far_below_its_limit_needs_no_probe():
    assert estimate(elementwise(32), "v5e").bytes == 3 * MiB


@pytest.mark.parametrize(("case", "chip"), [
    (cases.transpose(), "v5e"), (cases.rms_norm(512), "v6e"), (cases.matmul_relu(), "v5e"), (cases.swiglu(), "v6e"),
], ids=["transpose", "reduction", "matmul", "matmul with scratch"])
def test_a_kernel_whose_body_may_hold_parts_of_a_block_is_probed(case, chip):
    assert estimate(case, chip) is None


def test_a_wrong_estimate_is_corrected_by_probes(monkeypatch):
    """The guard believes the kernel needs 17 MiB; the compiler then says 24."""
    from jax_vmem_guard import repair
    from jax_vmem_guard.planner import Need

    monkeypatch.setattr(repair, "estimated_need", lambda *_: Need(bytes=17 * MiB, fits=True))
    done = len(vmem_guard.repairs())
    fun, arguments = elementwise(256)
    lower_with(vmem_guard.jit(lambda x: fun(x) * jnp.float32(2)), *arguments).compile()
    [made] = vmem_guard.repairs()[done:]
    assert made.probes <= 1 and [change.need_bytes for change in made.changes] == [24 * MiB]
