"""Rewriting a traced program so that it runs here, or compiles for there."""

import check_targets as targets
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_vmem_guard import _jax
from jax_vmem_guard.interpret import Rewriter, for_tpu, has_kernels, interpreted, open_form, sub_programs, zeroed

X = jnp.ones((64, 1024))


def nested(x):
    """Kernels in a nested jit, a scan, a branch, a while loop and a gradient's forward."""

    @jax.custom_vjp
    def differentiable(x):
        return targets.scale(x, 16)

    differentiable.defvjp(lambda x: (targets.scale(x, 16), None), lambda _, g: (targets.scale(g, 32),))
    x = jax.jit(lambda x: targets.scale(x, 16))(x)
    x, _ = jax.lax.scan(lambda c, _: (targets.scale(c, 16), None), x, length=2)
    x = jax.lax.cond(x[0, 0] > 0, lambda x: targets.scale(x, 16), lambda x: x, x)
    x = jax.lax.fori_loop(0, 2, lambda i, x: targets.scale(x, 16), x)
    return jax.grad(lambda x: differentiable(x).sum())(x) + jax.checkpoint(lambda x: targets.scale(x, 16))(x)


def traced(fun, *args):
    return jax.jit(fun).trace(*args).jaxpr


def run(jaxpr, *args):
    return jax.jit(lambda *a: _jax_eval(jaxpr, *a))(*args)


def _jax_eval(jaxpr, *args):
    from jax.extend.core import jaxpr_as_fun

    return jaxpr_as_fun(jaxpr)(*args)[0]


def kernels(program):
    """What every kernel of a program says about interpreting it."""
    found = []
    for eqn in open_form(program).eqns:
        if eqn.primitive.name == "pallas_call":
            found.append(eqn.params["interpret"])
        else:
            found += [one for value in eqn.params.values() for sub in sub_programs(value) for one in kernels(sub)]
    return found


def test_every_kernel_is_interpreted_however_deep():
    """Seven calls of kernels, in every kind of nesting; the result is what arithmetic says."""
    program = traced(nested, X)
    assert len(kernels(program)) >= 7 and not any(kernels(program))
    assert all(kernels(interpreted(program)))
    np.testing.assert_array_equal(run(interpreted(program), X), 2 + 2 * 2**6)


def test_the_original_stays_as_it_was():
    program = traced(nested, X)
    before = str(program)
    interpreted(program), zeroed(program), for_tpu(program)
    assert str(program) == before


def test_zeroed_has_no_kernels_and_the_same_shapes():
    """Zeros come out where kernels were; what surrounds them is computed."""
    program = zeroed(traced(lambda x: targets.scale(x, 16) + 3, X))
    assert not has_kernels(program)
    np.testing.assert_array_equal(run(program, X), np.full((64, 1024), 3))


def test_a_program_without_kernels_comes_back_itself():
    """Nothing is copied where nothing changes, so JAX's caches know it again."""
    program = traced(lambda x: jnp.sin(x) + 1, X)
    assert interpreted(program) is program
    assert zeroed(program) is program


def test_shared_inner_programs_stay_shared():
    """A function called twice is lowered once: its rewritten program is one object, too."""
    inner = jax.jit(lambda x: targets.scale(x, 16))
    program = interpreted(traced(lambda x: inner(x) + inner(x), X))
    calls = [eqn.params["jaxpr"] for eqn in open_form(program).eqns if "jaxpr" in eqn.params]
    assert len(calls) == 2
    assert calls[0] is calls[1]


def test_callbacks_are_gone_from_what_the_tpu_gets():
    """Also from the program's effects: no token is left that nobody makes."""

    def chatty(x):
        jax.debug.print("x is {}", x[0, 0], ordered=True)
        host = jax.pure_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct((64, 1024), jnp.float32), x)
        return targets.scale(x, 16) + host

    program = for_tpu(traced(chatty, X))
    names = {eqn.primitive.name for eqn in _jax.equations(program)}
    assert "pallas_call" in names
    assert not {name for name in names if "callback" in name or "debug" in name}
    assert not program.effects


def test_named_tuples_in_parameters_survive():
    """`gather` has a NamedTuple among its parameters, which cannot be rebuilt from a sequence."""
    program = traced(lambda x: targets.scale(x, 16)[jnp.array([1, 2])], X)
    seen = []
    Rewriter(lambda eqn: eqn, lambda leaf: seen.append(type(leaf).__name__) or leaf).program(program)
    assert "GatherDimensionNumbers" in seen
    np.testing.assert_array_equal(run(interpreted(program), X), np.full((2, 1024), 2))


@pytest.mark.parametrize("interpret", [True, "simulate"])
def test_kernels_written_for_interpreting_are_made_real(interpret):
    """`interpret=True` and the TPU simulator's parameters, effects included."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    how = pltpu.InterpretParams() if interpret == "simulate" else True
    program = traced(lambda x: pl.pallas_call(targets.scale_kernel, interpret=how,
                                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x), X)
    assert kernels(for_tpu(program)) == [False]
    assert not for_tpu(program).effects
