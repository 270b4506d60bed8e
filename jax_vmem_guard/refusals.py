"""Lowers a program with references in the place of kernels that cannot be lowered, where their author asked for that."""

from __future__ import annotations

from typing import Any

from jax_vmem_guard import _jax, _jax_trace, declared
from jax_vmem_guard.choice_records import change_of, references_to_try, say_reference_is_used
from jax_vmem_guard.journal import Repair, journal
from jax_vmem_guard.refused import first_line, refused_before_compile
from jax_vmem_guard.retrace import Retracer


def lowered_otherwise(error: Exception, lowering: _jax.Lowering) -> tuple[Any, _jax.Lowering] | None:
    """The program lowered with references, where a kernel could not be lowered and its author declared one for that.

    Returns:
      The computation and how it was lowered; None where `error` stands.
    """
    if not declared.any_declared("lowering") or not refused_before_compile(error):
        return None
    try:
        retracer = Retracer(lowering)
    except _jax_trace.CannotTraceAgain as reason:
        error.add_note(f"jax_vmem_guard: no declared fallback was tried: {reason}")
        return None
    for keys in references_to_try(retracer.sites, retracer.chosen):
        chosen = {**retracer.chosen, **dict.fromkeys(keys, 1)}
        try:
            traced, _ = retracer.program(chosen)
            again = lowering.made_again(traced, chosen)
            computation = again.again(traced)
        except Exception:  # another kernel is refused too, or the reference is: the next ones
            continue
        _record(keys, retracer, lowering, error)
        return computation, again
    return None


def _record(keys: tuple[str, ...], retracer: Retracer, lowering: _jax.Lowering, error: Exception) -> None:
    changes = tuple(change_of(key, retracer.sites[key], retracer.chosen.get(key, 0), 1, (), None) for key in keys)
    for key in keys:
        say_reference_is_used(retracer.sites[key], "lowering", f"its kernel was refused: {first_line(error)}")
    journal.record(Repair(program=str(lowering.fun_name), chip="(before the compiler)", compiles=0, probes=0,
                          changes=changes))
