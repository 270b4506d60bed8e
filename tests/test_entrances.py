"""The same unmodified script compiles by every entrance: environment variable, `run`, `install()`, `vmem_guard.jit`."""

import json
import os
import subprocess
import sys

import jax
import pytest
from kernels_on_chips import MiB, used_by_kernels

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import demo
from jax_vmem_guard.chips import chip_named

SCRIPT = """
import sys
import jax, jax.numpy as jnp
from jax import jit
from jax.experimental import pallas as pl, topologies

def kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

@jit
def double(x):
    block = pl.BlockSpec((512, 4096), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(16,), in_specs=[block], out_specs=block,
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
sharding = jax.sharding.SingleDeviceSharding(device)
double.lower(jax.ShapeDtypeStruct((8192, 4096), jnp.float32, sharding=sharding)).compile()
print("compiled", __name__, *sys.argv[1:])
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


#: The package under test comes before an installed one in the processes these tests start.
ROOT = os.path.dirname(os.path.dirname(vmem_guard.__file__))


def python(*arguments, **env):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": ROOT, **env})


def test_unguarded_the_script_dies_with_e1001(script):
    result = python(str(script), JAX_VMEM_GUARD="")
    assert result.returncode != 0 and "E1001" in result.stderr


@pytest.mark.compat
def test_with_the_environment_variable_it_compiles_and_says_what_was_changed(script):
    result = python(str(script), JAX_VMEM_GUARD="fix")
    assert result.stdout == "compiled __main__\n", result.stderr
    assert "limit 16.00 MiB (default) -> limit 32.12 MiB, needs 32.00 MiB" in result.stderr
    assert "compiler_params=pltpu.CompilerParams(vmem_limit_bytes=33685504)" in result.stderr


def test_in_report_mode_it_dies_with_an_explanation(script):
    result = python(str(script), JAX_VMEM_GUARD="report")
    assert result.returncode != 0
    assert "mode `report`" in result.stderr and "train.py" in result.stderr


def test_run_is_python_with_the_guard(script):
    result = python("-m", "jax_vmem_guard", "run", str(script), "--steps", "3", JAX_VMEM_GUARD="")
    assert result.stdout == "compiled __main__ --steps 3\n", result.stderr
    assert "32.12 MiB" in result.stderr


def test_run_keeps_the_scripts_exit_code_and_modules(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys; print(sys.argv); sys.exit(7)")
    result = subprocess.run([sys.executable, "-m", "jax_vmem_guard", "run", "-m", "leaves", "a"], cwd=tmp_path, text=True,
                            capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert result.returncode == 7, result.stderr
    assert "'a'" in result.stdout


@pytest.mark.parametrize(("arguments", "said"), [
    (["run", "no_such.py"], "there is no script 'no_such.py'"),
    (["explain", "no_such.log"], "cannot read 'no_such.log'"),
    (["demo", "--chip", "v9"], "use one of v2"),
])
def test_bad_arguments_end_with_exit_code_2_and_a_next_step(arguments, said):
    result = python("-m", "jax_vmem_guard", *arguments)
    assert result.returncode == 2 and said in result.stderr


def test_explain_reads_a_log_from_standard_input(script):
    log = python(str(script), JAX_VMEM_GUARD="").stderr
    result = subprocess.run([sys.executable, "-m", "jax_vmem_guard", "explain"], input=log, capture_output=True, text=True)
    assert result.returncode == 0
    assert "vmem_limit_bytes" in result.stdout and "32.00" in result.stdout


def install_and_jit(fun):
    vmem_guard.install()
    return jax.jit(fun)


#: Each program with blocks of 2048, or its defaults, on both chips; the entrances take turns.
LIBRARY = [
    (demo.CASES[0], "v5e", install_and_jit), (demo.CASES[0], "v6e", vmem_guard.jit),
    (demo.CASES[1], "v5e", vmem_guard.jit), (demo.CASES[1], "v6e", install_and_jit),
    pytest.param(demo.CASES[2], "v5e", install_and_jit, marks=pytest.mark.long),
    pytest.param(demo.CASES[2], "v6e", vmem_guard.jit, marks=pytest.mark.long),
    (demo.CASES[3], "v5e", vmem_guard.jit), (demo.CASES[3], "v6e", install_and_jit),
]


@pytest.mark.parametrize(("case", "chip", "entrance"), LIBRARY, ids=lambda value: getattr(value, "name", None) or
                         getattr(value, "__name__", value))
def test_jaxs_own_attention_kernels_compile_within_ten_percent_of_their_need(case, chip, entrance):
    done = len(vmem_guard.repairs())
    try:
        compiled = demo.lowered_for(chip_named(chip).topology, case.build, entrance).compile()
    finally:
        vmem_guard.uninstall()
    [repair] = vmem_guard.repairs()[done:]
    assert repair.compiles <= 2
    assert all(change.remedy == "limit" for change in repair.changes)
    assert all(change.need_bytes <= change.data["limit_bytes"] <= 1.1 * change.need_bytes for change in repair.changes)
    # Inside the program XLA may place operands in VMEM itself: then a kernel uses less than it needs alone.
    largest = max(used_by_kernels(compiled))
    assert largest <= max(change.need_bytes for change in repair.changes)
    assert json.loads(repair.to_json())["chip"] == chip
    assert str(repair).count("to keep:") == len(repair.changes)
    assert largest > 16 * MiB


LIBRARY_SCRIPT = """
import sys
import jax
from jax_vmem_guard import demo
from jax_vmem_guard.chips import chip_named

case = next(case for case in demo.CASES if case.name == sys.argv[1])
demo.lowered_for(chip_named(sys.argv[2]).topology, case.build, jax.jit).compile()
print("compiled")
"""


@pytest.mark.long
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("case", demo.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("command", [(), ("-m", "jax_vmem_guard", "run")], ids=["environment", "run"])
def test_jaxs_own_attention_kernels_compile_in_an_unmodified_script(command, case, chip, tmp_path):
    script = tmp_path / "attention.py"
    script.write_text(LIBRARY_SCRIPT)
    result = python(*command, str(script), case.name, chip, JAX_VMEM_GUARD="" if command else "fix")
    assert result.stdout == "compiled\n", result.stderr
    assert "to keep:" in result.stderr
