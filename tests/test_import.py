"""Importing the package does nothing but define names."""

import subprocess
import sys

PROGRAM = """
import logging, sys
import jax
from jax._src import xla_bridge
from jax._src.interpreters import pxla
before = (pxla.lower_sharding_computation, pxla.MeshComputation.compile)
import jax_vmem_guard
assert not xla_bridge.backends_are_initialized(), "a backend was started"
assert before == (pxla.lower_sharding_computation, pxla.MeshComputation.compile), "JAX was patched"
assert not logging.getLogger("jax_vmem_guard").handlers, "a log handler was added"
assert not any(name.startswith("jax.") and "pallas" in name for name in sys.modules)
assert "rich" not in sys.modules
print("pure")
"""


def run(program, **env):
    import os
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          env={**os.environ, "JAX_PLATFORMS": "cpu", **env})


def test_importing_starts_no_backend_patches_nothing_adds_no_handler_and_leaves_pallas_alone():
    result = run(PROGRAM)
    assert result.stdout.strip() == "pure", result.stderr


def test_the_environment_variable_installs_the_guard_when_jax_starts_its_backends():
    result = run("""
import jax
jax.devices()
from jax_vmem_guard import hook
print(hook.installed_policy().mode)
""", JAX_VMEM_GUARD="report")
    assert result.stdout.strip() == "report", result.stderr


def test_without_the_variable_starting_jax_patches_nothing():
    result = run("""
import jax
jax.devices()
import sys
from jax_vmem_guard import hook
print(hook.installed_policy())
""", JAX_VMEM_GUARD="")
    assert result.stdout.strip() == "None", result.stderr


def test_a_wrong_variable_stops_the_first_compile_with_the_valid_values():
    result = run("import jax; jax.jit(lambda x: x + 1)(1.0)", JAX_VMEM_GUARD="fixx")
    assert result.returncode != 0
    assert "use one of fix" in [line for line in result.stderr.splitlines() if line.startswith("ValueError")][-1]
