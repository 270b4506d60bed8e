"""A failure that no kernel caused becomes a folder from which anybody can see it again."""

import base64
import io
import json
import logging
import os
import pathlib
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from kernels_on_chips import add

from jax_vmem_guard import _jax, custom_call
from jax_vmem_guard.bug_report import write_bundle
from jax_vmem_guard.diagnosis import diagnose

TOPOLOGY = "v5e:2x2"


def take(table, rows):
    return jnp.take(table, rows, axis=0, mode="clip")


def divide_and_transpose(x):
    return jnp.transpose(x / 2)


# Small programs whose XLA instruction needs more than a limit in KiB: program, arguments, limit, and the instruction.
# libtpu 0.0.30 makes a loop of the gather, with another instruction in it that does not fit.
GATHER = ("gather_fusion", 64) if jax.__version_info__ >= (0, 10) else ("dynamic-update-slice", 8)
PROGRAMS = {
    "fusion": (lambda x, y: x @ y, [((1024, 1024), jnp.bfloat16)] * 2, 64, "fusion"),
    "copy": (divide_and_transpose, [((1024, 1024), jnp.float32)], 64, "copy"),
    "sort": (jnp.sort, [((1024,), jnp.float32)], 4, "sort"),
    "gather": (take, [((4096, 256), jnp.bfloat16), ((256,), jnp.int32)], GATHER[1], GATHER[0]),
}


def failing(fun, arguments, kib, **options):
    """The module and the compiler's error of a program compiled with a small limit."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    lowered = jax.jit(fun).lower(*[jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in arguments])
    options = {"xla_tpu_scoped_vmem_limit_kib": str(kib), **options}
    with pytest.raises(RuntimeError) as caught:
        lowered.compile(compiler_options=options)
    bytecode = io.BytesIO()
    lowered._lowering._hlo.operation.write_bytecode(bytecode)
    return bytecode.getvalue(), caught.value, options


def bundle_of(folder, module, error, options, **changes):
    arguments = {"module_bytecode": module, "error": error, "diagnosis": diagnose(error), "topology": TOPOLOGY,
                 "num_devices": 1, "compiler_options": options}
    return write_bundle(folder, **{**arguments, **changes})


@pytest.fixture(scope="module")
def copy_failure():
    fun, arguments, kib, _ = PROGRAMS["copy"]
    return failing(fun, arguments, kib)


def reproduce(bundle, **environment):
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV")}
    return subprocess.run([sys.executable, bundle / "reproduce.py"], env={**kept, **environment}, cwd=bundle.parent,
                          capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_the_script_shows_the_same_error_in_a_fresh_process(kind, tmp_path):
    """Fusion, copy, sort and gather of XLA itself: the diagnosis blames no kernel, the script repeats the message."""
    fun, arguments, kib, instruction = PROGRAMS[kind]
    module, error, options = failing(fun, arguments, kib)
    diagnosis = diagnose(error)
    assert diagnosis.instruction.split(".")[0] == instruction
    assert (diagnosis.form, diagnosis.is_kernel, diagnosis.limit_bytes) == ("limit", False, kib * 1024)
    bundle = bundle_of(tmp_path, module, error, options)
    again = reproduce(bundle)
    assert again.returncode == 0, again.stdout + again.stderr
    seen = diagnose(again.stdout)
    assert (seen.instruction, seen.size_bytes, seen.limit_bytes) == (
        diagnosis.instruction, diagnosis.size_bytes, diagnosis.limit_bytes)


def test_the_bundle_has_program_hlo_versions_chip_flags_and_message(copy_failure, tmp_path, monkeypatch):
    """Everything an XLA developer asks for, in files of their own."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag=3 --xla_dump_to=/home/ann/dumps")
    module, error, options = copy_failure
    bundle = bundle_of(tmp_path, module, error, options)
    facts = json.loads((bundle / "environment.json").read_text())
    assert (facts["chip"], facts["topology"], facts["num_devices"]) == ("v5e", TOPOLOGY, 1)
    assert facts["versions"]["jax"] == jax.__version__ and "libtpu" in facts["versions"]
    assert facts["compiler_options"] == {"xla_tpu_scoped_vmem_limit_kib": "64"}
    assert facts["flags"]["XLA_FLAGS"] == ["--xla_some_flag=3"]
    assert "stablehlo.transpose" in (bundle / "program.mlir").read_text()
    assert "transpose(" in (bundle / "hlo" / "before_optimizations.txt").read_text()
    assert "%copy" in (bundle / "hlo" / "after_optimizations.txt").read_text()
    assert diagnose((bundle / "message.txt").read_text()).instruction == "copy"
    listed = (bundle / "README.md").read_text()
    assert "`copy`" in listed and "hlo/after_optimizations.txt" in listed and "constants" not in listed


