"""Used scoped VMEM of compiled programs, from their text and, where that cannot be had, from their bytes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import MiB, add, array, device

from jax_vmem_guard.used_vmem import read_hlo_text, used_scoped_vmem

X = array(1024, 1024)


def compiled(fun, *arguments, chip="v5e", **options):
    sharding = jax.sharding.SingleDeviceSharding(device(chip))
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
    return jax.jit(fun).lower(*placed).compile(**options)


class WithoutText:
    """A compiled program whose text the compiler cannot print."""

    def __init__(self, compiled):
        self._compiled = compiled

    def as_text(self):
        raise RuntimeError("INTERNAL: RET_CHECK failure")

    def runtime_executable(self):
        return self._compiled.runtime_executable()


@functools.cache
def program():
    def fun(x):
        x = jax.lax.scan(lambda c, _: (add(c, c, name="looped"), None), x, None, length=2)[0]
        return add(x, x, name="straight"), jax.lax.sort(x[:1024], dimension=0)
    return compiled(fun, array(16384, 2048))  # 128 MiB: too large for XLA to keep in VMEM, where windows cost nothing


def test_a_kernel_shows_what_it_used():
    rows = {r.name.split(".")[0]: r for r in used_scoped_vmem(program()) if r.is_kernel}
    assert {name: r.used_bytes for name, r in rows.items()} == {"looped": 12 * MiB, "straight": 12 * MiB}
    assert {r.opcode for r in rows.values()} == {"custom-call"}
    assert all(r.limit_bytes is None and "pallas_call" in r.op_name for r in rows.values())


def test_instructions_that_are_no_kernels_are_there_too():
    others = [r for r in used_scoped_vmem(program()) if not r.is_kernel]
    assert others
    assert all(r.used_bytes > 0 and r.kernel is None for r in others)


def test_the_serialised_program_tells_the_same_as_its_text():
    by_text = {r.name: r for r in used_scoped_vmem(program())}
    by_bytes = {r.name: r for r in used_scoped_vmem(WithoutText(program()))}
    assert by_text == by_bytes


def test_the_runtime_s_own_executable_tells_the_same():
    assert used_scoped_vmem(program().runtime_executable()) == used_scoped_vmem(program())


def test_a_limit_of_the_kernel_is_shown():
    def fun(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...]
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                              compiler_params=pltpu.CompilerParams(vmem_limit_bytes=20 * MiB))(x)

    (row,) = [r for r in used_scoped_vmem(compiled(fun, X)) if r.is_kernel]
    assert (row.limit_bytes, row.used_bytes <= 8 * MiB) == (20 * MiB, True)


def test_a_fusion_around_a_kernel_counts_as_the_kernel():
    def fun(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] + 1
        spec = pl.BlockSpec((256, 1024), lambda i: (i, 0))
        return pl.pallas_call(kernel, grid=(16,), in_specs=[spec], out_specs=spec,
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                              compiler_params=pltpu.CompilerParams(allow_input_fusion=[True]))(x * 2)

    program = compiled(fun, array(4096, 1024), chip="v6e")
    (row,) = [r for r in used_scoped_vmem(program) if r.is_kernel]
    assert row.opcode == "fusion"
    assert row.kernel not in (None, row.name)
    assert [r for r in used_scoped_vmem(WithoutText(program)) if r.is_kernel] == [row]


def test_an_instruction_that_spans_lines_is_read_whole():
    rows = read_hlo_text("""HloModule m

ENTRY %main (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %k.1 = (f32[8,128]{1,0:T(8,128)}, f32[2]{0}) custom-call(%a), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"label":"x = y"
}}, metadata={op_name="jit(f)/pallas_call"}, backend_config={"used_scoped_memory_configs":\
[{"memory_space":"1","offset":"0","size":"4096"}],"custom_call_config":{"body":"a, backend_config={"}}
}
""")
    assert [(r.name, r.opcode, r.is_kernel, r.used_bytes, r.op_name) for r in rows] == [
        ("k.1", "custom-call", True, 4096, "jit(f)/pallas_call")]


def test_a_program_the_compiler_cannot_print_is_read_from_its_bytes():
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    def fun(a, b, sizes):
        return gmm(a, b, sizes, preferred_element_type=jnp.bfloat16, tiling=(128, 256, 256))

    arrays = (array(512, 512, dtype=jnp.bfloat16), array(2, 512, 512, dtype=jnp.bfloat16), array(2, dtype=jnp.int32))
    (row,) = [r for r in used_scoped_vmem(compiled(fun, *arrays, chip="v6e")) if r.is_kernel]
    assert row.used_bytes > 256 * 1024


def test_what_is_no_program_is_refused_with_both_reasons():
    class Neither:
        def as_text(self):
            raise RuntimeError("no text")

        def serialize(self):
            return b"\x00" * 100

    with pytest.raises(ValueError, match="no text.*serialised"):
        used_scoped_vmem(Neither())
