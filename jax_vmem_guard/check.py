"""`vmem_guard.check`: compile a function for a chip that is not here, and say what its kernels need there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jax_vmem_guard import _jax, hook
from jax_vmem_guard.interpret import has_kernels
from jax_vmem_guard.journal import Repair
from jax_vmem_guard.judge import Judgement, did_not_lower, judge
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.report import Report, inspect
from jax_vmem_guard.rows import Row, exit_code, summary
from jax_vmem_guard.stand_in import StandIn, Topology, topology_named

_NAMELESS = "checked_program"

# What a chip answers while a program is traced is one for the process: one check at a time.
_one_at_a_time = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Checked(Report):
    """The `Report` of a function compiled for a topology, and what the compiler and the guard made of it.

    `kernels` and `instructions` are those of the compiled program, repairs included; where it did not compile, those
    of the program as it was lowered.

    Attributes:
      topology: name of the topology.
      rows: one per kernel: need, limit, capacity, headroom, verdict, what was changed.
      error: what the compiler raised, with the guard's notes; None where the program compiled.
      repair: what the guard changed; None where nothing.
      executable: JAX's executable; it cannot run here. None where the program did not compile.
    """

    topology: str
    rows: tuple[Row, ...]
    error: BaseException | None = None
    repair: Repair | None = None
    executable: Any = None

    @property
    def fits(self) -> bool:
        """The program compiles, as it is or after repair."""
        return self.error is None

    def exit_code(self, *, max_share: float | None = None) -> int:
        """0 where all kernels fit as they are or after repair, 1 where one does not, 2 where one could not be judged."""
        return exit_code(self.rows, max_share=max_share)

    def to_json(self) -> str:
        """The report as JSON, with `topology`, `rows` and the `error`'s text besides."""
        return json.dumps(json.loads(super().to_json()) | {
            "topology": self.topology, "fits": self.fits, "rows": [row.to_dict() for row in self.rows],
            "error": None if self.error is None else str(self.error)}, indent=2)

    def to_html(self) -> str:
        """The rows as one self-contained page."""
        from jax_vmem_guard.html import page

        return page(self.rows, title=f"Scoped VMEM on {self.topology}",
                    instructions=[(row.name, row.used_bytes, row.limit_bytes) for row in self.instructions])

    def __str__(self) -> str:
        from jax_vmem_guard.matrix import plain_text

        return f"{summary(self.rows)}\n{plain_text(self.rows)}"


def check(fun: Callable[..., Any], *args: Any, topology: str = "v5e:2x2", policy: Policy | None = None,
          **kwargs: Any) -> Checked:
    """Compile `fun(*args, **kwargs)` for a topology that need not be here. Nothing runs.

    Args:
      fun: any function; one that is jitted (`jax.jit`, `nnx.jit`, `eqx.filter_jit`) keeps its options. Kernels in it
        may be written for interpret mode: they are compiled for real.
      *args: arrays or `jax.ShapeDtypeStruct`s, in pytrees. Shardings over this machine's devices or over an
        `AbstractMesh` are laid over the topology's chips in order. For a function that is not jitted, everything that is
        no array is passed as it is.
      topology: "v5e:2x2", or the name of a chip for its smallest topology.
      policy: what the guard may do; `Policy()` if None, so that the verdict says what it would repair.
        `Policy(mode="off")` judges the program as it is.
      **kwargs: keyword arguments of `fun`.

    Raises:
      ValueError: the topology is unknown.
      RuntimeError: no TPU compiler is installed.
      Whatever `fun` raises while it is traced.
    """
    found = topology_named(topology)
    judgement = judge_function(fun, args, kwargs, topology=found, policy=policy if policy is not None else Policy())
    kernels = _report(judgement, found)
    return Checked(chip=found.chip.name, kernels=kernels.kernels, instructions=kernels.instructions,
                   topology=found.name, rows=judgement.rows, error=judgement.error, repair=judgement.repair,
                   executable=judgement.executable)


def _report(judgement: Judgement, topology: Topology) -> Report:
    program = judgement.executable if judgement.executable is not None else judgement.module
    if program is None:
        return Report(chip=topology.chip.name, kernels=())
    return inspect(program, chip=topology.chip.name)


def judge_function(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, topology: Topology,
                   policy: Policy, program: str | None = None) -> Judgement:
    """`check`, as a judgement; `program` is the name in the rows, that of the function if None."""
    stand_in = StandIn(topology)
    name = program or str(getattr(fun, "__name__", type(fun).__name__))
    wanted = str(getattr(fun, "__name__", _NAMELESS))
    caller = threading.get_ident()
    lowered: list[Any] = []
    problems: list[BaseException] = []

    def on_lower(lower: Any, jaxpr: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        call = _jax.LoweringCall.of(arguments, keywords)
        # Tracing may also run small eager computations of its own, which are for this machine.
        if threading.get_ident() != caller or not (call.name == wanted or has_kernels(jaxpr)):
            return NotImplemented
        try:
            computation = stand_in.lowering(lower, jaxpr, call.named(hook.GuardedName(call.name, policy)))
        except Exception as error:
            problems.append(error)
            raise
        lowered.append(computation)
        return computation

    with _one_at_a_time:
        was_active = hook.seams_active()
        hook.add_detour(on_lower)
        try:
            with _jax.answering_for_chip(topology.devices[0], as_devices=topology.devices), \
                    _jax.tracing_for(topology.name):
                _lower(fun, stand_in.concrete(args), stand_in.concrete(kwargs))
                if not lowered:
                    raise TypeError(f"`{name}` was not lowered by `jax.jit`; give `check` a function of arrays")
                return judge(lowered[-1], topology, program=name)
        except Exception as error:
            if error in problems:
                return did_not_lower(error, topology, program=name)
            raise
        finally:
            hook.remove_detour(on_lower, uninstall_too=not was_active)


def _lower(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Equinox's `filter_jit` takes an abstract array for a static value (0.13); called while tracing, it sees arrays.
    if hasattr(fun, "lower") and not type(fun).__module__.startswith("equinox"):
        fun.lower(*args, **kwargs)
        return
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]

    def call(arrays: list[Any]) -> Any:
        given = iter(arrays)
        full = [next(given) if is_array else leaf for leaf, is_array in zip(leaves, traced, strict=True)]
        inner_args, inner_kwargs = jax.tree.unflatten(tree, full)
        return fun(*inner_args, **inner_kwargs)

    call.__name__ = str(getattr(fun, "__name__", _NAMELESS))
    jax.jit(call).lower([leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array])