def test_no_path_of_the_machine_is_in_the_bundle(tmp_path):
    """Neither where this test is, nor Python, nor the folder of the bundle itself, also not inside kernels."""
    def program(x):
        return jnp.transpose(add(x, x, block=8) / 2)

    module, error, options = failing(program, [((1024, 1024), jnp.float32)], 128, xla_dump_to=str(tmp_path / "dumps"))
    assert diagnose(error).is_kernel is False
    here = pathlib.Path(__file__)
    assert str(here).encode() in module, "the module should know where the program is"
    bundle = bundle_of(tmp_path / "reports", module, error, options)
    machine = {str(here.parent), str(pathlib.Path.cwd()), str(tmp_path), sys.prefix, str(pathlib.Path(jax.__file__).parent)}
    for file in bundle.rglob("*"):
        if file.is_file():
            text = file.read_text()
            assert not [path for path in machine if path in text], file
    program = _jax.parse_stablehlo((bundle / "program.mlir").read_text())
    [call] = custom_call.custom_calls(program)
    kernel = base64.b64decode(custom_call.read_config(call)["custom_call_config"]["body"])
    assert not [path for path in machine if path.encode() in kernel]
    assert "tests/test_bug_report.py" in (bundle / "program.mlir").read_text()
    assert reproduce(bundle).returncode == 0


def test_a_program_over_four_devices_is_reproduced(tmp_path):
    """The module says how many partitions it has."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = jax.sharding.Mesh(devices, ("d",))
    rows, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("d",), ()))
    lowered = jax.jit(lambda x, y: x @ y).lower(jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16, sharding=rows),
                                                jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=whole))
    options = {"xla_tpu_scoped_vmem_limit_kib": "64"}
    with pytest.raises(RuntimeError) as caught:
        lowered.compile(compiler_options=options)
    module = _jax.stablehlo_bytecode(lowered._lowering._hlo)
    bundle = bundle_of(tmp_path, module, caught.value, options, num_devices=4)
    assert json.loads((bundle / "environment.json").read_text())["num_partitions"] == 4
    assert reproduce(bundle).returncode == 0


def test_the_script_tells_when_the_failure_is_gone(copy_failure, tmp_path):
    """With a limit that is high enough the program compiles: exit code 1."""
    module, error, _ = copy_failure
    bundle = bundle_of(tmp_path, module, error, {})
    assert reproduce(bundle).returncode == 1


def test_the_same_failure_is_written_once(copy_failure, tmp_path):
    """The folder is named after its content; nothing unfinished is left beside it."""
    module, error, options = copy_failure
    first = bundle_of(tmp_path, module, error, options)
    written = (first / "program.mlir").stat().st_mtime_ns
    assert bundle_of(tmp_path, module, error, options) == first
    assert (first / "program.mlir").stat().st_mtime_ns == written
    other = bundle_of(tmp_path, module, error, {**options, "xla_tpu_scoped_vmem_limit_kib": "32"})
    assert other != first
    assert {child.name for child in tmp_path.iterdir()} == {first.name, other.name}


def test_constants_of_the_program_are_pointed_out(tmp_path):
    """Arrays that were closed over are part of the program, and may be somebody's weights."""
    weights = jnp.arange(1024.0).reshape(8, 128)

    def program(x):
        return jnp.sort(x + weights.reshape(-1))

    module, error, options = failing(program, [((1024,), jnp.float32)], 4)
    text = (bundle_of(tmp_path, module, error, options) / "README.md").read_text()
    assert "1 constants of more than 1 KiB" in text


def test_a_folder_that_cannot_be_made_is_a_log_line(copy_failure, tmp_path, caplog):
    """The compiler's error is what the caller must see, not the disk's."""
    (tmp_path / "file").write_text("")
    module, error, options = copy_failure
    with caplog.at_level(logging.WARNING, "jax_vmem_guard"):
        assert bundle_of(tmp_path / "file" / "reports", module, error, options) is None
    assert "JAX_VMEM_GUARD_BUG_REPORT_DIR" in caplog.text


def test_a_disk_that_takes_no_more_is_a_log_line(copy_failure, tmp_path, caplog):
    """What was written so far is taken away again."""
    module, error, options = copy_failure
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        with caplog.at_level(logging.WARNING, "jax_vmem_guard"):
            written = bundle_of(tmp_path, module, error, options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert written is None
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_is_none_is_a_log_line(copy_failure, tmp_path, caplog):
    """A fault of the report's own stays in the log."""
    _, error, options = copy_failure
    with caplog.at_level(logging.WARNING, "jax_vmem_guard"):
        assert bundle_of(tmp_path, b"no module", error, options) is None
    assert "could not write a bug report" in caplog.text
