"""JAX's private parts that tracing a program a second time needs.

A part of `_jax.py` kept apart because of its size; the rule is the same: every touch says where it was seen.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jax_vmem_guard._jax import _ORIGINAL, IncompatibleJax, _hide_own_frames, _jaxs_own, _topology_state, equations


class CannotTraceAgain(Exception):
    """A program cannot be traced a second time, or comes out as another one; the message says why."""


# --- The seam every trace of a jitted function passes -----------------------------------------------------------------


def _pjit() -> Any:
    from jax._src import pjit  # 0.8.1 to 0.12.0

    return pjit


class TraceSeam:
    """Replaces the function of JAX that traces the argument of `jax.jit`, and puts it back.

    Seen: `pjit._infer_params(fun, ji, args, kwargs)` in 0.8.1, 0.10.2 and 0.12.0, the same with the name
    `_trace_for_jit` in 0.9.0. It returns (`PjitParams`, flat arguments) and is asked once for each call that JAX's C++
    cache does not answer.
    """

    NAMES = ("_infer_params", "_trace_for_jit")
    PARAMETERS = ("fun", "ji", "args", "kwargs")

    def __init__(self) -> None:
        self._original: tuple[str, Any] | None = None

    def patch(self, on_trace: Callable[..., Any]) -> None:
        """Route tracing through `on_trace(original, fun, ji, args, kwargs)`.

        Raises:
          IncompatibleJax: this JAX traces in another way.
        """
        if self._original is not None:
            return
        pjit = _pjit()
        name = next((name for name in self.NAMES if hasattr(pjit, name)), self.NAMES[0])
        original = _jaxs_own(getattr(pjit, name, None))
        if original is None or tuple(inspect.signature(original).parameters) != self.PARAMETERS:
            raise IncompatibleJax(
                f"jax_vmem_guard needs `pjit.{name}({', '.join(self.PARAMETERS)})`, which jax {jax.__version__} does not "
                "have; it was seen in jax 0.8.1 to 0.12.0. Install a jax from that range, or a newer jax_vmem_guard.")

        @functools.wraps(original)
        def watched(fun: Any, ji: Any, args: Any, kwargs: Any) -> Any:
            return on_trace(original, fun, ji, args, kwargs)

        setattr(watched, _ORIGINAL, original)
        self._original = name, original
        setattr(pjit, name, watched)

    def restore(self) -> None:
        """Put JAX's own function back."""
        if self._original is not None:
            setattr(_pjit(), *self._original)
            self._original = None


def nothing_is_traced() -> bool:
    """Whether no transformation of JAX is at work in this thread (`core.trace_state_clean`, 0.8.1 to 0.12.0)."""
    from jax._src import core

    return bool(core.trace_state_clean())


def inside_a_program() -> bool:
    """Whether what runs now becomes part of a program, as opposed to running at once.

    Transformations around it are looked through: `core.trace_ctx.trace` with `parent_trace` down to the
    `pe.DynamicJaxprTrace` of a program (0.8.1 to 0.12.0).
    """
    from jax._src import core
    from jax._src.interpreters import partial_eval

    trace = core.trace_ctx.trace
    while trace is not None:
        if isinstance(trace, partial_eval.DynamicJaxprTrace):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


# --- A trace that can be made again -----------------------------------------------------------------------------------


class TracedCall:
    """How a program was traced: the function, the abstract arguments, and the settings of JAX in force.

    The function is held weakly, as JAX's own caches hold it; `fun` keeps it for those who need it to stay.
    """

    def __init__(self, trace: Callable[..., Any], fun: Any, info: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
                 params: Any):
        self._trace, self._info, self._params_out = trace, info, (params.in_avals, params.out_tree)
        self._fun = weakref.ref(fun)
        static = {i % max(len(args), 1) for i in info.static_argnums}
        self._args = tuple(x if i in static else _abstract(x) for i, x in enumerate(args))
        self._kwargs = {k: x if k in info.static_argnames else _abstract(x) for k, x in kwargs.items()}
        self._context = Settings()

    @property
    def fun(self) -> Any | None:
        """The function; None once nobody else holds it."""
        return self._fun()

    def again(self) -> Any:
        """The traced program, by running the function's Python code once more; no trace kept by JAX is used.

        Raises:
          CannotTraceAgain: the function is gone, or arguments or results are other ones than before.
          Whatever the function raises.
        """
        fun = self.fun
        if fun is None:
            raise CannotTraceAgain("the function of the program is gone")
        with self._context.restored(), _fresh_caches():
            params, _ = self._trace(fun, self._info, self._args, self._kwargs)
        if params.consts:
            raise CannotTraceAgain("it closes over values of an outer trace")
        if (params.in_avals, params.out_tree) != self._params_out:
            raise CannotTraceAgain("its arguments or results have another structure when it is traced again")
        return params.params["jaxpr"]


class DerivedCall:
    """A traced program that was made from another one by a function of it."""

    def __init__(self, of: TracedCall | DerivedCall, derive: Callable[[Any], Any]):
        self._of, self._derive = of, derive

    @property
    def fun(self) -> Any | None:
        return self._of.fun

    def again(self) -> Any:
        return self._derive(self._of.again())


_lock = threading.Lock()
_calls: weakref.WeakKeyDictionary[Any, TracedCall | DerivedCall] = weakref.WeakKeyDictionary()


