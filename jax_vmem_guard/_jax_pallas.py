"""JAX's private parts that block splitting needs: kernel jaxprs, grids, block mappings, references.

The second half of `_jax.py`, kept apart because of its size; the rule is the same. Everything here was seen in jax
0.8.1, 0.9.0, 0.10.2 and 0.12.0; where they differ a comment says how.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jax_vmem_guard._jax import _require


def _core() -> Any:
    from jax._src import core

    return core


def _pallas() -> Any:
    from jax._src.pallas import core

    return core


# ---------------------------------------------------------------- jaxprs


def is_jaxpr(value: Any) -> bool:
    """A `Jaxpr` or a `ClosedJaxpr` (jax 0.12 has merged the two)."""
    core = _core()
    kinds = (_require(core, "Jaxpr"), getattr(core, "ClosedJaxpr", core.Jaxpr))
    return isinstance(value, kinds)


def open_jaxpr(value: Any) -> tuple[Any, tuple[Any, ...]]:
    """(jaxpr, constants) of either kind; the constants belong to `jaxpr.constvars`, in order."""
    inner = getattr(value, "jaxpr", value)
    consts = getattr(value, "consts", ())
    return inner, tuple(consts)


def is_literal(atom: Any) -> bool:
    return isinstance(atom, _core().Literal)


def is_ref(atom: Any) -> bool:
    """Whether the value is a reference (a buffer the kernel reads and writes), whatever its memory space."""
    from jax._src.state.types import AbstractRef

    return isinstance(atom.aval, AbstractRef)


def with_jaxpr(value: Any, jaxpr: Any) -> Any:
    """`value`, a closed or open jaxpr, around other equations."""
    if hasattr(value, "jaxpr") and value.jaxpr is not value:
        return value.replace(jaxpr=jaxpr)
    return jaxpr


def trace(fun: Callable[..., Any], avals: Sequence[Any], debug_info: Any) -> Any:
    """The jaxpr of `fun(*avals)`, which returns a flat sequence.

    Raises:
      ValueError: `fun` captured an array.
    """
    from jax._src import linear_util as lu
    from jax._src.interpreters import partial_eval as pe

    jaxpr, _, consts = _require(pe, "trace_to_jaxpr_dynamic")(lu.wrap_init(fun, debug_info=debug_info), list(avals))
    if consts:
        raise ValueError("the rebuilt function captures a constant")
    return jaxpr


def close(jaxpr: Any) -> Any:
    """`jaxpr`, which has no constants, as a closed one."""
    core = _core()
    return core.ClosedJaxpr(jaxpr, ()) if hasattr(core, "ClosedJaxpr") else jaxpr


def bind(eqn: Any, values: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Binds the equation's primitive to other values and parameters, in the equation's own context."""
    primitive = eqn.primitive
    bound = primitive.get_bind_params(params)
    functions, bound = bound if isinstance(bound, tuple) else ((), bound)  # jax <= 0.9 splits callables off
    with _context(eqn):
        out = primitive.bind(*functions, *values, **bound)
    return list(out) if primitive.multiple_results else [out]


@contextlib.contextmanager
def _context(eqn: Any) -> Iterator[None]:
    from jax._src import source_info_util

    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def eval_jaxpr(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates (or traces, under a trace) a closed jaxpr."""
    jaxpr, consts = open_jaxpr(closed)
    return _core().eval_jaxpr(jaxpr, consts, *args)


def source_of(eqn: Any) -> str | None:
    """ "file:line" of the user's code that made the equation."""
    from jax._src import source_info_util

    frame = source_info_util.user_frame(getattr(eqn.source_info, "traceback", None))
    if frame is None:
        return None
    return f"{frame.file_name}:{frame.start_line}"


def replace_eqn(eqn: Any, *, params: dict[str, Any], out_avals: Sequence[Any] | None = None) -> Any:
    """The equation with other parameters. `out_avals` replaces results nobody uses by fresh ones of other shapes."""
    if out_avals is None:
        return eqn.replace(params=params)
    core = _core()
    outvars = [v if v.aval.shape == aval.shape else core.DropVar(aval)
               for v, aval in zip(eqn.outvars, out_avals, strict=True)]
    return eqn.replace(params=params, outvars=outvars)


def is_dropped(var: Any) -> bool:
    return isinstance(var, _core().DropVar)


# ---------------------------------------------------------------- control flow


@dataclass(frozen=True, kw_only=True)
class Body:
    """A jaxpr inside an equation, and what its inputs are.

    Attributes:
      jaxpr: the jaxpr, open.
      consts: values of its `constvars`, or None where the equation's own inputs stand for them.
      sources: for each input (constvars first where `consts` is None) one of
        ("outer", position in the equation's inputs), ("carry", i), ("xs", position in the equation's inputs),
        ("fresh", i).
    """

    jaxpr: Any
    consts: tuple[Any, ...] | None
    sources: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Control:
    """A control-flow equation in the same words for every JAX version.

    Attributes:
      kind: "call" (jit, remat, custom_jvp, ...), "cond", "scan", "while" or "scoped".
      bodies: "call", "scan" and "scoped" have one, "cond" one per branch, "while" the condition and the body.
      init: positions of the initial carry in the equation's inputs ("scan", "while").
      num_carry: how many values a loop carries.
      length, reverse, unroll: of a scan.
    """

    kind: str
    bodies: tuple[Body, ...]
    init: tuple[int, ...] = ()
    num_carry: int = 0
    length: int = 0
    reverse: bool = False
    unroll: Any = 1


_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
          "remat2": "jaxpr", "checkpoint": "jaxpr", "remat": "jaxpr", "custom_jvp_call": "call_jaxpr",
          "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr"}


