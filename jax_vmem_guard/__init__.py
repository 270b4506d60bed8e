"""Compile-time middleware for JAX on TPU: programs whose Pallas kernels run out of scoped VMEM compile anyway.

Importing this package starts no backend, patches nothing and adds no log handler.

  import jax_vmem_guard as vmem_guard

  vmem_guard.install()          # every jax.jit of the process
  step = vmem_guard.jit(step)   # or one function
"""

from __future__ import annotations

from jax_vmem_guard._version import __version__
from jax_vmem_guard.changes import Change
from jax_vmem_guard.check import Checked, check
from jax_vmem_guard.diagnosis import Diagnosis, diagnose
from jax_vmem_guard.hook import install, uninstall
from jax_vmem_guard.jit import jit
from jax_vmem_guard.journal import Repair, repairs
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.rehearsal import rehearse
from jax_vmem_guard.report import Report, inspect
from jax_vmem_guard.tunable import fallback, tunable

__all__ = [
    "Change",
    "Checked",
    "Diagnosis",
    "Policy",
    "Repair",
    "Report",
    "__version__",
    "check",
    "diagnose",
    "fallback",
    "inspect",
    "install",
    "jit",
    "rehearse",
    "repairs",
    "tunable",
    "uninstall",
]
