"""A program that compiles without the guard reaches the compiler unchanged under it: same module, same options."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import add, add_in_place, array, copy_whole, lower_with

import jax_vmem_guard as vmem_guard

SMALL = array(512, 1024)


@pytest.fixture(autouse=True)
def clean():
    vmem_guard.uninstall()
    yield
    vmem_guard.uninstall()


@pytest.fixture
def sent(monkeypatch):
    """What reached the compiler: (module bytecode, serialised options), one entry a compile of a program."""
    log = []
    original = compiler.backend_compile_and_load

    def record(backend, module, devices, options, callbacks):
        if "kernel_alone" not in str(module.operation.attributes["sym_name"]):  # a probe
            log.append((mlir.module_to_bytecode(module), options.SerializeAsString()))
        return original(backend, module, devices, options, callbacks)

    monkeypatch.setattr(compiler, "backend_compile_and_load", record)
    return log


def scaled(x, *, block, limit=None):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec(block, lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(x.shape[0] // block[0],), in_specs=[spec], out_specs=spec,
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                          compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit))(x)


def with_scratch(x):
    def kernel(x_ref, o_ref, scratch):
        scratch[...] = x_ref[...] + 1
        o_ref[...] = scratch[...] * 2

    spec = pl.BlockSpec((128, 1024), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(4,), in_specs=[spec], out_specs=spec,
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                          scratch_shapes=[pltpu.VMEM((128, 1024), jnp.float32)])(x)


def flash(q, k, v):
    from jax.experimental.pallas.ops.tpu import flash_attention
    return flash_attention.flash_attention(q, k, v, causal=True)


#: XLA places one 32 MiB operand in VMEM by itself: the kernel's plain need exceeds the limit, yet the program compiles.
def fits_only_because_xla_places_an_operand(x):
    return add(x, x * 2, block=256)


PROGRAMS = {
    "elementwise": (lambda x: x + 1, [SMALL]),
    "matmul": (lambda x: x @ x.T, [SMALL]),
    "reduce": (lambda x: jnp.sum(x, axis=0), [SMALL]),
    "sort": (lambda x: jnp.sort(x, axis=1), [array(8, 256)]),
    "gather": (lambda x, i: x[i], [SMALL, array(16, dtype=jnp.int32)]),
    "scan": (lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=4)[0], [SMALL]),
    "cond": (lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y * 2, lambda y: y + 2, x), [SMALL]),
    "while": (lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c + 1, x), [SMALL]),
    "grad": (jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2)), [SMALL]),
    "softmax": (jax.nn.softmax, [SMALL]),
    "kernel": (functools.partial(add, block=64), [SMALL, SMALL]),
    "kernel-bf16": (functools.partial(add, block=64), [array(512, 1024, dtype=jnp.bfloat16)] * 2),
    "kernel-in-place": (functools.partial(add_in_place, block=64), [SMALL, SMALL]),
    "kernel-without-grid": (copy_whole, [SMALL]),
    "kernel-with-limit": (functools.partial(scaled, block=(128, 1024), limit=8 << 20), [SMALL]),
    "kernel-at-its-limit": (functools.partial(scaled, block=(128, 1024), limit=2 << 20), [SMALL]),
    "kernel-with-scratch": (with_scratch, [SMALL]),
    "kernel-in-scan": (lambda x: jax.lax.scan(lambda c, _: (add(c, c, block=64), None), x, None, length=3)[0], [SMALL]),
    "kernel-under-vmap": (jax.vmap(lambda x: add(x, x, block=64)), [array(2, 512, 1024)]),
    "two-kernels": (lambda x: add(add(x, x, block=64), x, block=128), [SMALL]),
    "flash-attention": (flash, [array(1, 1, 512, 128, dtype=jnp.bfloat16)] * 3),
    "operand-in-vmem": (fits_only_because_xla_places_an_operand, [array(1024, 4096)]),
}


def unguarded(fun):
    vmem_guard.uninstall()
    return jax.jit(fun)


def installed(fun):
    vmem_guard.install()
    return jax.jit(fun)


def wrapped(fun):
    vmem_guard.uninstall()
    return vmem_guard.jit(fun)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_compiles_reaches_the_compiler_byte_identical(name, sent):
    fun, arguments = PROGRAMS[name]
    # One line calls all three: the module holds the line numbers of its callers.
    for jitted_by in (unguarded, installed, wrapped):
        jax.clear_caches()
        lower_with(jitted_by(fun), *arguments).compile()
    assert len(sent) == 3, "each way compiles once"
    assert sent[0] == sent[1] == sent[2]


def test_after_a_repair_the_same_program_without_the_guard_is_byte_identical_and_fails_as_before(sent):
    def fun(x):
        return add(x, x, block=256)

    failures = []
    for jitted_by in (unguarded, installed, unguarded):
        try:
            lower_with(jitted_by(fun), array(8192, 4096)).compile()
        except jax.errors.JaxRuntimeError as error:
            failures.append(str(error))
    assert len(failures) == 2 and failures[0] == failures[1]
    assert sent[0] == sent[-1]


def test_compiler_options_arrive_as_the_caller_gave_them(sent):
    options = {"xla_tpu_enable_latency_hiding_scheduler": "true"}
    for jitted_by in (unguarded, installed):
        jax.clear_caches()
        lower_with(jitted_by(lambda x: add(x, x, block=64)), SMALL).compile(compiler_options=options)
    assert len(sent) == 2 and sent[0] == sent[1]
