"""The only file that touches JAX's private parts.

Every touch names the JAX versions it was seen in. What is missing fails loudly, with the version, at the time of use.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import io
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


class IncompatibleJax(RuntimeError):
    """A private part of JAX that the guard needs is not where it was."""


def _require(obj: Any, name: str) -> Any:
    """`obj.name`, or `IncompatibleJax` that names the attribute and the version."""
    try:
        return getattr(obj, name)
    except AttributeError:
        where = getattr(obj, "__name__", type(obj).__name__)
        raise IncompatibleJax(
            f"jax_vmem_guard needs `{where}.{name}`, which jax {jax.__version__} does not have; it was seen in jax "
            "0.8.1 to 0.12.0. Install a jax from that range, or a newer jax_vmem_guard."
        ) from None


def ir() -> Any:
    """MLIR's Python bindings as JAX ships them (`jaxlib.mlir.ir`, seen in jax 0.8.1 to 0.12.0)."""
    from jaxlib.mlir import ir as bindings

    return bindings


def parse_stablehlo(program: str | bytes) -> Any:
    """An `ir.Module` from StableHLO text or bytecode, in a context of its own with JAX's dialects.

    Uses `jax._src.interpreters.mlir.make_ir_context` (seen in jax 0.8.1 to 0.12.0).
    """
    from jax._src.interpreters import mlir

    with _require(mlir, "make_ir_context")():
        return ir().Module.parse(program)


# --- The two seams every compilation passes: pxla.lower_sharding_computation and pxla.MeshComputation.compile ---------

#: What the guard keeps on a lowering; JAX's own attributes are never written.
_RECORD = "_jax_vmem_guard"
_REPAIRED = "_jax_vmem_guard_repaired"


def _pxla() -> Any:
    from jax._src.interpreters import pxla  # 0.8.1 to 0.12.0

    return pxla


class Seams:
    """Replaces the two functions of JAX that lower and compile a program, and puts them back.

    Seen in jax 0.8.1 to 0.12.0: every jit, pjit, AOT and eager computation calls
    `pxla.lower_sharding_computation(closed_jaxpr, api_name, fun_name, ...)` through the module's attribute, and
    `pxla.MeshComputation.compile(self, compiler_options=None, *, device_assignment=None)`.
    """

    LOWER_PARAMETERS = ("closed_jaxpr", "api_name", "fun_name")
    COMPILE_PARAMETERS = ("self", "compiler_options", "device_assignment")

    def __init__(self) -> None:
        self._originals: tuple[Any, Any] | None = None

    @property
    def active(self) -> bool:
        return self._originals is not None

    def patch(self, on_lower: Callable[..., Any], on_compile: Callable[..., Any]) -> None:
        """Route lowering through `on_lower(original, *args, **kwargs)` and compilation through
        `on_compile(original, computation, compiler_options, device_assignment)`.

        Raises:
          IncompatibleJax: a seam is missing or has another signature.
        """
        if self.active:
            return
        pxla = _pxla()
        computation = _require(pxla, "MeshComputation")
        lower = _jaxs_own(_require(pxla, "lower_sharding_computation"))
        compile_ = _jaxs_own(_require_own(computation, "compile"))
        _assert_parameters(lower, self.LOWER_PARAMETERS)
        _assert_parameters(compile_, self.COMPILE_PARAMETERS)

        @functools.wraps(lower)
        def guarded_lower(*args: Any, **kwargs: Any) -> Any:
            return on_lower(lower, *args, **kwargs)

        @functools.wraps(compile_)
        def guarded_compile(self: Any, compiler_options: Any = None, *, device_assignment: Any = None) -> Any:
            return on_compile(compile_, self, compiler_options, device_assignment)

        setattr(guarded_lower, _ORIGINAL, lower)
        setattr(guarded_compile, _ORIGINAL, compile_)
        _hide_own_frames()
        self._originals = (lower, compile_)
        pxla.lower_sharding_computation = guarded_lower
        computation.compile = guarded_compile

    def restore(self) -> None:
        """Put JAX's own functions back."""
        if self._originals is None:
            return
        pxla = _pxla()
        pxla.lower_sharding_computation, pxla.MeshComputation.compile = self._originals
        self._originals = None
        _show_own_frames()


#: On a function that the guard put in the place of JAX's: JAX's.
_ORIGINAL = "_jax_vmem_guard_original"


def _jaxs_own(function: Any) -> Any:
    """The function of JAX behind one of the guard's. Seams of this module as it was before it was loaded again (in a
    notebook) may still be in place; new ones take their place instead of standing on them."""
    return getattr(function, _ORIGINAL, function)


