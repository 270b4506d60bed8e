"""`jax-vmem-guard run`: somebody's script, unmodified, with the guard installed."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from dataclasses import replace

from jax_vmem_guard import hook
from jax_vmem_guard.policy import policy_from_environment


def run(options: argparse.Namespace) -> int:
    """Run the script as Python would: its own `sys.argv`, `sys.path`, `__main__` and exit code.

    The policy comes from the environment; `--mode` wins over it, and without either the mode is "fix".
    """
    from jax_vmem_guard.cli import log_to_stderr

    try:
        policy = policy_from_environment()
    except ValueError as error:
        print(f"jax-vmem-guard run: {error}", file=sys.stderr)
        return 2
    mode = options.mode or ("fix" if policy.mode == "off" else policy.mode)
    if not options.module and not os.path.exists(options.target):
        print(f"jax-vmem-guard run: there is no script {options.target!r}; give the path of a Python file, or -m and the "
              "name of a module.", file=sys.stderr)
        return 2
    log_to_stderr()
    hook.install(replace(policy, mode=mode))
    # Child processes that the script starts are guarded too.
    os.environ["JAX_VMEM_GUARD"] = mode
    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    sys.argv = [options.target, *arguments]
    if options.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(options.target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(options.target)))
        runpy.run_path(options.target, run_name="__main__")
    return 0
