"""Finds what a TARGET of `jax-vmem-guard check` means: a function with its arguments, or a compiled-for-later file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_vmem_guard.stand_in import Topology

FORMS = ("`module:function`, `file.py:function`, or a file with StableHLO (text or bytecode) or a serialised "
         "`jax.export.Exported`")
RETURNS = ("(fun, args), (fun, args, kwargs), a dict of names to such tuples, or an iterable (a generator, a list) of "
           "such tuples")


class TargetError(ValueError):
    """A TARGET that does not lead to a program; the message says what was expected."""


@dataclass(frozen=True)
class FunctionTarget:
    """A function and the arguments to compile it for."""

    name: str
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModuleTarget:
    """A StableHLO program, text or bytecode."""

    name: str
    stablehlo: str | bytes


@dataclass(frozen=True)
class ExportTarget:
    """What `jax.export` serialised."""

    name: str
    blob: bytes


Target = FunctionTarget | ModuleTarget | ExportTarget


def load(target: str, topology: Topology) -> Iterator[Target]:
    """The programs a TARGET stands for, in order.

    Args:
      target: see `FORMS`. A function that has parameters called `topology` or `devices` is given the topology's name or
        its chips, so that it can build a mesh.
      topology: what the programs will be compiled for.

    Raises:
      TargetError: nothing is there, or it is of another form.
      Whatever importing or calling the target raises.
    """
    if os.path.isfile(target):
        yield _file(Path(target))
        return
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise TargetError(f"there is no file `{target}`, and it does not name a function; a TARGET is {FORMS}")
    function = _function(place, name)
    wanted = inspect.signature(function).parameters
    known = {"topology": topology.name, "devices": topology.devices}
    missing = [p.name for p in wanted.values() if p.name not in known and p.default is p.empty
               and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if missing:
        raise TargetError(f"`{name}` takes {', '.join(missing)}; a TARGET is called without arguments (but `topology` and "
                          f"`devices`, if it has them) and must return {RETURNS}")
    result = function(**{key: value for key, value in known.items() if key in wanted})
    yield from _programs(result, name)


def _file(path: Path) -> Target:
    data = path.read_bytes()
    if data.startswith(b"ML\xefR"):
        return ModuleTarget(path.stem, data)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return ExportTarget(path.stem, data)
    if "module" in text and "func.func" in text:
        return ModuleTarget(path.stem, text)
    raise TargetError(f"`{path}` holds no StableHLO module and no serialised `jax.export.Exported`; to check a Python "
                      f"file write `{path}:function`. A TARGET is {FORMS}")


def _function(place: str, name: str) -> Callable[..., Any]:
    if place.endswith(".py"):
        module = _load_file(Path(place))
    else:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name and place.split(".")[0] == error.name.split(".")[0]:
                raise TargetError(f"there is no module `{place}`; a TARGET is {FORMS}") from error
            raise
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        public = ", ".join(sorted(key for key, value in vars(module).items()
                                  if callable(value) and not key.startswith("_"))[:12]) or "none"
        raise TargetError(f"`{place}` has no function `{name}`; it has: {public}")
    return function


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise TargetError(f"there is no file `{path}`; a TARGET is {FORMS}")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _programs(result: Any, name: str) -> Iterator[Target]:
    if _is_program(result):
        yield _program(result, name)
    elif isinstance(result, dict):
        for key, value in result.items():
            yield _program(value, str(key))
    elif isinstance(result, Iterable) and not isinstance(result, (str, bytes)):
        for number, value in enumerate(result):
            fun_name = getattr(value[0], "__name__", "") if _is_program(value) else ""
            yield _program(value, fun_name or f"{name}[{number}]")
    else:
        raise TargetError(f"`{name}` returned {type(result).__name__}; it must return {RETURNS}")


def _is_program(value: Any) -> bool:
    return isinstance(value, tuple) and 2 <= len(value) <= 3 and callable(value[0])


def _program(value: Any, name: str) -> FunctionTarget:
    if not _is_program(value):
        raise TargetError(f"`{name}` gave {type(value).__name__} where a program should be; it must return {RETURNS}")
    args = value[1] if isinstance(value[1], (tuple, list)) else (value[1],)
    kwargs = value[2] if len(value) == 3 else {}
    if not isinstance(kwargs, dict):
        raise TargetError(f"the keyword arguments of `{name}` must be a dict, not {type(kwargs).__name__}")
    return FunctionTarget(name, value[0], tuple(args), kwargs)
