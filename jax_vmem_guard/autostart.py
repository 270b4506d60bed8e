"""Turns the guard on as soon as a program imports JAX, where `JAX_VMEM_GUARD` is set.

JAX calls its plugins when it starts a backend. A program that only compiles for a topology may never start one (jax 0.8,
0.9) or only in the middle of its first compile (0.10 to 0.12), which is too late. So a `.pth` file, which Python reads
when it starts, runs this file where the variable is set. It is run by path, without its package, and imports nothing but
the standard library: Python programs that never import JAX pay next to nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _AfterJax(importlib.abc.MetaPathFinder):
    """Finds `jax` as everybody else would, and starts the guard when it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _start()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _start() -> None:
    from jax_vmem_guard import plugin

    plugin.initialize()


if "jax" not in sys.modules:
    sys.meta_path.insert(0, _AfterJax())
