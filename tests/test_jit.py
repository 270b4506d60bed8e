"""`vmem_guard.jit` is `jax.jit`, for every kind of callable and every option."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import hook

pytestmark = pytest.mark.compat


def double(x, *, by=2):
    """Doubles."""
    return x * by


class Model:
    def __init__(self, scale):
        self.scale = scale

    def apply(self, x):
        return x * self.scale

    def __call__(self, x):
        return x + self.scale

    @functools.partial(vmem_guard.jit, static_argnums=0)
    def decorated(self, x):
        return x - self.scale


def lowered_text(function, *args):
    return function.lower(*args).as_text()


@pytest.mark.parametrize("fun", [
    double, lambda x: x + 1, functools.partial(double, by=3), Model(3).apply, Model(3), jax.jit(double), jnp.sin,
], ids=["function", "lambda", "partial", "method", "callable", "jitted", "ufunc"])
def test_any_callable_compiles_to_the_module_that_jax_jit_makes(fun):
    assert lowered_text(vmem_guard.jit(fun), 1.5) == lowered_text(jax.jit(fun), 1.5)
    assert vmem_guard.jit(fun)(1.5) == jax.jit(fun)(1.5)


def test_decorating_with_and_without_arguments():
    @vmem_guard.jit
    def plain(x):
        return x + 1

    @vmem_guard.jit(static_argnames=("n",))
    def power(x, n):
        return x ** n

    assert plain(1) == 2
    assert power(2, n=3) == 8
    assert power(2, 3) == 8


def test_methods_can_be_decorated():
    assert Model(2).decorated(5) == 3


def test_donated_arguments_are_donated():
    @vmem_guard.jit(donate_argnums=0)
    def step(x):
        return x + 1

    x = jnp.ones(4)
    step(x)
    assert x.is_deleted()


def test_pytrees_closures_defaults_and_keyword_only_arguments():
    offset = 10

    @vmem_guard.jit
    def f(tree, scale=2, *, shift=0):
        return jax.tree.map(lambda leaf: leaf * scale + shift + offset, tree)

    assert f({"a": 1, "b": (2, 3)}, shift=1) == {"a": 13, "b": (15, 17)}


def test_a_closure_sees_later_assignments_as_the_function_itself_does():
    value = 1

    def f(x):
        return x + value

    guarded = vmem_guard.jit(f)
    value = 5
    assert guarded(1) == 6


def test_ahead_of_time_stages_are_jaxs_own():
    guarded = vmem_guard.jit(double)
    assert type(guarded) is type(jax.jit(double))
    assert guarded.trace(2.0).lower().compile()(2.0) == 4.0
    assert guarded.eval_shape(2.0).shape == ()
    guarded(2.0)
    guarded.clear_cache()
    assert guarded(2.0) == 4.0


def test_metadata_is_the_functions():
    guarded = vmem_guard.jit(double)
    assert guarded.__wrapped__ is double
    assert guarded.__name__ == "double" and guarded.__doc__ == "Doubles."
    assert inspect.signature(guarded) == inspect.signature(double)
    assert double.__name__.__class__ is str, "the caller's function must not be marked"


def test_transformations_and_nesting_give_what_jax_jit_gives():
    guarded = vmem_guard.jit(lambda x: jnp.sin(x) * x)
    assert jax.grad(guarded)(2.0) == jax.grad(jax.jit(lambda x: jnp.sin(x) * x))(2.0)
    assert jnp.allclose(jax.vmap(guarded)(jnp.arange(3.0)), jnp.sin(jnp.arange(3.0)) * jnp.arange(3.0))
    assert jax.jit(lambda x: guarded(x) + 1)(0.0) == 1.0
    total, _ = jax.lax.scan(lambda c, x: (c + guarded(x), None), 0.0, jnp.ones(3))
    assert jnp.allclose(total, 3 * jnp.sin(1.0))


@pytest.mark.parametrize("derive", [
    lambda f: jax.jit(jax.grad(f)), lambda f: jax.jit(jax.vmap(f)),
    lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, y: (f(y), None), x[0], x)[0]),
    lambda f: jax.jit(lambda x: jax.checkpoint(f)(x)),
], ids=["grad", "vmap", "scan", "remat"])
def test_the_mark_reaches_programs_made_from_the_function(derive):
    policy = vmem_guard.Policy(mode="report")
    guarded = vmem_guard.jit(lambda x: jnp.sum(jnp.sin(x)), policy=policy)
    argument = jnp.ones(3)
    computation = derive(guarded).lower(argument)._lowering
    from jax_vmem_guard import _jax
    assert hook._policy_inside(_jax.remembered_lowering(computation)) == policy


def test_other_functions_are_not_guarded():
    vmem_guard.jit(double)
    from jax_vmem_guard import _jax
    computation = jax.jit(double).lower(1.0)._lowering
    lowering = _jax.remembered_lowering(computation)
    assert hook._policy_of(lowering) is None and hook._policy_inside(lowering) is None


@pytest.mark.parametrize(("call", "said"), [
    (lambda: vmem_guard.jit(3), "takes a function, got 3"),
    (lambda: vmem_guard.jit(double, policy="fix"), "must be a jax_vmem_guard.Policy"),
    (lambda: vmem_guard.install("fix"), "must be a jax_vmem_guard.Policy"),
    (lambda: vmem_guard.jit(double, no_such_option=1), "no_such_option"),
])
def test_bad_arguments_are_named(call, said):
    with pytest.raises(TypeError, match=said):
        call()


def test_marked_names_travel_to_other_processes_as_plain_names():
    import pickle

    name = hook.GuardedName("step", vmem_guard.Policy())
    assert type(pickle.loads(pickle.dumps(name))) is str


def test_jit_of_the_same_function_again_is_not_traced_again():
    traces = []

    def f(x):
        traces.append(x)
        return x + 1

    for _ in range(3):
        vmem_guard.jit(f)(1.0)
    assert len(traces) == 1
    vmem_guard.jit(f, policy=vmem_guard.Policy(mode="report"))(1.0)
    assert len(traces) == 2, "another policy is another program"