def _require_own(cls: Any, name: str) -> Any:
    """Like `_require`, for a method that must be the class's own: a base class only declares it."""
    return vars(cls)[name] if name in vars(cls) else _require(object(), f"{cls.__name__}.{name}")


def _assert_parameters(function: Any, expected: tuple[str, ...]) -> None:
    found = tuple(inspect.signature(function).parameters)
    if found[: len(expected)] != expected:
        raise IncompatibleJax(
            f"jax_vmem_guard knows `{function.__qualname__}` with the parameters {', '.join(expected)}, but jax "
            f"{jax.__version__} has {', '.join(found)}. Install a jax from 0.8.1 to 0.12.0, or a newer jax_vmem_guard."
        )


#: Files of this package.
_OWN_FILES = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _hide_own_frames() -> None:
    """Leave the guard's frames out of the source locations JAX writes into a module, and out of its tracebacks.

    Without this a guarded program would reach the compiler with other locations. Seen in 0.8.1 to 0.12.0:
    `register_exclusion` adds to the list `_exclude_paths` of each module.
    """
    from jax._src import source_info_util, traceback_util

    for module in (source_info_util, traceback_util):
        if _OWN_FILES not in _require(module, "_exclude_paths"):
            _require(module, "register_exclusion")(_OWN_FILES)


#: Whether a declared function asked for the guard's frames to stay hidden, guarded or not.
own_frames_stay_hidden = False


def _show_own_frames() -> None:
    if own_frames_stay_hidden:
        return
    from jax._src import source_info_util, traceback_util

    for module in (source_info_util, traceback_util):
        paths = _require(module, "_exclude_paths")
        while _OWN_FILES in paths:
            paths.remove(_OWN_FILES)
    _require(source_info_util, "_exclude_path_regex").cache_clear()
    _require(source_info_util, "is_user_filename").cache_clear()


# --- A lowered program ------------------------------------------------------------------------------------------------


class Lowering:
    """How a program was lowered, so that a changed traced program can be lowered in the same way.

    JAX keeps lowerings in caches that refer to the traced program weakly. `loosen()` makes this record do the same, so
    that it does not keep the traced program alive once it is compiled.
    """

    def __init__(self, closed_jaxpr: Any, fun_name: str, lower: Callable[..., Any], arguments: tuple[Any, ...],
                 keywords: dict[str, Any], *, settings: Any = None, call: Any = None,
                 chosen: dict[str, int] | None = None):
        self._closed_jaxpr: Any = closed_jaxpr
        self.fun_name = fun_name
        self._lower = lower
        self._arguments = arguments
        self._keywords = keywords
        self._settings = settings
        #: How the program was traced (`_jax_trace.call_of`), and with which declared choices where not the first ones.
        self.call, self.chosen = call, dict(chosen or {})
        self._fun = call.fun if call is not None else None

    @property
    def closed_jaxpr(self) -> Any | None:
        """The traced program; None once JAX has dropped it."""
        return self._closed_jaxpr() if isinstance(self._closed_jaxpr, weakref.ref) else self._closed_jaxpr

    def loosen(self) -> None:
        if not isinstance(self._closed_jaxpr, weakref.ref):
            self._closed_jaxpr = weakref.ref(self._closed_jaxpr)
        self._fun = None

    def in_its_settings(self) -> contextlib.AbstractContextManager[Any]:
        """JAX's settings as they were when the program was lowered: x64, precision, meshes. The compile may come later,
        elsewhere, or in another thread."""
        return self._settings.restored() if self._settings is not None else contextlib.nullcontext()

    def again(self, closed_jaxpr: Any) -> Any:
        """A new `MeshComputation` of another traced program with the same signature."""
        with self.in_its_settings():
            return self._lower(closed_jaxpr, *self._arguments, **self._keywords)

    def made_again(self, closed_jaxpr: Any, chosen: dict[str, int]) -> Lowering:
        """The lowering of another trace of the same function, with declared choices."""
        return Lowering(closed_jaxpr, self.fun_name, self._lower, self._arguments, self._keywords,
                        settings=self._settings, call=self.call, chosen=chosen)


def remember_lowering(computation: Any, lowering: Lowering) -> None:
    setattr(computation, _RECORD, lowering)


def remembered_lowering(computation: Any) -> Lowering | None:
    return getattr(computation, _RECORD, None)


#: Called as (program, module, compiler options, alone) before each compile; one that raises takes the place of the
#: compiler. `alone` says that the module is one kernel of the program. Fault injection (`testing.py`) stands here.
compile_interceptors: list[Callable[[Any, Any, dict[str, Any], bool], None]] = []


