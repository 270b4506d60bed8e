"""`vmem_guard.tunable` and `vmem_guard.fallback`: choices that the author of a function declares."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax_vmem_guard import _jax_trace, declared, hook
from jax_vmem_guard.at_once import call_at_once
from jax_vmem_guard.choice_records import say_reference_is_used
from jax_vmem_guard.declared import FALLBACK, TUNABLE, Choice, Declaration
from jax_vmem_guard.refused import first_line, refused_before_compile

REASONS = ("vmem", "lowering")


def tunable(fun: Callable[..., Any] | None = None, /, *, choices: Sequence[Mapping[str, Any]] | None = None,
            **keywords: Sequence[Any]) -> Any:
    """`fun`, called with the first of several choices; under the guard with the first one that compiles.

    A choice is a set of keyword arguments. Best first: the guard goes down the list only when nothing cheaper (a higher
    limit, memory coloring) makes a kernel of the program fit, and then traces the whole program again with the next
    choice. So choices work under `jax.grad`, `jax.vmap`, scans, `shard_map` and AOT, and may differ in everything a
    trace can see. That every choice gives a result as good as the first is the author's word.

    Without the guard it calls `fun` with the first choice. With it, a program whose first choices compile is the same
    module, to the byte, as one that calls `fun` so directly.

    Args:
      fun: any function of arrays. Left out, `tunable(...)` is a decorator.
      choices: dicts of keyword arguments, which need not have the same keys.
      **keywords: instead of `choices`: a list for each keyword argument. Several lists go together, the first of each
        with the first of the others, so they have the same length.

    Returns:
      A callable like `fun`. A keyword argument given in a call wins over the choice's.

    Raises:
      TypeError: `fun` is not callable, or a choice is not a dict.
      ValueError: no choices, both forms at once, or lists of different lengths.

    Example:
      >>> attend = vmem_guard.tunable(flash_attention, block_sizes=[large, medium, small])
      >>> matmul = vmem_guard.tunable(matmul, choices=[dict(bm=512, bk=1024), dict(bm=256, bk=1024)])
    """
    where = _caller()
    if fun is None:
        return lambda decorated: _tunable(decorated, choices, keywords, where)
    return _tunable(fun, choices, keywords, where)


def fallback(kernel_fun: Callable[..., Any], reference_fun: Callable[..., Any], *, on: Iterable[str] = ("vmem",)) -> Any:
    """`kernel_fun`, or `reference_fun` in programs where nothing makes the kernel of the first one fit.

    The guard takes the reference after everything else it may do, and says so once in the log, as a warning. The whole
    program is traced again with it, so gradients are the reference's own. Without the guard it calls `kernel_fun`.

    Args:
      kernel_fun: any function of arrays; it may be a `tunable`.
      reference_fun: takes the same arguments and gives results of the same shapes and types.
      on: what makes the reference take over: "vmem", a kernel that runs out of VMEM; "lowering", one that is refused
        otherwise: `NotImplementedError`, and what Pallas or Mosaic do not take when they lower or compile it.

    Raises:
      TypeError: one of the functions is not callable.
      ValueError: `on` is empty or has an unknown word.
    """
    for name, fun in (("kernel_fun", kernel_fun), ("reference_fun", reference_fun)):
        if not callable(fun):
            raise TypeError(f"`{name}` must be a function, got {fun!r}")
    reasons = (on,) if isinstance(on, str) else tuple(on)
    unknown = [reason for reason in reasons if reason not in REASONS]
    if unknown or not reasons:
        raise ValueError(f"`on` must name one or more of {', '.join(REASONS)}; got {on!r}")
    both = tuple(Choice(words=_name(fun), function=fun) for fun in (kernel_fun, reference_fun))
    return _declare(Declaration(kind=FALLBACK, name=_name(kernel_fun), where=_caller(), choices=both, reasons=reasons),
                    kernel_fun)


def _tunable(fun: Callable[..., Any], choices: Sequence[Mapping[str, Any]] | None,
             keywords: Mapping[str, Sequence[Any]], where: str) -> Any:
    if not callable(fun):
        raise TypeError(f"`tunable` takes a function, got {fun!r}; choices go by keyword, as in "
                        "tunable(f, block=[512, 256])")
    dicts = _as_dicts(choices, keywords)
    return _declare(
        Declaration(kind=TUNABLE, name=_name(fun), where=where,
                    choices=tuple(Choice(words=", ".join(f"{k}={v!r}" for k, v in one.items()) or "no arguments",
                                         function=fun, keywords=one) for one in dicts)), fun)


def _as_dicts(choices: Sequence[Mapping[str, Any]] | None,
              keywords: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Any], ...]:
    if choices is not None and keywords:
        raise ValueError("give either `choices`, a list of dicts, or a list for each keyword argument, not both; a "
                         f"keyword argument that is the same in all of them ({', '.join(keywords)}) goes into each dict")
    if choices is not None:
        for one in choices:
            if not isinstance(one, Mapping):
                raise TypeError(f"`choices` must be a list of dicts of keyword arguments, got {one!r} in it")
        found = tuple(dict(one) for one in choices)
    else:
        for name, values in keywords.items():
            if not isinstance(values, (list, tuple)):
                raise TypeError(f"`{name}` must be a list of values, best first, got {values!r}")
        lengths = {name: len(values) for name, values in keywords.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"lists of keyword arguments go together, so they have one length; got {lengths}. For other "
                             "combinations write choices=[dict(...), ...]")
        found = tuple(dict(zip(keywords, together, strict=True)) for together in zip(*keywords.values(), strict=True))
    if not found:
        raise ValueError("`tunable` needs at least one choice, as in tunable(f, block=[512, 256])")
    return found


class DeclaredFunction:
    """A function with declared choices: calls like the function, with the choice the guard has taken."""

    def __init__(self, declaration: Declaration, fun: Callable[..., Any]):
        functools.update_wrapper(self, fun, updated=())
        self._declaration = declaration

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        at_work, declaration = declared.retracing(), self._declaration
        if at_work is not None:
            return _call(declaration, at_work.index(declaration, args, kwargs), args, kwargs)
        policy = hook.installed_policy()
        if policy is not None and policy.mode == "fix" and not _jax_trace.inside_a_program():
            return call_at_once(declaration, args, kwargs)
        return _call(declaration, 0, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        words = "; ".join(choice.words for choice in self._declaration.choices)
        return f"<{self._declaration.kind} `{self._declaration.name}`: {words}>"


def _call(declaration: Declaration, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The choice's result. A kernel that cannot even be traced gives way to its reference where that was declared."""
    choice = declaration.choices[index]
    if index or "lowering" not in declaration.reasons or not hook.seams_active():
        return choice(*args, **kwargs)
    try:
        return choice(*args, **kwargs)
    except Exception as error:
        if not refused_before_compile(error):
            raise
        say_reference_is_used(declaration, "tracing", f"its kernel was refused: {first_line(error)}")
    return declaration.choices[1](*args, **kwargs)


def _declare(declaration: Declaration, fun: Callable[..., Any]) -> DeclaredFunction:
    declared.register(declaration)
    _jax_trace.prepare_caches()
    _jax_trace.keep_own_frames_hidden()
    hook.watch_traces()
    return DeclaredFunction(declaration, fun)


def _name(fun: Any) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return str(getattr(fun, "__name__", type(fun).__name__))


def _caller() -> str:
    """ "file:line" of the code that declares."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