def control(eqn: Any) -> Control | None:
    """What `eqn` runs, or None where it is no control flow this module knows."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS and is_jaxpr(params.get(_CALLS[name])):
        return Control(kind="call", bodies=(_body(params[_CALLS[name]], _outer(0, len(eqn.invars))),))
    if name == "cond":
        outer = _outer(1, len(eqn.invars))
        return Control(kind="cond", bodies=tuple(_body(b, outer) for b in params["branches"]))
    if name == "scan":
        consts, carry = _scan_counts(params)
        sources = (*_outer(0, consts), *(("carry", i) for i in range(carry)),
                   *(("xs", i) for i in range(consts + carry, len(eqn.invars))))
        return Control(kind="scan", bodies=(_body(params["jaxpr"], sources),),
                       init=tuple(range(consts, consts + carry)), num_carry=carry, length=params["length"],
                       reverse=params["reverse"], unroll=params["unroll"])
    if name == "while":
        c, b = params["cond_nconsts"], params["body_nconsts"]
        carry = len(eqn.invars) - c - b
        carried = tuple(("carry", i) for i in range(carry))
        return Control(kind="while", num_carry=carry, init=tuple(range(c + b, c + b + carry)),
                       bodies=(_body(params["cond_jaxpr"], (*_outer(0, c), *carried)),
                               _body(params["body_jaxpr"], (*_outer(c, c + b), *carried))))
    if name == "run_scoped" and not params["collective_axes"] and not any(params.get("ref_transforms", ())):
        jaxpr = params["jaxpr"]
        sources = (*_outer(0, len(eqn.invars)), *(("fresh", i) for i in range(len(jaxpr.invars))))
        return Control(kind="scoped", bodies=(Body(jaxpr=jaxpr, consts=None, sources=sources),))
    return None


def _outer(start: int, stop: int) -> tuple[tuple[str, int], ...]:
    return tuple(("outer", i) for i in range(start, stop))


def _body(value: Any, sources: tuple[tuple[str, int], ...]) -> Body:
    jaxpr, consts = open_jaxpr(value)
    return Body(jaxpr=jaxpr, consts=consts, sources=sources)


def _scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # jax 0.12: flat trees stand for the counts
    return len(list(consts)), len(list(carry))


def while_loop(cond: Callable[..., Any], body: Callable[..., Any], init: Any) -> Any:
    return lax.while_loop(cond, body, init)


def run_scoped(fun: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """`pl.run_scoped` with references of these abstract values."""
    from jax.experimental import pallas as pl

    memory_ref = _require(_pallas(), "MemoryRef")
    return pl.run_scoped(fun, *(memory_ref(a.inner_aval, a.memory_space) for a in avals))


# ---------------------------------------------------------------- references


def resize_ref(aval: Any, shape: Sequence[int]) -> Any:
    """The abstract reference with another shape."""
    return aval.update(inner_aval=aval.inner_aval.update(shape=tuple(shape)))


def memory_space(aval: Any) -> str:
    """ "vmem", "smem", "any", "semaphore_mem", "default", ... of an abstract reference."""
    space = aval.memory_space
    return str(getattr(space, "value", space) or "default").lower()


def indexers(transforms: Sequence[Any]) -> tuple[Any, ...] | None:
    """The transforms of a reference where all are plain indexers, else None (bitcast, reshape, transpose)."""
    from jax._src.state.indexing import NDIndexer

    return tuple(transforms) if all(isinstance(t, NDIndexer) for t in transforms) else None


def is_slice(index: Any) -> bool:
    from jax._src.state.indexing import Slice

    return isinstance(index, Slice)


def reslice(indexer: Any, dim: int, start: Any, size: int, extent: int) -> Any:
    """The indexer of a buffer whose `dim` has `extent` elements, taking `size` from `start` there."""
    from jax._src.state.indexing import NDIndexer, Slice

    indices = list(indexer.indices)
    indices[dim] = Slice(start, size, indices[dim].stride)
    shape = list(indexer.shape)
    shape[dim] = extent
    return NDIndexer(tuple(indices), tuple(shape), indexer.int_indexer_shape)


# ---------------------------------------------------------------- grids and block mappings


def pallas_name(eqn: Any) -> str:
    """The kernel's name as it appears in the lowered program."""
    name = eqn.params.get("name")
    if name:
        return str(name)
    return str(eqn.params["jaxpr"].debug_info.func_src_info).split(" at ")[0].split(" for ")[0]