class Program:
    """One lowered program on its way to the compiler.

    Wraps a `pxla.MeshComputation` (0.8.1 to 0.12.0: attributes `_hlo`, `_name`, `_device_list`, `_executable`,
    `_compiler_options_kvs`, `_platforms`, `compile_args["backend"]`). JAX caches these objects and their modules, so a
    changed module is always compiled on a copy.
    """

    def __init__(self, computation: Any, compile_: Callable[..., Any], compiler_options: dict[str, Any] | None = None,
                 device_assignment: Any = None):
        self._computation = computation
        self._compile = compile_
        self._call_options = compiler_options
        self._device_assignment = device_assignment
        self.lowering = remembered_lowering(computation)
        #: Whether the compiler refused the program as it is; its traced form is then kept for the next time.
        self.was_refused = False
        self._own_module: Any = None

    def detached(self) -> Program:
        """The same program with its module in a context of its own, for a thread that works while this one compiles.

        MLIR contexts are not made for several threads at once; JAX makes one for each lowering.
        """
        other = copy.copy(self)
        other._own_module = parse_stablehlo(stablehlo_bytecode(self.module))
        return other

    @property
    def name(self) -> str:
        """Name of the jitted function: "jit_f"."""
        return str(_require(self._computation, "_name"))

    @property
    def module(self) -> Any:
        """The StableHLO module JAX made, which nobody may edit."""
        return self._own_module if self._own_module is not None else _require(self._computation, "_hlo")

    @property
    def backend(self) -> Any:
        return _require(self._computation, "compile_args")["backend"]

    @property
    def device_kind(self) -> str:
        """What the program's first device says it is: "TPU v5 lite"."""
        return str(self.devices[0].device_kind)

    @property
    def devices(self) -> tuple[Any, ...]:
        given = self._device_assignment if self._device_assignment is not None else self._computation._device_list
        return tuple(given) if given is not None else tuple(self.backend.devices())[:1]

    @property
    def platform_version(self) -> str:
        """What the compiler says it is: "PJRT C API / TFRT TPU v5 lite / Built on ... cl/1014260217", on three lines."""
        return str(getattr(self.backend, "platform_version", ""))

    @property
    def processes(self) -> tuple[int, ...]:
        """Numbers of the processes of this distributed job that run the program; () where it is not distributed.

        A program for a topology that is not here (`CompileOnlyPyClient`, 0.8.1 to 0.12.0) runs nowhere yet: all
        processes of a job are taken to prepare the same one.
        """
        store = key_value_store()
        if store is None:
            return ()
        if type(self.backend).__name__ == "CompileOnlyPyClient":
            return tuple(range(store.num_processes))
        return tuple(sorted({int(device.process_index) for device in self.devices}))

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options the caller gave, to `jax.jit` and to `.compile`."""
        return {**dict(_require(self._computation, "_compiler_options_kvs")), **(self._call_options or {})}

    def compile(self) -> Any:
        """Compile the program exactly as JAX would have."""
        self._intercept(self.module, self.compiler_options)
        return self._compile(self._computation, self._call_options, device_assignment=self._device_assignment)

    def compile_changed(self, module: Any, extra_options: dict[str, Any] | None = None) -> Any:
        """Compile `module` in the place of the program's own; `extra_options` win over the caller's."""
        changed = copy.copy(self._computation)
        changed._hlo = module
        changed._executable = None
        options = self._call_options
        if extra_options:
            options = {**(options or {}), **extra_options}
        self._intercept(module, {**self.compiler_options, **(extra_options or {})})
        return self._compile(changed, options, device_assignment=self._device_assignment)

    @property
    def repaired(self) -> tuple[Any, Any] | None:
        """(policy, executable) of an earlier repair of this same lowering, or None."""
        return getattr(self._computation, _REPAIRED, None) if self._is_plain_call() else None

    def remember_repaired(self, policy: Any, executable: Any) -> None:
        """Keep a repaired executable with its lowering, as JAX keeps one that compiled at once, but beside JAX's own."""
        if self._is_plain_call():
            setattr(self._computation, _REPAIRED, (policy, executable))

    def _is_plain_call(self) -> bool:
        return self._call_options is None and self._device_assignment is None

    def _intercept(self, module: Any, options: dict[str, Any], alone: bool = False) -> None:
        for interceptor in tuple(compile_interceptors):
            interceptor(self, module, options, alone)

    def lower_again(self, closed_jaxpr: Any) -> Program:
        """The program with another traced body of the same signature.

        Raises:
          ValueError: the program was lowered before the guard was there.
        """
        if self.lowering is None:
            raise ValueError(f"the traced form of `{self.name}` is not known")
        again = Program(self.lowering.again(closed_jaxpr), self._compile, self._call_options, self._device_assignment)
        again.lowering = self.lowering
        return again

    def made_again(self, closed_jaxpr: Any, chosen: dict[str, int]) -> Program:
        """The program lowered from another trace of the same function.

        Raises:
          ValueError: it takes other closed-over arrays as arguments than this one, which JAX would not pass to it
            (only with `jax_use_simplified_jaxpr_constants`; attribute `const_args`, 0.10.2 and 0.12.0).
        """
        assert self.lowering is not None
        lowering = self.lowering.made_again(closed_jaxpr, chosen)
        computation = lowering.again(closed_jaxpr)
        ours, theirs = (getattr(c, "const_args", None) or () for c in (self._computation, computation))
        if len(ours) != len(theirs) or any(a is not b for a, b in zip(ours, theirs, strict=True)):
            raise ValueError("it closes over other arrays")
        again = Program(computation, self._compile, self._call_options, self._device_assignment)
        again.lowering = lowering
        return again

    def compile_alone(self, module: Any) -> Any:
        """Compile a small single-device module for the same chip with the caller's options; returns an XLA executable.

        JAX's persistent compilation cache is not involved.
        """
        from jax._src import compiler  # 0.8.1 to 0.12.0

        backend = self.backend
        process = backend.process_index()
        device = next((d for d in self.devices if d.process_index == process), self.devices[0])
        overrides = {k: v for k, v in self.compiler_options.items() if k not in PROGRAM_WIDE_OPTIONS}
        options = _require(compiler, "get_compile_options")(
            num_replicas=1, num_partitions=1, device_assignment=np.array([[device.id]]),
            env_options_overrides=overrides, detailed_logging=False, backend=backend)
        self._intercept(module, overrides, alone=True)
        return _require(compiler, "backend_compile_and_load")(
            backend, module, _device_list((device,)), options, [])


