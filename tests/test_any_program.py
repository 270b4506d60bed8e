"""Programs made at random: with the guard and without it, what compiles is the same."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import CHIPS, array, lower_with

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import _jax, hook

MiB = 1 << 20
COLUMNS = 256


@dataclasses.dataclass(frozen=True)
class Step:
    """One kernel of a program and what stands around it."""

    kind: str
    block: int
    nested: str
    dtype: str
    scratch_mib: int = 0
    limit_mib: int | None = None
    one_buffer: bool = False


steps = st.builds(
    Step,
    kind=st.sampled_from(["unary", "binary", "sum", "matmul", "shifted", "prefetch", "whole", "accumulate"]),
    block=st.sampled_from([8, 16, 64, 512, 2048, 4096, 8192]),
    nested=st.sampled_from(["plain", "plain", "jit", "scan", "while", "cond", "remat", "vmap", "grad"]),
    dtype=st.sampled_from(["float32", "bfloat16", "int32"]),
    scratch_mib=st.sampled_from([0, 0, 0, 0, 0, 0, 0, 1, 12, 24, 140]),
    limit_mib=st.sampled_from([None, None, None, 4, 64]),
    one_buffer=st.booleans())


def kernel_of(step: Step, rows: int):
    """A `pallas_call` on a (rows, COLUMNS) array that gives one of the same shape. Reads little of a large block."""
    shape, dtype, block = (rows, COLUMNS), jnp.dtype(step.dtype), min(step.block, rows)
    mode = {"pipeline_mode": pl.Buffered(1)} if step.one_buffer else {}
    rows_of = pl.BlockSpec((block, COLUMNS), lambda i: (i, 0), **mode)
    out = pl.BlockSpec((block, COLUMNS), lambda i: (i, 0))
    few = min(block, 16)

    def unary(x_ref, o_ref):
        o_ref[:few, :] = x_ref[:few, :] * 2

    def binary(x_ref, y_ref, o_ref):
        o_ref[:few, :] = x_ref[:few, :] + y_ref[:few, :]

    def row_sum(x_ref, o_ref):
        o_ref[:few, :] = jnp.broadcast_to(jnp.sum(x_ref[:few, :].astype(jnp.float32), axis=1, keepdims=True),
                                          (few, COLUMNS)).astype(dtype)

    def matmul(x_ref, y_ref, o_ref):
        o_ref[:few, :] = jnp.dot(x_ref[:few, :].astype(jnp.float32), y_ref[...].astype(jnp.float32),
                                 preferred_element_type=jnp.float32).astype(dtype)

    def accumulate(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[:8, :]

    def prefetch(s_ref, x_ref, o_ref):
        o_ref[:few, :] = x_ref[:few, :] + s_ref[0].astype(dtype)

    square = pl.BlockSpec((COLUMNS, COLUMNS), lambda i: (0, 0))
    steps_before = pl.BlockSpec((block, COLUMNS), lambda i: (jnp.maximum(i - 1, 0), 0))
    body, in_specs = {
        "unary": (unary, [rows_of]), "binary": (binary, [rows_of, rows_of]), "sum": (row_sum, [rows_of]),
        "matmul": (matmul, [rows_of, square]), "shifted": (unary, [steps_before]),
        "accumulate": (accumulate, [rows_of]), "prefetch": (prefetch, None), "whole": (unary, None)}[step.kind]
    scratch = [pltpu.VMEM((step.scratch_mib * 1024, COLUMNS), jnp.float32)] if step.scratch_mib else []

    def with_scratch(*refs):
        """The body, and scratch that the compiler cannot leave out."""
        *others, memory = refs
        half = pl.program_id(0) % 2 * 8
        memory[pl.ds(half, 8), :] = jnp.full((8, COLUMNS), 3, jnp.float32)
        body(*others)
        others[-1][:8, :] += memory[pl.ds(8 - half, 8), :].astype(dtype)

    called = with_scratch if scratch else body
    options = {"out_shape": jax.ShapeDtypeStruct(shape, dtype), "name": step.kind,
               "compiler_params": pltpu.CompilerParams(
                   vmem_limit_bytes=None if step.limit_mib is None else step.limit_mib * MiB)}
    if step.kind == "prefetch":
        return lambda x: pl.pallas_call(called, grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(rows // block,),
            in_specs=[pl.BlockSpec((block, COLUMNS), lambda i, s: (i, 0))],
            out_specs=pl.BlockSpec((block, COLUMNS), lambda i, s: (i, 0)), scratch_shapes=scratch),
            **options)(jnp.arange(4, dtype=jnp.int32), x)
    if step.kind == "whole":
        return lambda x: pl.pallas_call(unary, **options)(x)
    if step.kind == "accumulate":
        options["out_shape"] = jax.ShapeDtypeStruct((8, COLUMNS), dtype)
        out = pl.BlockSpec((8, COLUMNS), lambda i: (0, 0))
    call = pl.pallas_call(called, grid=(rows // block,), in_specs=in_specs, out_specs=out, scratch_shapes=scratch,
                          **options)
    others = {"binary": lambda x: (x * 3,), "matmul": lambda x: (x[:COLUMNS, :],)}.get(step.kind, lambda x: ())
    if step.kind == "accumulate":
        return lambda x: x + call(x)[:1, :]
    return lambda x: call(x, *others(x))


def nested(step: Step, kernel):
    """The kernel somewhere inside JAX's own structures."""
    def with_gradient(x):
        @jax.custom_vjp
        def f(y):
            return y * 2

        f.defvjp(lambda y: (y * 2, None), lambda _, g: (kernel(g),))
        return jax.grad(lambda y: jnp.sum(jnp.sin(f(y).astype(jnp.float32))))(x)

    return {
        "plain": kernel,
        "jit": jax.jit(kernel),
        "scan": lambda x: jax.lax.scan(lambda c, _: (kernel(c), None), x, None, length=2)[0],
        "while": lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, kernel(c[1])), (0, x))[1],
        "cond": lambda x: jax.lax.cond(x[0, 0] > 0, kernel, lambda y: y, x),
        "remat": jax.checkpoint(kernel),
        "vmap": lambda x: jax.vmap(kernel)(x[None])[0],
        "grad": with_gradient if jnp.issubdtype(step.dtype, jnp.floating) else kernel,
    }[step.nested]