def for_tpu(eqn: Any) -> bool:
    """Whether the `pallas_call` is one for a TPU's TensorCore: no mesh of its own, no other backend's parameters."""
    if eqn.primitive.name != "pallas_call" or eqn.params.get("mesh") is not None:
        return False
    kind = type(eqn.params.get("compiler_params"))
    if hasattr(eqn.params.get("compiler_params"), "keys"):  # jax <= 0.9: a FrozenDict {"mosaic_tpu": params}
        return all("tpu" in str(k) for k in eqn.params["compiler_params"])
    return kind is type(None) or "mosaic.core" in kind.__module__


def compiler_params(eqn: Any) -> Any:
    """`pltpu.CompilerParams` of the call, or None."""
    params = eqn.params.get("compiler_params")
    if hasattr(params, "keys"):
        return params.get("mosaic_tpu")
    return params


def with_compiler_params(eqn: Any, **changes: Any) -> Any:
    """The `compiler_params` parameter of the call with some fields changed."""
    params = eqn.params.get("compiler_params")
    if hasattr(params, "keys"):
        if "mosaic_tpu" not in params:
            return params
        changed = {**params, "mosaic_tpu": dataclasses.replace(params["mosaic_tpu"], **changes)}
        return type(params)(changed)
    return None if params is None else dataclasses.replace(params, **changes)


def is_dynamic_dim(size: Any) -> bool:
    return not isinstance(size, int)


def block_size(dim: Any) -> int:
    return _require(_pallas(), "_get_block_dim_size")(dim)


def is_squeezed(dim: Any) -> bool:
    return isinstance(dim, _pallas().Squeezed)


def is_blocked(dim: Any) -> bool:
    return isinstance(dim, _pallas().Blocked)


def blocked(size: int) -> Any:
    return _pallas().Blocked(size)


def trace_index_map(grid_mapping: Any, avals: Sequence[Any], fun: Callable[..., Sequence[Any]], like: Any) -> Any:
    """A closed index map jaxpr of `fun(*grid_ids, *prefetch_refs)`, with the debug info of `like`."""
    info = open_jaxpr(like)[0].debug_info
    names = tuple(info.arg_names or ())
    if len(names) != len(avals):
        info = info._replace(arg_names=("",) * len(avals))
    with _require(_pallas(), "tracing_grid_env")(grid_mapping.grid, grid_mapping.vmapped_dims):
        return close(trace(fun, avals, info))


def trace_kernel(grid_mapping: Any, avals: Sequence[Any], fun: Callable[..., Any], like: Any) -> Any:
    """A kernel jaxpr of `fun(*refs)` under this grid, with the debug info of the kernel `like`."""
    with grid_mapping.trace_env():
        return trace(fun, avals, like.debug_info)


def program_id(axis: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.program_id(axis)


def int32_aval() -> Any:
    return _core().ShapedArray((), jax.numpy.int32.dtype)


def index_map_tree(num_ids: int, tree: Any, old_ids: int) -> Any:
    """The argument tree of index maps for another number of grid ids; prefetch operands stay as they are."""
    args, kwargs = jax.tree_util.tree_unflatten(tree, [0] * tree.num_leaves)
    return jax.tree_util.tree_structure(((0,) * num_ids + tuple(args[old_ids:]), kwargs))


# ---------------------------------------------------------------- effects


def written(eqn: Any) -> list[Any]:
    """The references among the equation's inputs that its declared effects say it writes or adds to."""
    from jax._src.state.types import AccumEffect, WriteEffect

    found = []
    for effect in eqn.effects:
        if isinstance(effect, (WriteEffect, AccumEffect)):
            found.append(_effect_input(effect, eqn.invars))
    return found


def declared_writes(jaxpr: Any) -> frozenset[int]:
    """Positions of the inputs that the jaxpr's declared effects say it writes or adds to."""
    from jax._src.state.types import AccumEffect, WriteEffect

    found = set()
    for effect in jaxpr.effects:
        if isinstance(effect, (WriteEffect, AccumEffect)):
            found.add(list(jaxpr.invars).index(_effect_input(effect, [*jaxpr.constvars, *jaxpr.invars])))
    return frozenset(found)


def _effect_input(effect: Any, inputs: Sequence[Any]) -> Any:
    """The variable an effect is on: from jax 0.10 the effect holds it, before that its position."""
    var = getattr(effect, "input", None)
    return inputs[effect.input_index] if var is None else var
