"""Stands between JAX's lowering and the compiler, for the whole process or for marked functions.

The state of this file is the only global state of the guard besides the journal: the seams into JAX, and the policy that
`install()` set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_vmem_guard import _jax, _jax_trace, guard, refusals
from jax_vmem_guard.locks import ForkSafeLock
from jax_vmem_guard.policy import Policy


class GuardedName(str):
    """A function name that carries a policy.

    JAX hands a jitted function's name through tracing, grad, vmap, scan and nested jit unchanged, as the same object,
    so the mark reaches the lowering of everything that is made from the function. It equals the plain name and lowers
    to the same module.
    """

    policy: Policy
    #: Some marked function of this process has a plan file.
    any_plan_file = False

    def __new__(cls, name: str, policy: Policy) -> GuardedName:
        marked = super().__new__(cls, name)
        marked.policy = policy
        if policy.plan_file is not None:
            cls.any_plan_file = True
        return marked

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # A copy in another process is not guarded there; it is the plain name.
        return str, (str(self),)


#: Called as `detour(lower, closed_jaxpr, arguments, keywords)` before a program is lowered; `lower` is what JAX would
#: call, guarded. The first that does not return `NotImplemented` gives the lowered program. `check` and `rehearse`
#: stand here, to lower a program for chips that are not in this machine.
lowering_detours: list[Callable[..., Any]] = []

_lock = ForkSafeLock()
_seams = _jax.Seams()
_refusing = False  # every compile raises what was wrong with the environment, until the program installs the guard itself
_trace_seam = _jax_trace.TraceSeam()
_installed: Policy | None = None
_functions_marked = False
_traces_watched = False


def install(policy: Policy | None = None) -> None:
    """Guard every `jax.jit` of the process, also of functions decorated before this call.

    Calling it again replaces the policy. Functions that are already compiled stay as they are.

    Args:
      policy: what the guard may do; the default `Policy()` if None.

    Raises:
      TypeError: `policy` is not a `Policy`.
      IncompatibleJax: this JAX is not one the guard knows.
    """
    global _installed
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"`policy` must be a jax_vmem_guard.Policy, got {policy!r}; write Policy(mode=\"fix\")")
    with _lock:
        _patch()
        _installed = policy if policy is not None else Policy()


def uninstall() -> None:
    """Put JAX back as it was. What is compiled stays compiled; nothing is guarded until the next `install()` or
    `vmem_guard.jit(...)`."""
    global _installed, _functions_marked
    with _lock:
        _installed, _functions_marked = None, False
        _restore_if_unneeded()


def refuse(error: Exception) -> None:
    """Let the next compile raise `error`: the environment asked for something the guard does not know."""
    def stop(*args: Any, **kwargs: Any) -> Any:
        raise error

    global _refusing
    with _lock:
        _restore()
        _seams.patch(stop, stop)
        _refusing = True


def ensure_seams() -> None:
    """Make marked functions guarded, without a policy for the others."""
    global _functions_marked
    with _lock:
        _functions_marked = True
        _patch()


def installed_policy() -> Policy | None:
    """The policy `install()` set, or None."""
    return _installed


def add_detour(detour: Callable[..., Any]) -> None:
    """Let `detour` see every program before it is lowered; see `lowering_detours`."""
    with _lock:
        _patch()
        lowering_detours.append(detour)


def remove_detour(detour: Callable[..., Any], *, uninstall_too: bool) -> None:
    """Undo `add_detour`. With `uninstall_too`, put JAX back as it was if nothing else needs the guard."""
    with _lock:
        lowering_detours.remove(detour)
        if uninstall_too:
            _restore_if_unneeded()


def add_interceptor(interceptor: Callable[..., Any]) -> None:
    """Let `interceptor` see every module before it is compiled, on any backend; see `_jax.compile_interceptors`."""
    with _lock:
        _patch()
        _jax.compile_interceptors.append(interceptor)


def remove_interceptor(interceptor: Callable[..., Any], *, uninstall_too: bool) -> None:
    """Undo `add_interceptor`. With `uninstall_too`, put JAX back as it was if nothing else needs the guard."""
    with _lock:
        _jax.compile_interceptors.remove(interceptor)
        if uninstall_too:
            _restore_if_unneeded()


def watch_traces() -> None:
    """Keep how programs are traced, whenever the guard is on: a function with declared choices exists."""
    global _traces_watched
    with _lock:
        _traces_watched = True
        if _seams.active:
            _patch()


def _patch() -> None:
    global _refusing
    if _refusing:
        _restore()
        _refusing = False
    _seams.patch(_on_lower, _on_compile)
    if _traces_watched:
        _trace_seam.patch(_on_trace)


def _restore() -> None:
    _seams.restore()
    _trace_seam.restore()


def _restore_if_unneeded() -> None:
    if not (_installed or _functions_marked or lowering_detours or _jax.compile_interceptors):
        _restore()


def seams_active() -> bool:
    """Whether JAX's lowering and compiling go through the guard, for whatever reason."""
    return _seams.active


