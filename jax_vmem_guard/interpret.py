"""Makes a traced program with TPU kernels run where there is no TPU, and the other way round.

A traced program is data: the `pallas_call` equations in it say whether they are to be interpreted. Three rewrites of
that data, each giving a new program and leaving the old one as it was:

* `interpreted`: every kernel runs in interpret mode, so the program runs on a CPU;
* `zeroed`: every kernel is replaced by zeros of its results' shapes, so the program runs on a CPU at once;
* `for_tpu`: every kernel is compiled for real, and host callbacks, which a compile-only client cannot hold, are zeros.

Everything is recognised by what it has (`eqns`, `params`), not by class: JAX 0.12 merged `ClosedJaxpr` into `Jaxpr`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

KERNEL_PRIMITIVES = ("pallas_call", "mpmd_map")
"""Primitives that become a `tpu_custom_call`: `pl.pallas_call`, and `pl.kernel` / `pl.core_map` (jax >= 0.9)."""

CALLBACK_PRIMITIVES = ("debug_callback", "debug_print", "io_callback", "pure_callback", "python_callback")
CALLBACK_EFFECTS = ("IOEffect", "OrderedIOEffect", "DebugEffect", "OrderedDebugEffect")
"""What host callbacks, and kernels in the simulating interpret mode, leave in a program's effects."""


def is_jaxpr(value: Any) -> bool:
    """Whether `value` is a traced program, open or closed."""
    return hasattr(value, "eqns") and hasattr(value, "replace")


def open_form(jaxpr: Any) -> Any:
    """The part of a traced program that holds the equations (itself, where it is open or the two are one class)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def sub_programs(value: Any) -> list[Any]:
    """The traced programs directly inside one parameter of an equation."""
    if is_jaxpr(value):
        return [value]
    if type(value) in (tuple, list):
        return [program for item in value for program in sub_programs(item)]
    return []


def has_kernels(jaxpr: Any) -> bool:
    """Whether any equation, however deep, is a Pallas kernel."""
    seen: set[int] = set()

    def search(program: Any) -> bool:
        if id(open_form(program)) in seen:
            return False
        seen.add(id(open_form(program)))
        return any(
            eqn.primitive.name in KERNEL_PRIMITIVES
            or any(search(sub) for value in eqn.params.values() for sub in sub_programs(value))
            for eqn in open_form(program).eqns
        )

    return search(jaxpr)


class Rewriter:
    """Rewrites every equation of a traced program, inner programs first; each inner program is rewritten once.

    Rewriting an inner program once keeps two equations that share it sharing it, and so JAX's cache of lowered
    functions keeps working.

    Args:
      equation: maps an equation to the one that takes its place, or to itself. It is not asked about the insides of a
        kernel: kernels are opaque here.
      value: maps a leaf of an equation's parameters (a mesh, a sharding) to what takes its place, or to itself.
      dropped_effects: class names of effects that the new programs do not have.
    """

    def __init__(self, equation: Callable[[Any], Any], value: Callable[[Any], Any] = lambda leaf: leaf,
                 dropped_effects: Collection[str] = ()):
        self._equation = equation
        self._value = value
        self._dropped = frozenset(dropped_effects)
        self._done: dict[int, tuple[Any, Any]] = {}  # id -> (original, kept alive so that its id stays its own; new)

    def program(self, jaxpr: Any) -> Any:
        """The rewritten program; the very same object where nothing changed."""
        known = self._done.get(id(jaxpr))
        if known is not None:
            return known[1]
        inner = open_form(jaxpr)
        if inner is not jaxpr:
            new_inner = self.program(inner)
            new = jaxpr if new_inner is inner else jaxpr.replace(jaxpr=new_inner)
        else:
            eqns = [self._rewrite(eqn) for eqn in jaxpr.eqns]
            same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
            new = jaxpr if same else jaxpr.replace(eqns=eqns, effects=self._effects(jaxpr.effects))
        self._done[id(jaxpr)] = (jaxpr, new)
        return new

    def _rewrite(self, eqn: Any) -> Any:
        if eqn.primitive.name in KERNEL_PRIMITIVES:
            return self._equation(eqn)
        params = {name: self._parameter(value) for name, value in eqn.params.items()}
        if any(params[name] is not value for name, value in eqn.params.items()):
            eqn = eqn.replace(params=params, effects=self._effects(eqn.effects))
        return self._equation(eqn)

    def _effects(self, effects: Any) -> Any:
        if not any(type(effect).__name__ in self._dropped for effect in effects):
            return effects
        return type(effects)(effect for effect in effects if type(effect).__name__ not in self._dropped)

    def _parameter(self, value: Any) -> Any:
        if is_jaxpr(value):
            return self.program(value)
        if type(value) in (tuple, list):  # exactly: a NamedTuple must not be rebuilt from a sequence
            items = [self._parameter(item) for item in value]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else type(value)(items)
        return self._value(value)


def interpreted(jaxpr: Any) -> Any:
    """The program with every kernel in interpret mode. Kernels that already say how to be interpreted keep that."""

    def equation(eqn: Any) -> Any:
        if eqn.primitive.name not in KERNEL_PRIMITIVES or eqn.params["interpret"]:
            return eqn
        return eqn.replace(params=dict(eqn.params, interpret=True))

    return Rewriter(equation).program(jaxpr)


def zeroed(jaxpr: Any) -> Any:
    """The program with zeros in place of every kernel's results: right shapes and types, no time."""

    def equation(eqn: Any) -> Any:
        return zeros_instead(eqn) if eqn.primitive.name in KERNEL_PRIMITIVES else eqn

    return Rewriter(equation).program(jaxpr)


def for_tpu(jaxpr: Any, value: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """The program as a TPU would get it: no kernel interpreted, host callbacks replaced by zeros.

    Args:
      jaxpr: the traced program.
      value: also applied to every leaf of every equation's parameters (see `Rewriter`).
    """

    def equation(eqn: Any) -> Any:
        name = eqn.primitive.name
        if name in KERNEL_PRIMITIVES and eqn.params["interpret"]:
            kept = type(eqn.effects)(e for e in eqn.effects if type(e).__name__ not in CALLBACK_EFFECTS)
            return eqn.replace(params=dict(eqn.params, interpret=False), effects=kept)
        return zeros_instead(eqn) if name in CALLBACK_PRIMITIVES else eqn

    return Rewriter(equation, value, CALLBACK_EFFECTS).program(jaxpr)


def zeros_instead(eqn: Any) -> Any:
    """An equation with the same results' shapes and types, all zero, and no operands, effects or cost."""
    wanted = [(var.aval.shape, var.aval.dtype) for var in eqn.outvars]

    @jax.jit
    def zeros() -> list[jax.Array]:
        return [jnp.zeros(shape, dtype) for shape, dtype in wanted]

    (call,) = open_form(jax.make_jaxpr(zeros)()).eqns
    return call.replace(outvars=eqn.outvars, source_info=eqn.source_info)