def program_of(made: list[Step], rows: int):
    def program(x):
        for step in made:
            x = nested(step, kernel_of(step, rows))(x.astype(step.dtype))
        return x * 2

    return program


class Reached(Exception):
    """Raised in the compiler's place."""


def reaches_compiler(lowered) -> list[tuple[bytes, dict]]:
    """Module and options that a guarded compile hands to JAX first; nothing is compiled."""
    seen = []

    def stop(program, module, options, alone):
        if alone:  # a kernel that is measured in another thread meanwhile
            return
        seen.append((_jax.stablehlo_bytecode(module), dict(options), module is program.module))
        raise Reached

    hook.add_interceptor(stop)
    try:
        with pytest.raises(Reached):
            lowered.compile()
    finally:
        hook.remove_interceptor(stop, uninstall_too=True)
    return seen


def check(made: list[Step], rows: int, chip: str) -> str:
    """Compiles one program without and with the guard; says how it ended."""
    fun, argument = program_of(made, rows), array(rows, COLUMNS)
    vmem_guard.uninstall()
    lowered = lower_with(jax.jit(fun), argument, chip=chip)
    text, sent = lowered.as_text(), _jax.stablehlo_bytecode(lowered._lowering._hlo)
    try:
        lowered.compile()
        error = None
    except jax.errors.JaxRuntimeError as caught:
        error = caught
    jax.clear_caches()
    vmem_guard.install()
    try:
        guarded = lower_with(jax.jit(fun), argument, chip=chip)
        assert guarded.as_text() == text
        if error is None:
            [(module, options, own)] = reaches_compiler(guarded)
            assert own and options == {} and module == _jax.stablehlo_bytecode(guarded._lowering._hlo)
            assert len(module) == len(sent)
            return "fits"
        before = len(vmem_guard.repairs())
        try:
            guarded.compile()
        except jax.errors.JaxRuntimeError as caught:
            assert str(caught).partition("metadata=")[0] == str(error).partition("metadata=")[0]
            assert len(vmem_guard.repairs()) == before
            return "fails" if vmem_guard.diagnose(error) else "other error"
        assert vmem_guard.diagnose(error) is not None
        assert len(vmem_guard.repairs()) == before + 1
        return "repaired"
    finally:
        vmem_guard.uninstall()


#: Mostly one kernel: a program with two takes twice as long and shows little more.
kernels = st.one_of(*[st.lists(steps, min_size=1, max_size=1)] * 3, st.lists(steps, min_size=2, max_size=2))


def any_program(chip: str, examples: int, ends: dict[str, int]):
    """A test of so many random programs for one chip, the same ones each time, which counts how they end."""
    def test(made, rows):
        assume(all(step.kind != "matmul" or rows >= COLUMNS for step in made))
        end = check(made, rows, chip)
        ends[end] = ends.get(end, 0) + 1

    given_test = given(made=kernels, rows=st.sampled_from([64, 1024, 16384, 131072]))(test)
    return seed(CHIPS.index(chip))(settings(max_examples=examples, deadline=None, database=None, phases=[
        Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))(given_test))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("examples", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_guard_on_and_off_agree_on_every_program(chip, examples):
    """A program that compiles reaches the compiler unchanged; one that fails is repaired or fails in the same words."""
    ends: dict[str, int] = {}
    any_program(chip, examples, ends)()
    assert ends["fits"] > examples // 4 and len(ends) > 1, ends
