"""A program made again: its Python code traced once more, with declared choices taken otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_vmem_guard import _jax, _jax_trace, declared
from jax_vmem_guard._jax_trace import CannotTraceAgain
from jax_vmem_guard.declared import Declaration


class Retracer:
    """Traces one program again.

    Its first act is to trace the program as it is: that finds the sites, and proves that a second trace gives the
    same program, so that what differs later is the choice and nothing else.

    Attributes:
      chosen: site key -> choice, where the program as it is does not have the first one.
      sites: site key -> declaration, in the order in which the trace meets them.

    Raises:
      CannotTraceAgain: the message says why.
    """

    def __init__(self, lowering: _jax.Lowering | None):
        if lowering is None or lowering.call is None:
            raise CannotTraceAgain(
                "how the program was traced is not known: it was traced before the guard was on, or JAX made it from a "
                "jitted function by `jax.grad` or `jax.vmap` outside of `jax.jit` (put `jax.jit` outermost)")
        self._call = lowering.call
        self._types: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self.chosen: dict[str, int] = dict(lowering.chosen)
        program, self.sites = self.program(self.chosen)
        before = lowering.closed_jaxpr
        if before is not None and _jax_trace.outline(before) != _jax_trace.outline(program):
            raise CannotTraceAgain("traced again it is another program: it depends on more than its arguments")

    def program(self, chosen: Mapping[str, int]) -> tuple[Any, dict[str, Declaration]]:
        """The traced program with these choices, and its sites.

        Raises:
          CannotTraceAgain: it cannot be traced with them; the message says why.
        """
        try:
            with declared.retrace_with(chosen) as retracing:
                program = self._call.again()
        except CannotTraceAgain:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            raise CannotTraceAgain(f"tracing raises {type(error).__name__}: {lines[0][:200]}") from error
        types = _jax_trace.types_of(program)
        self._types = self._types or types
        if types != self._types:
            (_, before), (_, now) = self._types, types
            raise CannotTraceAgain(f"the program's results would be {', '.join(now)} instead of {', '.join(before)}")
        return program, retracing.sites
