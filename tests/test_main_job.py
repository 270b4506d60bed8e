"""Programs with kernels that do not fit compile: everywhere a kernel can stand, however many there are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernels_on_chips import MiB, add, array, lower_with, used_by_kernels

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import _jax
from jax_vmem_guard.policy import Policy

#: 128 MiB: more than XLA can place in VMEM by itself on any chip, which would make the kernel's windows vanish.
ARRAY = array(8192, 4096)
#: `add` of float32 rows of 4096 with blocks of 256 rows: three double-buffered windows of 4 MiB.
NEED = 24 * MiB
add256 = functools.partial(add, block=256)


@pytest.fixture
def repaired():
    """The repairs made by one test."""
    done = len(vmem_guard.repairs())
    return lambda: vmem_guard.repairs()[done:]


def compile_guarded(fun, *arguments, chip="v5e", policy=None, **options):
    return lower_with(vmem_guard.jit(fun, policy=policy, **options), *arguments, chip=chip).compile()


def inside_scan(x):
    return jax.lax.scan(lambda c, _: (add256(c, c), None), x, None, length=3)[0]


def inside_while(x):
    return jax.lax.fori_loop(0, jnp.int32(x[0, 0]), lambda _, c: add256(c, c), x)


def inside_cond(x):
    return jax.lax.cond(x[0, 0] > 0, lambda y: add256(y, y), lambda y: y * 2, x)


def inside_remat(x):
    return jax.checkpoint(lambda y: add256(y, y) * 2)(x)


def inside_nested_jit(x):
    return jax.jit(lambda y: jax.jit(lambda z: add256(z, z))(y))(x)


@jax.custom_vjp
def doubled(x):
    return x * 2


doubled.defvjp(lambda x: (x * 2, None), lambda _, g: (add256(g, g),))


def backward_of_custom_vjp(x):
    return jax.grad(lambda y: jnp.sum(jnp.sin(doubled(y))))(x)


def vmapped(x):
    return jax.vmap(lambda y: add256(y, y))(x.reshape(2, 4096, 4096))


@pytest.mark.compat
@pytest.mark.parametrize("fun", [inside_scan, inside_while, inside_cond, inside_remat, inside_nested_jit,
                                 backward_of_custom_vjp, vmapped], ids=lambda f: f.__name__)
def test_a_kernel_is_repaired_wherever_it_stands(fun, repaired):
    compile_guarded(fun, ARRAY)
    [repair] = repaired()
    assert {change.need_bytes for change in repair.changes} == {NEED}
    assert repair.compiles <= 2


@pytest.mark.compat
def test_a_kernel_inside_shard_map_over_four_devices_is_repaired(repaired):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = Mesh(np.array(devices).reshape(4), ("x",))
    spec = PartitionSpec("x")
    sharded = jax.shard_map(lambda x: add256(x, x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    argument = jax.ShapeDtypeStruct((4 * 8192, 4096), jnp.float32, sharding=NamedSharding(mesh, spec))
    vmem_guard.jit(sharded).lower(argument).compile()
    [repair] = repaired()
    assert repair.changes[0].need_bytes == NEED and repair.compiles <= 2 and repair.probes <= 1


@pytest.mark.parametrize("count", [3, 10])
def test_many_kernels_that_do_not_fit_cost_two_compiles_of_the_program(count, repaired):
    def fun(x):
        for n in range(count):
            block = 128 + 128 * (n % 2)
            x = add(x * (n + 1), x, block=block if n % 2 else 256, name=f"add_{n}")
        return x

    compiled = compile_guarded(fun, ARRAY)
    [repair] = repaired()
    assert len(repair.changes) == count
    assert repair.compiles <= 2
    assert used_by_kernels(compiled) == [NEED] * count


def test_kernels_of_one_name_with_different_needs_each_get_their_own_limit(repaired):
    def fun(x):
        return add(x, add(x * 2, add(x * 3, x, block=64), block=512), block=256)

    compile_guarded(fun, ARRAY)
    [repair] = repaired()
    assert {change.kernel for change in repair.changes} == {"add"}
    assert sorted(change.need_bytes for change in repair.changes) == [24 * MiB, 48 * MiB]
    assert repair.compiles <= 2


def test_a_kernel_that_sets_its_own_limit_too_low_is_repaired_by_its_own_limit(repaired):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def fun(x):
        block = pl.BlockSpec((512, 4096), lambda i: (i, 0))
        return pl.pallas_call(kernel, grid=(16,), in_specs=[block], out_specs=block,
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                              compiler_params=pltpu.CompilerParams(vmem_limit_bytes=20 * MiB))(x)

    compile_guarded(fun, ARRAY)
    [change] = repaired()[0].changes
    assert change.remedy == "limit" and change.before == "limit 20.00 MiB (set by the kernel)"
    assert change.need_bytes == 32 * MiB


def test_the_callers_compiler_options_are_kept(repaired):
    options = {"xla_tpu_scoped_vmem_limit_kib": "20480"}
    lowered = lower_with(vmem_guard.jit(lambda x: add256(x, x)), ARRAY)
    lowered.compile(compiler_options=options)
    [change] = repaired()[0].changes
    assert change.before.startswith("limit 20.00 MiB")
    lower_with(vmem_guard.jit(lambda x: add256(x, x), compiler_options={"xla_tpu_scoped_vmem_limit_kib": "25600"}),
               ARRAY).compile()
    assert len(repaired()) == 1, "a limit that the caller raised enough needs no repair"


def test_a_second_compile_of_the_same_lowering_costs_nothing(repaired):
    jitted = vmem_guard.jit(lambda x: add256(x, x))
    first = lower_with(jitted, ARRAY).compile()
    second = lower_with(jitted, ARRAY).compile()
    assert len(repaired()) == 1
    assert first.runtime_executable() is second.runtime_executable()


def test_a_plain_jit_around_a_guarded_function_is_guarded(repaired):
    guarded = vmem_guard.jit(lambda x: add256(x, x))
    lower_with(jax.jit(lambda x: guarded(x) + 1), ARRAY).compile()
    assert len(repaired()) == 1


def test_a_plain_jit_beside_a_guarded_function_is_not():
    vmem_guard.jit(lambda x: add256(x, x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="E1001") as error:
        lower_with(jax.jit(lambda x: add256(x, x)), ARRAY).compile()
    assert not getattr(error.value, "__notes__", None)


def test_without_any_remedy_the_compilers_own_exception_object_arrives_with_notes(monkeypatch):
    raised = []
    original = _jax.Program.compile

    def compile_(self):
        try:
            return original(self)
        except Exception as error:
            raised.append(error)
            raise

    monkeypatch.setattr(_jax.Program, "compile", compile_)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        compile_guarded(lambda x: add256(x, x), ARRAY, policy=Policy(remedies=()))
    assert error.value is raised[0]
    assert "24.00" in "\n".join(error.value.__notes__)


def test_errors_that_are_not_about_vmem_pass_untouched():
    def fun(x):
        raise FloatingPointError("mine")

    with pytest.raises(FloatingPointError, match="mine"):
        compile_guarded(fun, ARRAY)


def test_a_fault_in_the_guard_does_not_hide_the_compilers_error(monkeypatch, caplog):
    def broken(*args):
        raise ZeroDivisionError("a fault of the guard")

    monkeypatch.setattr(vmem_guard.guard, "attempt_repair", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="E1001") as error:
        compile_guarded(lambda x: add256(x, x), ARRAY)
    assert "a fault of the guard" in "\n".join(error.value.__notes__)
    assert "a fault of the guard" in caplog.text


def test_jaxs_own_module_is_not_edited():
    jitted = jax.jit(lambda x: add256(x, x))
    before = lower_with(jitted, ARRAY).as_text()
    vmem_guard.install()
    try:
        lower_with(jitted, ARRAY).compile()
        assert lower_with(jitted, ARRAY).as_text() == before
    finally:
        vmem_guard.uninstall()


def test_two_threads_that_compile_at_once_get_what_one_gets(repaired):
    from concurrent.futures import ThreadPoolExecutor

    lowered = [lower_with(vmem_guard.jit(lambda x, n=n: add256(x * n, x)), ARRAY) for n in range(4)]
    with ThreadPoolExecutor(4) as threads:
        compiled = list(threads.map(lambda one: one.compile(), lowered))
    assert [used_by_kernels(one) for one in compiled] == [[NEED]] * 4
    assert [change.need_bytes for repair in repaired() for change in repair.changes] == [NEED] * 4


@pytest.mark.parametrize(("chip", "block_need"), [("v5e", 16), ("v6e", 16)])
def test_a_kernel_that_cannot_be_compiled_alone_takes_three_compiles_and_ends_near_its_need(chip, block_need, repaired):
    arguments = [array(8192, 8192)] if chip == "v6e" else [ARRAY]

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    def fun(x):
        block = pl.BlockSpec((512, x.shape[1]), lambda i: (i, 0))
        return pl.pallas_call(kernel, grid=(x.shape[0] // 512,), in_specs=[block], out_specs=block,
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                              compiler_params=pltpu.CompilerParams(allow_input_fusion=[True]))(x * 2)

    compiled = compile_guarded(fun, *arguments, chip=chip)
    [repair] = repaired()
    [change] = repair.changes
    [used] = used_by_kernels(compiled)
    assert repair.compiles <= 3
    assert used <= change.data["limit_bytes"] <= 1.1 * used
