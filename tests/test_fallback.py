"""A reference in the place of a kernel that nothing makes fit, or that is refused; said loudly, gradients included."""

import logging

import jax
import jax.numpy as jnp
import pytest
from declared_programs import ARRAY, LARGE, SMALL, choices_taken, compile_guarded
from jax.experimental import pallas as pl
from kernels_on_chips import MiB, add, array, lower_with, used_by_kernels

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import Policy

ONLY_LIMITS = Policy(remedies=("limit",))


@pytest.fixture
def repaired():
    """The repairs made by one test."""
    done = len(vmem_guard.repairs())
    return lambda: vmem_guard.repairs()[done:]


def reference(x, y):
    return x + y


def too_large(x, y):
    return add(x, y, block=LARGE)


def differentiable(x):
    """A kernel with a gradient, both too large for v4."""
    @jax.custom_vjp
    def double(x):
        return add(x, x, block=LARGE, name="forward")

    double.defvjp(lambda x: (double(x), None), lambda _, g: (add(g, g, block=LARGE, name="backward"),))
    return double(x)


@pytest.mark.compat
def test_the_reference_is_compiled_where_nothing_makes_the_kernel_fit(repaired, caplog):
    either = vmem_guard.fallback(too_large, reference)
    with caplog.at_level(logging.WARNING, "jax_vmem_guard"):
        for scale in (2, 3):
            compiled = compile_guarded(lambda x, scale=scale: either(x, x) * scale, ARRAY, policy=ONLY_LIMITS)
    assert [choices_taken(repair) for repair in repaired()] == [[1], [1]] and used_by_kernels(compiled) == []
    loud = [record for record in caplog.records if record.getMessage().startswith("FALLBACK")]
    [record] = loud
    assert record.levelno == logging.WARNING and "`reference` runs in the place of `too_large`" in record.getMessage()


@pytest.mark.compat
def test_gradients_are_the_references_own(repaired):
    either = vmem_guard.fallback(differentiable, lambda x: x * 2)
    compiled = compile_guarded(jax.grad(lambda x: jnp.sum(jnp.sin(either(x)))), ARRAY, policy=ONLY_LIMITS)
    [repair] = repaired()
    assert [change.remedy for change in repair.changes] == ["fallback"] and used_by_kernels(compiled) == []


def test_every_remedy_comes_before_the_reference(repaired):
    compile_guarded(vmem_guard.fallback(too_large, reference), ARRAY, ARRAY)
    assert [change.remedy for change in repaired()[0].changes] == ["split"]


def test_every_choice_comes_before_the_reference(repaired):
    tuned = vmem_guard.tunable(add, block=[1024, LARGE, SMALL])
    compiled = compile_guarded(vmem_guard.fallback(tuned, reference), ARRAY, ARRAY, policy=ONLY_LIMITS)
    assert [change.remedy for change in repaired()[0].changes] == ["tunable"]
    assert used_by_kernels(compiled) == [12 * MiB]


def test_the_reference_of_a_tunable_none_of_whose_choices_fit(repaired):
    tuned = vmem_guard.tunable(add, block=[1024, LARGE])
    other = vmem_guard.tunable(add, block=[256, SMALL])

    def fun(x):
        return vmem_guard.fallback(tuned, reference)(x, other(x * 2, x))

    compiled = compile_guarded(fun, ARRAY, policy=ONLY_LIMITS)
    assert sorted(change.remedy for change in repaired()[0].changes) == ["fallback", "tunable"]
    assert used_by_kernels(compiled) == [12 * MiB]


def test_a_reference_with_another_result_is_refused():
    either = vmem_guard.fallback(too_large, lambda x, y: (x + y).astype(jnp.bfloat16))
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        compile_guarded(either, ARRAY, ARRAY, policy=ONLY_LIMITS)
    assert "results" in "\n".join(error.value.__notes__)


# ---- kernels that are refused


def untraceable(x, y):
    raise NotImplementedError("not for this dtype")


def without_lowering_rule(x, y):
    """A kernel that JAX traces and Pallas cannot lower for a TPU."""
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.linalg.cholesky(x_ref[...]) + y_ref[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)


def misaligned(x, y):
    """A block that Pallas does not take: 100 of 256 columns."""
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    block = pl.BlockSpec((8, 100), lambda i: (0, i))
    return pl.pallas_call(kernel, grid=(3,), in_specs=[block, block], out_specs=block,
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)


SQUARE = array(256, 256)


@pytest.mark.compat
@pytest.mark.parametrize("kernel", [untraceable, without_lowering_rule, misaligned], ids=lambda f: f.__name__)
def test_a_refused_kernel_gives_way_where_that_is_declared(kernel):
    either = vmem_guard.fallback(kernel, reference, on=("vmem", "lowering"))
    compiled = compile_guarded(lambda x: jnp.sin(either(x, x)), SQUARE)
    assert used_by_kernels(compiled) == []


@pytest.mark.parametrize("kernel", [untraceable, without_lowering_rule, misaligned], ids=lambda f: f.__name__)
def test_a_refused_kernel_is_the_callers_error_elsewhere(kernel):
    either = vmem_guard.fallback(kernel, reference)
    with pytest.raises(Exception, match="not for this dtype|cholesky|divisible"):
        compile_guarded(lambda x: jnp.sin(either(x, x)), SQUARE)


def test_a_kernel_for_tpus_gives_way_on_a_cpu():
    either = vmem_guard.fallback(lambda x: add(x, x, block=8), lambda x: x + x, on="lowering")
    assert float(vmem_guard.jit(either)(jnp.ones((8, 128)))[0, 0]) == 2


def test_an_error_in_the_users_own_code_is_never_a_refusal():
    def broken(x):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        compile_guarded(vmem_guard.fallback(broken, lambda x: x, on=("lowering",)), SQUARE)


def test_a_refused_program_is_lowered_once_and_then_repaired(repaired):
    refused = vmem_guard.fallback(without_lowering_rule, reference, on=("lowering",))
    tuned = vmem_guard.tunable(add, block=[LARGE, SMALL])

    def fun(x):
        return tuned(x, x), refused(x[:256, :256], x[:256, :256])

    compiled = compile_guarded(fun, ARRAY)
    assert used_by_kernels(compiled) == [12 * MiB]
    assert [choices_taken(repair) for repair in repaired()] == [[1], [1]]


@pytest.mark.parametrize(("arguments", "on", "kind", "words"), [
    ((add, 3), ("vmem",), TypeError, "`reference_fun` must be a function"),
    ((add, add), ("memory",), ValueError, "one or more of vmem, lowering"),
    ((add, add), (), ValueError, "one or more of vmem, lowering"),
])
def test_a_wrong_declaration_says_what_is_right(arguments, on, kind, words):
    with pytest.raises(kind, match=words):
        vmem_guard.fallback(*arguments, on=on)


def test_without_the_guard_the_kernel_is_called():
    vmem_guard.uninstall()
    assert vmem_guard.fallback(lambda x: x + 1, lambda x: x)(1) == 2
    with pytest.raises(NotImplementedError):
        lower_with(jax.jit(vmem_guard.fallback(untraceable, reference, on=("lowering",))), SQUARE, SQUARE)