#: Compile options that make no sense for one kernel of a program alone: the limit is set in the kernel itself, and a
#: dump of probes would bury the program's.
PROGRAM_WIDE_OPTIONS = ("xla_tpu_scoped_vmem_limit_kib", "xla_dump_to")


def _device_list(devices: tuple[Any, ...]) -> Any:
    from jax._src.lib import xla_client  # 0.8.1 to 0.12.0

    return _require(xla_client, "DeviceList")(devices)


def text_without_locations(module: Any) -> str:
    """The text of a module, as MLIR prints it, without source locations."""
    return str(module.operation.get_asm(enable_debug_info=False))


def is_tpu(computation: Any) -> bool:
    """Whether a `MeshComputation` is for a TPU, present or only described by a topology (0.8.1 to 0.12.0)."""
    return "tpu" in (getattr(computation, "_platforms", None) or ())


def subjaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Jaxprs among an equation's parameters, closed ones as they are (0.8.1 to 0.12.0)."""
    for value in params.values():
        for part in value if type(value) in (tuple, list) else (value,):
            if hasattr(part, "eqns") or hasattr(getattr(part, "jaxpr", None), "eqns"):
                yield part


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a traced program, nested ones too. In jax 0.12 closed and open jaxprs are one class."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in subjaxprs(equation.params):
            yield from equations(inner)


