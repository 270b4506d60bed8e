"""The limit of one compile: for instructions that are no kernels, and never for a kernel with a limit of its own."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import add, array, device

import jax_vmem_guard as vmem_guard
from jax_vmem_guard.chips import KiB

OPTION = "xla_tpu_scoped_vmem_limit_kib"

#: what fails -> (program, arguments, limit in KiB). XLA makes some gathers into a loop of dynamic-update-slice.
PROGRAMS = {
    "fusion": (lambda x: jnp.sin(x) @ x, (array(512, 512),), 16),
    "copy": (lambda x: x.T, (array(512, 512),), 32),
    "sort": (lambda x: jnp.sort(x, axis=1), (array(8, 256),), 4),
    "dynamic-update-slice": (lambda x, i: x[i], (array(4096, 128), array(256, dtype=jnp.int32)), 16),
    "gather_fusion": (lambda x, i: jnp.take(x, i, axis=0, mode="clip"),
                      (array(4096, 256, dtype=jnp.bfloat16), array(256, dtype=jnp.int32)), 64),
    "rev": (lambda x: x[::-1], (array(256, 512),), 16),
}


def placed(arguments, chip):
    sharding = jax.sharding.SingleDeviceSharding(device(chip))
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]


def repaired(fun, arguments, chip, kib, **policy):
    """The repair of a program compiled with a limit of `kib` KiB."""
    before = len(vmem_guard.repairs())
    guarded = vmem_guard.jit(fun, policy=vmem_guard.Policy(**policy))
    guarded.lower(*placed(arguments, chip)).compile(compiler_options={OPTION: str(kib)})
    (repair,) = vmem_guard.repairs()[before:]
    return repair


@pytest.mark.parametrize("name, chip", [(n, "v5e") for n in PROGRAMS] + [("copy", "v6e"), ("fusion", "tpu7x")])
def test_an_instruction_that_is_no_kernel_gets_a_higher_limit_of_this_one_compile(name, chip):
    fun, arguments, kib = PROGRAMS[name]
    with pytest.raises(Exception, match=f"on stack for %{name}"):
        jax.jit(fun).lower(*placed(arguments, chip)).compile(compiler_options={OPTION: str(kib)})
    (change,) = repaired(fun, arguments, chip, kib, remedies=("compile_limit",)).changes
    assert change.remedy == "compile_limit" and change.kernel.startswith(name)
    assert kib * KiB < change.need_bytes <= change.data["limit_bytes"]


def test_the_option_of_the_caller_is_a_floor():
    fun, arguments, _ = PROGRAMS["copy"]
    (change,) = repaired(fun, arguments, "v5e", 100, remedies=("compile_limit",)).changes
    assert change.before == "limit of the compile 0.10 MiB" and change.data["limit_bytes"] > 100 * KiB


def test_a_kernel_that_sets_its_own_limit_too_low_is_repaired_by_it_and_not_by_the_flag():

    def with_own_limit(x, y):
        def kernel(x_ref, y_ref, o_ref):
            o_ref[...] = x_ref[...] + y_ref[...]

        spec = pl.BlockSpec((256, 1024), lambda i: (i, 0))
        return pl.pallas_call(kernel, grid=(64,), in_specs=[spec, spec], out_specs=spec,
                              compiler_params=pltpu.CompilerParams(vmem_limit_bytes=4 << 20),
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)

    big = array(256 * 256, 1024)
    repair = repaired(with_own_limit, (big, big), "v5e", 64 << 10)
    assert [c.remedy for c in repair.changes] == ["limit"]
    assert repair.changes[0].before == "limit 4.00 MiB (set by the kernel)"


def test_the_limit_of_the_compile_is_not_touched_where_it_is_not_allowed():
    fun, arguments, kib = PROGRAMS["copy"]
    with pytest.raises(Exception, match="on stack for %copy"):
        repaired(fun, arguments, "v5e", kib, remedies=("limit", "buffering", "coloring"))


def test_a_program_that_compiles_keeps_the_options_of_its_caller():
    before = len(vmem_guard.repairs())
    big = placed((array(1024, 1024),) * 2, "v5e")
    vmem_guard.jit(add).lower(*big).compile(compiler_options={OPTION: "16384"})
    assert len(vmem_guard.repairs()) == before