def remember(original: Callable[..., Any], fun: Any, info: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
             params: Any) -> None:
    """Keep how a program was traced. What cannot be traced again is not kept: programs that close over values of an
    outer trace, and arguments that are no arrays (mutable references)."""
    program = params.params["jaxpr"]
    with _lock:
        known = program in _calls
    if known or params.consts:
        return
    try:
        call = TracedCall(original, fun, info, args, kwargs, params)
    except TypeError:  # a function or an argument that cannot be kept so
        return
    with _lock:
        _calls.setdefault(program, call)


def remember_derived(program: Any, of: Any, derive: Callable[[Any], Any]) -> None:
    """Keep that `program` is `derive(of)`, where it is known how `of` was traced."""
    with _lock:
        call = _calls.get(of)
        if call is not None and program is not of:
            _calls.setdefault(program, DerivedCall(call, derive))


def call_of(program: Any) -> TracedCall | DerivedCall | None:
    """How a program was traced; None where that is not known."""
    with _lock:
        return _calls.get(program)


def outline(program: Any) -> tuple[Any, ...]:
    """What a program does: its arguments, and every primitive with its plain parameters and the types of its results.

    Two traces of one function under the same settings have the same outline.
    """
    rows = [(e.primitive.name, _plain(e.params), tuple(str(v.aval) for v in e.outvars)) for e in equations(program)]
    return *types_of(program), rows


def types_of(program: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Types of a traced program's arguments and of its results, in words."""
    return tuple(map(str, program.in_avals)), tuple(map(str, program.out_avals))


def _plain(params: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The parameters whose text says all about them: numbers, words, enumerations, tuples of these."""
    def is_plain(value: Any) -> bool:
        if isinstance(value, tuple):
            return all(map(is_plain, value))
        return value is None or isinstance(value, (bool, int, float, str, enum.Enum, np.dtype))

    return tuple((name, repr(value)) for name, value in sorted(params.items()) if is_plain(value))


def _abstract(tree: Any) -> Any:
    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            aval = leaf.aval
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=aval.weak_type, sharding=leaf.sharding)
        if isinstance(leaf, (np.ndarray, np.generic)):
            return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
        if isinstance(leaf, jax.ShapeDtypeStruct) or not hasattr(leaf, "dtype"):
            return leaf
        raise TypeError(f"{type(leaf).__name__} is no plain array")

    return jax.tree.map(one, tree)


_numbers = itertools.count(1)


@contextlib.contextmanager
def _fresh_caches() -> Iterator[None]:
    """Inside, JAX uses no trace it made before, of whatever function: the state is part of all keys."""
    state = _topology_state()
    with state(f"{state.value or ''} again {next(_numbers)}"):
        yield


def prepare_caches() -> None:
    """Create the state `_fresh_caches` sets. JAX traces each function once more after that, so it is done early."""
    _topology_state()


class Settings:
    """The settings of JAX in force in a thread: options set by `with`, meshes, x64, precision.

    Seen in 0.8.1 to 0.12.0: `Config` objects (`get_local`, `swap_local`, `set_local`) in `jax._src.config`, in its
    `config_states`, and in `jax._src.mesh` (0.12.0); `mesh.thread_resources.stack` and `.env`.
    """

    #: What belongs to the trace at work, not to its settings.
    OWN = ("trace_state", "axis_env_state")

    def __init__(self) -> None:
        from jax._src import mesh

        self._local = [(config, config.get_local()) for config in _configs()]
        self._meshes = list(mesh.thread_resources.stack)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        from jax._src import mesh

        changed = [(config, value) for config, value in self._local if config.get_local() is not value]
        resources = mesh.thread_resources
        stack, env = resources.stack, resources.env
        before = []
        try:
            for config, value in changed:
                before.append((config, config.swap_local(value)))
                _tell_hook(config, value)
            resources.stack, resources.env = self._meshes, self._meshes[-1]
            yield
        finally:
            resources.stack, resources.env = stack, env
            for config, value in reversed(before):
                config.set_local(value)
                _tell_hook(config, value)


def _configs() -> list[Any]:
    from jax._src import config, mesh

    kind: Any = config.State.__mro__[1]
    found = {id(c): c for name, c in [*vars(config).items(), *vars(mesh).items(), *config.config_states.items()]
             if isinstance(c, kind) and name not in Settings.OWN}
    return list(found.values())


def _tell_hook(config: Any, value: Any) -> None:
    from jax._src import config as module

    hook = getattr(config, "_update_thread_local_hook", None)
    if hook is not None:
        unset = getattr(getattr(module, "config_ext", None), "unset", None)
        hook(None if value is unset else value)


# --- Frames -----------------------------------------------------------------------------------------------------------


def keep_own_frames_hidden() -> None:
    """Leave the guard's frames out of source locations from now on, guarded or not: a declared function lowers to the
    same module as the function itself."""
    from jax_vmem_guard import _jax

    _hide_own_frames()
    _jax.own_frames_stay_hidden = True


def raised_by_kernel_lowering(error: BaseException) -> bool:
    """Whether Pallas or Mosaic raised the error, in the innermost of its frames that is JAX's or the user's.

    Files of `jax/_src/pallas` and `jax/_src/tpu_custom_call.py` (0.8.1 to 0.12.0).
    """
    last, trace = "", error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename.replace("\\", "/")
        if "/jaxlib/" not in path and not path.endswith("/contextlib.py"):
            last = path
        trace = trace.tb_next
    return "/jax/_src/pallas/" in last or last.endswith("/jax/_src/tpu_custom_call.py")