# --- A chip that is not here ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoweringCall:
    """Arguments of `pxla.lower_sharding_computation` after the traced program.

    Seen in 0.8.1 to 0.12.0, all by position: api_name, fun_name, in_shardings, out_shardings, in_layouts, out_layouts,
    donated_invars; all by keyword: keep_unused, context_mesh, compiler_options_kvs, lowering_platforms,
    lowering_parameters, pgle_profiler.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @classmethod
    def of(cls, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> LoweringCall:
        """The call, after a look at its shape.

        Raises:
          IncompatibleJax: it is not called as in the versions above.
        """
        if len(arguments) != 7 or "context_mesh" not in keywords:
            raise IncompatibleJax(
                f"jax {jax.__version__} calls `lower_sharding_computation` with {len(arguments)} arguments after the "
                f"program and the keywords {', '.join(sorted(keywords))}; jax 0.8.1 to 0.12.0 give 7 and a "
                "`context_mesh`. Install a jax from that range, or a newer jax_vmem_guard.")
        return cls(tuple(arguments), dict(keywords))

    @property
    def name(self) -> str:
        """Name of the jitted function."""
        return str(self.arguments[1])

    @property
    def platforms(self) -> tuple[str, ...] | None:
        """Platforms the caller named (`jax.export`), or None for those of the devices."""
        return self.keywords.get("lowering_platforms")

    @property
    def compiler_options(self) -> Any:
        """Options given to `jax.jit`."""
        return self.keywords.get("compiler_options_kvs")

    def without_compiler_options(self) -> LoweringCall:
        """The call without the options given to `jax.jit`."""
        return LoweringCall(self.arguments, {**self.keywords, "compiler_options_kvs": ()})

    def names_device_of(self, platform: str) -> bool:
        """Whether a sharding of an argument or result is on a device of `platform`."""
        for sharding in (*self.arguments[2], *self.arguments[3]):
            abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
            if isinstance(sharding, jax.sharding.Sharding) and not abstract:
                device: Any = next(iter(sharding.device_set))
                if device.platform == platform:
                    return True
        return False

    def named(self, name: str) -> LoweringCall:
        """The call with another name of the function."""
        return LoweringCall((self.arguments[0], name, *self.arguments[2:]), self.keywords)

    def map_placement(self, value: Callable[[Any], Any]) -> LoweringCall:
        """The call with `value` applied to every sharding and mesh; layouts given for other devices are left open."""
        api_name, fun_name, ins, outs, in_layouts, out_layouts, donated = self.arguments
        moved = (api_name, fun_name, tuple(map(value, ins)), tuple(map(value, outs)),
                 tuple(None for _ in in_layouts), tuple(None for _ in out_layouts), donated)
        return LoweringCall(moved, {**self.keywords, "context_mesh": value(self.keywords["context_mesh"])})

    def place_open_arguments(self, sharding: Any) -> LoweringCall:
        """The call with `sharding` for every argument and result that has none."""
        from jax._src.sharding_impls import UnspecifiedValue

        api_name, fun_name, ins, outs, *rest = self.arguments
        ins, outs = (tuple(sharding if isinstance(s, UnspecifiedValue) else s for s in group) for group in (ins, outs))
        return LoweringCall((api_name, fun_name, ins, outs, *rest), self.keywords)


def gspmd_sharding_on(sharding: Any, device: Callable[[Any], Any]) -> Any:
    """A sharding without a mesh, over `device(d)` for each of its devices `d`.

    Seen in 0.8.1 to 0.12.0: `GSPMDSharding` has `_device_assignment`, `_hlo_sharding` and takes `(devices, sharding)`.
    """
    from jax._src import sharding_impls

    devices = tuple(device(d) for d in _require(sharding, "_device_assignment"))
    kind = _require(sharding_impls, "GSPMDSharding")
    hlo_sharding = sharding._to_xla_hlo_sharding(_rank_of(sharding)) if not isinstance(sharding, kind) else \
        _require(sharding, "_hlo_sharding")
    return kind(devices, hlo_sharding)


def _rank_of(sharding: Any) -> int:
    """The array rank a sharding without a mesh is for."""
    return len(getattr(sharding, "shape", ()) or ())


@contextlib.contextmanager
def past_the_compilation_cache() -> Iterator[None]:
    """Lets compilations for chips that are not here go past JAX's persistent compilation cache.

    A client that can only compile cannot load what is cached: JAX would compile all the same, warn, and leave an entry.
    Clients that can run are not affected. Seen in 0.8.1 to 0.12.0: `compiler` asks
    `compilation_cache.is_cache_used(backend)` through the module for each compilation.
    """
    from jax._src import compilation_cache

    original = _require(compilation_cache, "is_cache_used")

    def is_cache_used(backend: Any) -> bool:
        return "CompileOnly" not in type(backend).__name__ and bool(original(backend))

    compilation_cache.is_cache_used = is_cache_used
    try:
        yield
    finally:
        compilation_cache.is_cache_used = original


#: Modules of JAX's own TPU kernels.
KERNEL_LIBRARY = "jax.experimental.pallas.ops."


@contextlib.contextmanager
def answering_for_chip(device: Any, *, as_devices: Sequence[Any] = ()) -> Iterator[None]:
    """Lets `pltpu.get_tpu_info()` describe `device`'s chip on a machine without a TPU.

    Some kernels (ragged paged attention) choose their blocks by the kind of `jax.devices()[0]`. JAX's own kernel library
    is told `device` there. Everybody else is told `as_devices`, where it is given: only for tracing that runs nothing
    here.

    Kernels ask it for the chip's VMEM or tiling while they are traced. `get_tpu_info` is cached per trace context, so
    its cache is emptied on the way in and out.

    Seen: `get_device_kind` and `get_num_device_cores` in `jax._src.pallas.mosaic.core` (0.8.1, 0.9.0), in
    `jax._src.pallas.mosaic.tpu_info` (0.10.2) and in `jax._src.tpu_info` (0.12.0).
    """
    kind, cores = device.device_kind, int(getattr(device, "num_cores", None) or 1)
    answers = {"get_device_kind": lambda: kind, "get_num_device_cores": lambda: cores}
    info_module, device_module = _tpu_info_modules()
    originals = {name: _require(device_module, name) for name in answers}
    get_tpu_info = _require(info_module, "get_tpu_info")
    for name, answer in answers.items():
        setattr(device_module, name, answer)
    get_tpu_info.cache_clear()
    devices = jax.devices

    def answer_devices(backend: Any = None) -> list[Any]:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if backend is None and str(caller).startswith(KERNEL_LIBRARY):
            return [device]
        return list(as_devices) if backend is None and as_devices else devices(backend)

    jax.devices = answer_devices
    try:
        yield
    finally:
        jax.devices = devices
        for name, original in originals.items():
            setattr(device_module, name, original)
        get_tpu_info.cache_clear()


def _tpu_info_modules() -> tuple[Any, Any]:
    """Where `get_tpu_info` lives, and where the functions it asks about the device live."""
    for info_name in ("jax._src.tpu_info", "jax._src.pallas.mosaic.tpu_info"):
        with contextlib.suppress(ImportError):
            info = importlib.import_module(info_name)
            break
    else:
        raise IncompatibleJax(f"jax {jax.__version__} has no `tpu_info` module where 0.8.1 to 0.12.0 have one")
    if hasattr(info, "get_device_kind"):
        return info, info
    return info, importlib.import_module("jax._src.pallas.mosaic.core")


# --- Kernels as they are shipped: stable Mosaic bytecode --------------------------------------------------------------


def parse_shipped_mosaic(body: bytes) -> Any:
    """An `ir.Module` of a kernel in its serialised form ("stable_mosaic" operations), in a context of its own.

    Unlike a decoded kernel it can be written back as it came, in the IR version it has: the operations stay what they
    are, only the attributes an editor touches differ. Uses `JaxIrContext`, `upstream_dialects` of
    `jax._src.interpreters.mlir` and the `tpu` dialect of `jax._src.lib` (seen in jax 0.8.1 to 0.12.0).
    """
    from jax._src.interpreters import mlir
    from jax._src.lib import tpu

    context = _require(mlir, "JaxIrContext")()
    context.append_dialect_registry(_require(mlir, "upstream_dialects"))
    context.load_all_available_dialects()
    _require(tpu, "register_dialect")(context)
    context.allow_unregistered_dialects = True
    with context:
        return ir().Module.parse(body)


def mosaic_bytecode(module: Any) -> bytes:
    """The bytes of a kernel for a custom call's body, in the bytecode version JAX writes (0; 0.8.1 to 0.12.0)."""
    out = io.BytesIO()
    module.operation.write_bytecode(out, desired_version=0)
    return out.getvalue()


