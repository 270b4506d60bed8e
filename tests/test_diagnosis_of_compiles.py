"""Messages fresh from the compiler that is installed, one of each form."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import MiB, add, array, device, lower

from jax_vmem_guard.diagnosis import diagnose


def failure(fun, *arguments, chip="v5e", options=None):
    """The compiler's exception."""
    sharding = jax.sharding.SingleDeviceSharding(device(chip))
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
    with pytest.raises(Exception) as caught:
        jax.jit(fun).lower(*placed).compile(compiler_options=options)
    return caught.value


def scaled(x, metadata):
    """A kernel with 2 x 8 MiB in two windows, 32 MiB, whose author gave it metadata."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((2048, 1024), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(x.shape[0] // 2048,), in_specs=[spec], out_specs=spec, name="scaled",
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), metadata=metadata)(x)


def test_a_limit():
    """Three double-buffered windows of 4 MiB against 16."""
    found = diagnose(failure(lambda x, y: add(x, y, block=1024), *[array(8192, 1024)] * 2))
    assert (found.form, found.instruction, found.is_kernel) == ("limit", "add.1", True)
    assert found.limit_bytes == 16 * MiB and found.size_bytes >= 24 * MiB
    assert found.op_name.endswith("pallas_call")


def test_a_capacity_with_its_table():
    """The same on a chip of 16 MiB."""
    found = diagnose(failure(lambda x, y: add(x, y, block=1024), *[array(8192, 1024)] * 2, chip="v4"))
    assert (found.form, found.instruction, found.is_kernel) == ("capacity", "add.1", True)
    assert found.capacity_bytes == 16 * MiB and found.size_bytes >= 24 * MiB
    windows = [row for row in found.breakdown if row.kind.endswith("window")]
    assert [row.kind for row in windows] == ["input window", "input window", "output window"]
    assert all(row.size_bytes == 8 * MiB and row.instruction == "add.1" for row in windows)


def test_one_allocation_above_the_memory():
    """A window that is larger than the chip by itself."""
    found = diagnose(failure(lambda x, y: add(x, y, block=4096), *[array(8192, 1024)] * 2, chip="v4"))
    assert (found.form, found.instruction, found.is_kernel) == ("allocation", "add.1", True)
    assert (found.size_bytes, found.capacity_bytes) == (32 * MiB, 16 * MiB)
    assert [row.kind for row in found.breakdown] == ["input window"]


def test_too_many_pinned_buffers():
    """An operand of 128 MiB pinned by its author."""
    def program(x):
        return add(pltpu.with_memory_space_constraint(x, pltpu.VMEM), x, block=8)

    found = diagnose(failure(program, array(32768, 1024)))
    assert found.form == "pinned" and len(found.pinned_buffers) == 1
    assert found.size_bytes in (None, 128 * MiB)


def test_an_instruction_that_is_no_kernel():
    """XLA's own copy, under a limit nobody would set."""
    found = diagnose(failure(lambda x: jnp.transpose(x / 2), array(1024, 1024),
                             options={"xla_tpu_scoped_vmem_limit_kib": "64"}))
    assert (found.form, found.instruction, found.is_kernel) == ("limit", "copy", False)
    assert found.limit_bytes == 64 * 1024


def test_metadata_becomes_the_label():
    """The compiler prints it over several lines, with its own escapes."""
    found = diagnose(failure(lambda x: scaled(x, {"block": "q\n2048", "note": '} metadata={op_name="no"}'}),
                             array(8192, 1024)))
    if found.label is None:
        pytest.skip("this JAX does not hand the metadata of a kernel to the compiler")
    assert '"block"' in found.label and '"note"' in found.label
    assert found.instruction == "scaled.1" and found.op_name.endswith("pallas_call")
    assert (found.size_bytes, found.limit_bytes) == (32 * MiB, 16 * MiB)


def test_the_failing_kernel_and_not_its_operand_is_named():
    """The operand of the second kernel is a kernel as well, and fits."""
    def program(x):
        return add(add(x, x, block=64, name="small"), x, block=1024, name="large")

    # 128 MiB: XLA cannot take the operand into VMEM itself, which would spare its window.
    assert diagnose(failure(program, array(32768, 1024))).instruction == "large.1"


def test_a_fusion_around_a_kernel_is_the_kernels():
    """In a scan XLA fuses the kernel with the write of its result: the fusion fails, the kernel in it is to blame."""
    def program(x):
        return jax.lax.scan(lambda carry, row: (carry, add(row, row, block=2048, name="inner")), 0.0, x)[1]

    found = diagnose(failure(program, array(4, 32768, 1024), chip="v6e"))
    assert "kind=kCustom" in found.text or "custom-call(" in found.text
    assert found.is_kernel is True
    assert found.op_name.endswith("/inner/pallas_call")
    assert found.limit_bytes == 32 * MiB


def test_scalars_that_do_not_fit_smem_are_not_ours():
    """600 000 prefetched scalars: the same form of message, another memory."""
    def kernel(s_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] * s_ref[0]

    def program(scalars, x):
        spec = pl.BlockSpec((8, 128), lambda i, s: (i, 0))
        return pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(4,), in_specs=[spec], out_specs=spec),
        )(scalars, x)

    error = failure(program, array(600_000), array(32, 128))
    assert "smem" in str(error)
    assert diagnose(error) is None


def test_a_program_that_compiles_says_nothing():
    """The kernel of these tests fits with smaller blocks."""
    lower(lambda x, y: add(x, y, block=64), *[array(1024, 1024)] * 2).compile()
