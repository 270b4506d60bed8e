"""`vmem_guard.rehearse`: a training script runs here, to its last line, while it is compiled for chips elsewhere."""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jax_vmem_guard import _jax, hook
from jax_vmem_guard.interpret import has_kernels, interpreted, zeroed
from jax_vmem_guard.judge import Judgement, did_not_lower, judge
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.rows import Row, exit_code, summary
from jax_vmem_guard.stand_in import StandIn, Topology, topology_named

logger = logging.getLogger("jax_vmem_guard")

OUTPUTS = ("interpret", "zeros")


class Rehearsal:
    """What a rehearsal has seen so far: one judgement for each distinct program with TPU kernels.

    Attributes:
      topology: what the programs are compiled for.
      judgements: in the order in which the script lowered the programs.
      zeroed: names of programs whose kernels could not be interpreted on this machine; they gave zeros.
      on_begin: called with a program's name before it is compiled for the topology.
      on_judged: called with each judgement.
    """

    def __init__(self, topology: Topology, policy: Policy, outputs: str):
        self.topology = topology
        self.judgements: list[Judgement] = []
        self.zeroed: list[str] = []
        self.on_begin: Callable[[str], None] = lambda program: None
        self.on_judged: Callable[[Judgement], None] = lambda judgement: None
        self._policy, self._outputs = policy, outputs
        self._stand_in = StandIn(topology)
        self._seen: set[bytes] = set()
        self._open = True
        self._lock = threading.RLock()

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all judgements: one per kernel and program."""
        return tuple(row for judgement in self.judgements for row in judgement.rows)

    def exit_code(self, *, max_share: float | None = None) -> int:
        """0 where all kernels fit as they are or after repair, 1 where one does not, 2 where one could not be judged."""
        return exit_code(self.rows, max_share=max_share)

    def to_html(self) -> str:
        """The rows as one self-contained page."""
        from jax_vmem_guard.html import page

        return page(self.rows, title=f"Rehearsal for {self.topology.name}")

    def __str__(self) -> str:
        from jax_vmem_guard.matrix import plain_text

        return f"{summary(self.rows)}\n{plain_text(self.rows)}"

    def _on_lower(self, lower: Any, jaxpr: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Stands before JAX's lowering: gives a program that runs here, and whose compilation asks the topology's
        compiler first."""
        call = _jax.LoweringCall.of(arguments, keywords)
        if call.platforms is not None or not has_kernels(jaxpr) or call.names_device_of("tpu"):
            return NotImplemented
        computation = self._lower_for_here(lower, jaxpr, call)
        _jax.compile_by(computation, functools.partial(self._on_compile, lower, jaxpr, call))
        return computation

    def _on_compile(self, lower: Any, jaxpr: Any, call: _jax.LoweringCall, compile_here: Any,
                    compiler_options: dict[str, Any] | None) -> Any:
        with self._lock:
            if self._open:
                self._judge(lower, jaxpr, call, compiler_options)
        return compile_here()

    def _judge(self, lower: Any, jaxpr: Any, call: _jax.LoweringCall, compiler_options: dict[str, Any] | None) -> None:
        marked = call.named(hook.GuardedName(call.name, self._policy))
        try:
            computation = self._stand_in.lowering(lower, jaxpr, marked)
        except Exception as error:
            if self._is_new(f"{call.name}: {error}"):
                self._add(did_not_lower(error, self.topology, program=call.name))
            return
        if self._is_new(f"{computation.stablehlo()} {compiler_options} {call.compiler_options}"):
            self.on_begin(call.name)
            self._add(judge(computation, self.topology, program=call.name, compiler_options=compiler_options))

    def _is_new(self, program: str) -> bool:
        digest = hashlib.sha256(program.encode()).digest()
        is_new = digest not in self._seen
        self._seen.add(digest)
        return is_new

    def _add(self, judgement: Judgement) -> None:
        self.judgements.append(judgement)
        self.on_judged(judgement)

    def close(self) -> None:
        """Judge nothing more: programs lowered here and compiled later only run here."""
        self._open = False

    def _lower_for_here(self, lower: Any, jaxpr: Any, call: _jax.LoweringCall) -> Any:
        call = call.without_compiler_options()  # they are a TPU's; a CPU refuses what it does not know
        if self._outputs == "zeros":
            return lower(zeroed(jaxpr), *call.arguments, **call.keywords)
        try:
            return lower(interpreted(jaxpr), *call.arguments, **call.keywords)
        except Exception as error:
            logger.warning("rehearse: the kernels of `%s` cannot be interpreted on a CPU (%s: %s); they give zeros",
                           call.name, type(error).__name__, (str(error).strip().splitlines() or [""])[0])
            self.zeroed.append(call.name)
            return lower(zeroed(jaxpr), *call.arguments, **call.keywords)


_active = threading.Lock()


@contextmanager
def rehearse(topology: str = "v5e:2x2", *, policy: Policy | None = None, outputs: str = "interpret"
             ) -> Iterator[Rehearsal]:
    """Run on this machine's CPU what is meant for a TPU, and compile each program with TPU kernels for that TPU too.

    Inside, a Pallas TPU kernel runs in interpret mode, so that the script gets to its last line with real numbers, and
    the same traced program is compiled for `topology` under the guard. Kernels that ask for the chip
    (`pltpu.get_tpu_info`) are told it is there. The n-th CPU device stands for the n-th chip: start with
    `XLA_FLAGS=--xla_force_host_platform_device_count=4` to rehearse four. JAX's caches are cleared on the way in and on
    the way out, so that nothing compiled before is missed and nothing interpreted is left.

    Args:
      topology: "v5e:2x2", or the name of a chip for its smallest topology.
      policy: what the guard may do; `Policy()` if None.
      outputs: "interpret", or "zeros" to skip the kernels: results of the right shapes, all zero, in no time.

    Yields:
      The `Rehearsal`, which fills up as programs are lowered.

    Raises:
      ValueError: the topology or `outputs` is unknown.
      RuntimeError: no TPU compiler is installed, or another rehearsal is running.
    """
    if outputs not in OUTPUTS:
        raise ValueError(f"`outputs` does not know {outputs!r}; allowed: {', '.join(OUTPUTS)}")
    found = topology_named(topology)
    if not _active.acquire(blocking=False):
        raise RuntimeError("a rehearsal is running already; one process rehearses for one topology at a time")
    try:
        rehearsal = Rehearsal(found, policy if policy is not None else Policy(), outputs)
        was_active = hook.seams_active()
        jax.clear_caches()
        hook.add_detour(rehearsal._on_lower)
        try:
            with _jax.answering_for_chip(found.devices[0]):
                yield rehearsal
        finally:
            rehearsal.close()
            hook.remove_detour(rehearsal._on_lower, uninstall_too=not was_active)
            jax.clear_caches()
    finally:
        _active.release()