def stablehlo_bytecode(module: Any) -> bytes:
    """A StableHLO module as MLIR bytecode, locations included."""
    out = io.BytesIO()
    module.operation.write_bytecode(out)
    return out.getvalue()


def parse_mosaic(body: bytes) -> Any:
    """An `ir.Module` from the Mosaic code in a custom call's body, brought back from its stable serialised form.

    Locations are taken out: the same kernel is then the same wherever its source lies. Uses the passes
    `strip-debuginfo` and `mosaic-serde` (seen in jax 0.8.1 to 0.12.0). The module has a context of its own: about
    1.3 ms, and nothing of it outlives the module.
    """
    from jaxlib.mlir.passmanager import PassManager

    module = parse_shipped_mosaic(body)
    decode = ",mosaic-serde{serialize=false}" if "stable_mosaic.version" in module.operation.attributes else ""
    with module.context:
        PassManager.parse(f"builtin.module(strip-debuginfo{decode})").run(module.operation)
    return module


def kernel_names(jaxpr: Any) -> Iterator[str]:
    """Names of the Pallas kernels a traced program calls, for any backend, interpreted ones too.

    Primitives `pallas_call` (0.8.1 to 0.12.0) and `mpmd_map` (0.10.2, 0.12.0), both with a parameter `name`.
    """
    for equation in equations(jaxpr):
        if equation.primitive.name in ("pallas_call", "mpmd_map"):
            yield str(equation.params.get("name"))


