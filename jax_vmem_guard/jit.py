"""`vmem_guard.jit`: `jax.jit` whose programs are guarded."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax

from jax_vmem_guard import _jax, hook
from jax_vmem_guard.policy import Policy


def jit(fun: Callable[..., Any] | None = None, /, *, policy: Policy | None = None, **jit_options: Any) -> Any:
    """`jax.jit` with the guard: the same call, the same options, the same object back.

    What it returns is what `jax.jit` returns, so a call costs what a call of a jitted function costs, and `.lower`,
    `.trace`, `.eval_shape` and `.clear_cache` are JAX's own. The guard follows the function into `jax.grad`,
    `jax.vmap`, scans and an outer `jax.jit`; other functions are not guarded.

    Args:
      fun: function to compile. Left out, `jit(...)` is a decorator.
      policy: what the guard may do for this function; `Policy()` if None.
      **jit_options: every option of `jax.jit`.

    Raises:
      TypeError: `fun` is not callable, or `policy` is not a `Policy`.
      IncompatibleJax: this JAX is not one the guard knows.

    Example:
      >>> @vmem_guard.jit(static_argnames="causal")
      ... def attend(q, k, v, causal=True): ...
    """
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"`policy` must be a jax_vmem_guard.Policy, got {policy!r}; write Policy(mode=\"fix\")")
    if fun is None:
        return functools.partial(jit, policy=policy, **jit_options)
    if not callable(fun):
        raise TypeError(f"`jit` takes a function, got {fun!r}; options go by keyword, as in jit(f, donate_argnums=0)")
    hook.ensure_seams()
    jitted: Any = jax.jit(_marked(fun, policy if policy is not None else Policy()), **jit_options)
    jitted.__wrapped__ = fun
    return jitted


def _marked(fun: Any, policy: Policy) -> Any:
    """A callable that traces like `fun` and whose name carries the policy."""
    if isinstance(fun, types.FunctionType):
        return _marked_function(fun, policy)
    if isinstance(fun, types.MethodType) and isinstance(fun.__func__, types.FunctionType):
        return types.MethodType(_marked_function(fun.__func__, policy), fun.__self__)
    if type(fun) is functools.partial:
        return functools.partial(_marked(fun.func, policy), *fun.args, **fun.keywords)
    return _marked_callable(fun, policy)


#: Attribute of a function that holds its marked copies, by policy: `jit(f)` in a loop is then traced once, as JAX's is.
_COPIES = "_jax_vmem_guard_copies"


def _marked_function(fun: types.FunctionType, policy: Policy) -> types.FunctionType:
    copies = fun.__dict__.setdefault(_COPIES, {})
    if policy not in copies:
        copies[policy] = _copy(fun, policy)
    marked: types.FunctionType = copies[policy]
    return marked


def _copy(fun: types.FunctionType, policy: Policy) -> types.FunctionType:
    # The copy shares code, globals and closure cells: it is traced to the same program, with the same source lines.
    copy = types.FunctionType(fun.__code__, fun.__globals__, fun.__name__, fun.__defaults__, fun.__closure__)
    functools.update_wrapper(copy, fun)
    copy.__dict__.pop("__wrapped__")  # update_wrapper's own; one that `fun` has comes back with the next line
    copy.__dict__.update(fun.__dict__)
    copy.__dict__.pop(_COPIES, None)
    copy.__kwdefaults__ = fun.__kwdefaults__
    copy.__name__ = hook.GuardedName(fun.__name__, policy)
    return copy


def _marked_callable(fun: Any, policy: Policy) -> Any:
    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    call.__name__ = hook.GuardedName(_jax.name_of(fun), policy)
    return call
