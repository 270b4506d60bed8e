"""Turns the guard on from the environment: the `jax_plugins` entry point.

JAX calls `initialize()` when it starts its backends, before the first compile, and logs but swallows what it raises.
`autostart.py` calls it earlier where the package was installed with its `.pth` file.
"""

from __future__ import annotations

import logging

from jax_vmem_guard import hook
from jax_vmem_guard.policy import is_off, policy_from_environment

_done = False


def initialize() -> None:
    """Install the guard if `JAX_VMEM_GUARD` asks for it, unless the program has already installed it itself.

    Only the first call in a process counts: a program that uninstalls the guard afterwards keeps it off.
    """
    global _done
    if _done or hook.installed_policy() is not None:
        return
    _done = True
    try:
        policy = policy_from_environment()
    except ValueError as error:
        logging.getLogger("jax_vmem_guard").error("%s", error)
        # JAX would swallow the error and the program would run unguarded: let the first compile say it. But who has not
        # turned the guard on only gets the log line.
        if not is_off():
            hook.refuse(error)
        return
    if policy.mode != "off":
        hook.install(policy)