def lower_equation(equation: Any, device: Any) -> Any:
    """The StableHLO module of one equation of a traced program, lowered for `device` with nothing around it.

    Equations have `primitive`, `params`, `invars` with `aval` (0.8.1 to 0.12.0).
    """
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=sharding) for v in equation.invars]

    def alone(*values: Any) -> Any:
        return equation.primitive.bind(*values, **equation.params)

    return jax.jit(alone).lower(*arguments).compiler_ir("stablehlo")


#: What a callable without a name is called, by jax version; later ones use `fun_name`'s own default.
_NAMELESS = {(0, 8): "<unnamed wrapped function>", (0, 9): "<unknown>"}


def name_of(fun: Any) -> str:
    """The name JAX gives a program made from `fun` (`jax._src.util.fun_name`, 0.8.1 to 0.12.0)."""
    from jax._src import util

    default = _NAMELESS.get(jax.__version_info__[:2])
    return str(_require(util, "fun_name")(fun, *([default] if default else [])))




# --- Many processes ---------------------------------------------------------------------------------------------------


def process_id() -> int:
    """The number of this process in its distributed job; 0 without one."""
    store = key_value_store()
    return 0 if store is None else store.process_id


class KeyValueStore:
    """The key-value store of JAX's coordination service, which all processes of a distributed job share.

    Client methods seen in jax 0.8.1 to 0.12.0: `key_value_set(key, value, allow_overwrite)`, `key_value_try_get(key)`,
    `blocking_key_value_get(key, timeout_in_ms)`; they raise `JaxRuntimeError` with a status word in front.

    Every method raises ConnectionError where the service does not answer.
    """

    def __init__(self, client: Any, process_id: int, num_processes: int):
        self._set = _require(client, "key_value_set")
        self._try_get = _require(client, "key_value_try_get")
        self._blocking_get = _require(client, "blocking_key_value_get")
        self.process_id = process_id
        self.num_processes = num_processes

    def set(self, key: str, value: str) -> None:
        """Sets a key, whatever it was."""
        try:
            self._set(key, value, True)
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error

    def set_first(self, key: str, value: str) -> None:
        """Sets a key that has no value yet; leaves one that has."""
        try:
            self._set(key, value, False)
        except RuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise ConnectionError(str(error)) from error

    def get(self, key: str, timeout_s: float) -> str | None:
        """The value, waiting up to `timeout_s` seconds for it; None if there is none."""
        try:
            if timeout_s <= 0:
                return str(self._try_get(key))
            return str(self._blocking_get(key, max(1, int(timeout_s * 1000))))
        except RuntimeError as error:
            if "NOT_FOUND" in str(error) or "DEADLINE_EXCEEDED" in str(error):
                return None
            raise ConnectionError(str(error)) from error


def key_value_store() -> KeyValueStore | None:
    """The store of this job; None where `jax.distributed.initialize` was not called, or for one process only.

    `jax._src.distributed.global_state` with `client`, `process_id`, `num_processes`: 0.8.1 to 0.12.0.
    """
    from jax._src import distributed

    state = _require(distributed, "global_state")
    client = _require(state, "client")
    if client is None or state.num_processes <= 1:
        return None
    return KeyValueStore(client, int(state.process_id), int(state.num_processes))


# --- What a caller hands to `inspect` ---------------------------------------------------------------------------------


def stablehlo_of_lowered(lowered: Any) -> Any:
    """The StableHLO module of a `jax.stages.Lowered`, which nobody may edit (`_lowering._hlo`, 0.8.1 to 0.12.0)."""
    return _require(_require(lowered, "_lowering"), "_hlo")


def device_kind_of(stage: Any) -> str | None:
    """Device kind a `jax.stages.Lowered` or `Compiled` is for; None where it does not say.

    A lowering knows its devices (`_lowering._device_list`, 0.8.1 to 0.12.0), a compiled program those of its arguments
    and results.
    """
    devices = getattr(getattr(stage, "_lowering", None), "_device_list", None)
    for device in devices or ():
        return str(device.device_kind)
    shardings = [getattr(stage, name, None) for name in ("input_shardings", "output_shardings")]
    for sharding in jax.tree.leaves(shardings):
        for device in getattr(sharding, "device_set", ()):
            return str(device.device_kind)
    return None


def with_module(computation: Any, module: Any) -> Any:
    """A copy of a `MeshComputation` that compiles `module`; JAX's own object stays as it was (see `Program`)."""
    changed = copy.copy(computation)
    changed._hlo = module
    changed._executable = None
    return changed