def _on_lower(original: Any, closed_jaxpr: Any, api_name: str, fun_name: str, *args: Any, **kwargs: Any) -> Any:
    def lower(closed_jaxpr: Any, api_name: str, fun_name: str, *args: Any, **kwargs: Any) -> Any:
        lowering = _jax.Lowering(closed_jaxpr, fun_name, original, (api_name, fun_name, *args), kwargs,
                                 settings=_jax_trace.Settings(),
                                 call=_jax_trace.call_of(closed_jaxpr) if _traces_watched else None)
        try:
            computation = original(closed_jaxpr, api_name, fun_name, *args, **kwargs)
        except Exception as error:
            policy = _policy_of(lowering) or _policy_inside(lowering)
            found = refusals.lowered_otherwise(error, lowering) if policy is not None and policy.mode == "fix" else None
            if found is None:
                raise
            computation, lowering = found
        _jax.remember_lowering(computation, lowering)
        return computation

    for detour in tuple(lowering_detours):
        computation = detour(lower, closed_jaxpr, (api_name, fun_name, *args), kwargs)
        if computation is not NotImplemented:
            return computation
    return lower(closed_jaxpr, api_name, fun_name, *args, **kwargs)


def _on_trace(original: Any, fun: Any, info: Any, args: Any, kwargs: Any) -> Any:
    params, flat = original(fun, info, args, kwargs)
    if _jax_trace.nothing_is_traced():
        _jax_trace.remember(original, fun, info, args, kwargs, params)
    return params, flat


def _on_compile(original: Any, computation: Any, compiler_options: Any, device_assignment: Any) -> Any:
    program = None
    lowering = _jax.remembered_lowering(computation)
    try:
        if not (_jax.is_tpu(computation) or _jax.compile_interceptors):
            return original(computation, compiler_options, device_assignment=device_assignment)
        program = _jax.Program(computation, original, compiler_options, device_assignment)
        return guard.compile_program(program, _policy_of(lowering), lambda: _policy_inside(lowering))
    finally:
        if lowering is not None and not (program is not None and program.was_refused):
            lowering.loosen()


def _policy_of(lowering: _jax.Lowering | None) -> Policy | None:
    """The policy of a whole program: its own mark, or the process's."""
    if lowering is not None and isinstance(lowering.fun_name, GuardedName):
        return lowering.fun_name.policy
    if _installed is None and GuardedName.any_plan_file:
        # What is remembered of a marked function inside has to be known before the first compile.
        inside = _policy_inside(lowering)
        return inside if inside is not None and inside.plan_file is not None else None
    return _installed


def _policy_inside(lowering: _jax.Lowering | None) -> Policy | None:
    """The policy of a marked function that an unmarked program calls. Looked for only after a failure."""
    if lowering is None or lowering.closed_jaxpr is None:
        return None
    names = (equation.params.get("name") for equation in _jax.equations(lowering.closed_jaxpr))
    return next((name.policy for name in names if isinstance(name, GuardedName)), None)