def compile_by(computation: Any, compile_: Callable[..., Any]) -> None:
    """Let `compile_(compile_here, compiler_options)` take the place of this one computation's `compile`.

    `compile_here()` compiles it without options. JAX calls the method through the object (0.8.1 to 0.12.0), so an
    attribute of the object is enough; the class stays as it is.
    """
    original = type(computation).compile

    def compile_instead(compiler_options: Any = None, *, device_assignment: Any = None) -> Any:
        def compile_here() -> Any:
            return original(computation, None, device_assignment=device_assignment)

        return compile_(compile_here, compiler_options)

    computation.compile = compile_instead


@functools.cache
def _topology_state() -> Any:
    from jax._src import config  # 0.8.1 to 0.12.0: a state that is part of the key of JAX's tracing caches

    return _require(config, "optional_string_state")(
        "jax_vmem_guard_traced_for", None, "TPU topology that jax_vmem_guard traces a program for.",
        include_in_trace_context=True)


def tracing_for(topology: str) -> Any:
    """A context in which JAX's tracing caches are apart from those of every other topology and of the outside.

    Needed because a kernel may ask the chip for its VMEM while it is traced, and JAX keeps traced functions.
    """
    return _topology_state()(topology)


def computation_of(lowered: Any) -> Any:
    """The `MeshComputation` behind a `jax.stages.Lowered` (attribute `_lowering`, 0.8.1 to 0.12.0)."""
    return _require(lowered, "_lowering")


def signature(module: Any) -> tuple[list[tuple[tuple[int, ...], Any]], list[tuple[tuple[int, ...], Any]], int]:
    """Arguments and results of a StableHLO module's `main` as (shape, dtype), and how many devices it is for."""
    main = next((op for op in module.body.operations if str(getattr(op, "sym_name", "")).strip('"') == "main"), None)
    if main is None:
        raise ValueError("the StableHLO module has no function `main`")
    partitions = module.operation.attributes["mhlo.num_partitions"].value \
        if "mhlo.num_partitions" in module.operation.attributes else 1
    inputs, results = ([_shape_and_dtype(type_) for type_ in types] for types in (main.type.inputs, main.type.results))
    return inputs, results, int(partitions)


def _shape_and_dtype(type_: Any) -> tuple[tuple[int, ...], Any]:
    ranked = ir().RankedTensorType(type_)
    return tuple(ranked.shape), _dtype_of_mlir(str(ranked.element_type))


def _dtype_of_mlir(name: str) -> Any:
    """The numpy dtype of an MLIR element type: "bf16", "i1", "ui8", "f8E4M3FN", "complex<f32>"."""
    special = {"i1": "bool", "bf16": "bfloat16", "complex<f32>": "complex64", "complex<f64>": "complex128"}
    if name not in special:
        for prefix, words in (("ui", "uint"), ("i", "int"), ("f8", "float8_"), ("f4", "float4_"), ("f", "float")):
            if name.startswith(prefix):
                special[name] = words + name.removeprefix(prefix).lower()
                break
    return jax.numpy.dtype(special[name])


# --- A module compiled for a chip that is not here --------------------------------------------------------------------


def compile_for_topology(program: bytes | str, topology: str, num_replicas: int, num_partitions: int,
                         options: dict[str, Any]) -> Any:
    """Compile a StableHLO module for the first devices of a TPU topology, in the way `jax.jit` does.

    The function stands alone: bug reports carry its source. Uses `compiler.get_compile_options`,
    `compiler.backend_compile_and_load`, `mlir.make_ir_context` and `DeviceList` of jax._src (0.8.1 to 0.12.0).
    """
    import numpy
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax.experimental import topologies
    from jaxlib.mlir import ir

    count = num_replicas * num_partitions
    devices: list[Any] = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:count]
    with mlir.make_ir_context():
        module = ir.Module.parse(program)
    compile_options = compiler.get_compile_options(
        num_replicas=num_replicas, num_partitions=num_partitions, env_options_overrides=options, detailed_logging=False,
        device_assignment=numpy.array([d.id for d in devices]).reshape(num_replicas, num_partitions),
        backend=devices[0].client)
    return compiler.backend_compile_and_load(
        devices[0].client, module, xla_client.DeviceList(tuple(devices)), compile_options, [])


def text_with_locations(module: Any) -> str:
    """A module as text, source locations and whole constants included."""
    return str(module.operation.get_asm(enable_debug_info=True))


def shipped_mosaic_without_locations(body: bytes) -> bytes:
    """A kernel's bytecode with its source locations taken out."""
    module = parse_shipped_mosaic(body)
    text = module.operation.get_asm(enable_debug_info=False, print_generic_op_form=True)
    with module.context, ir().Location.unknown():
        return mosaic_bytecode(ir().Module.parse(text))
