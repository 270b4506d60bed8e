"""`check`: compile for chips that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import check_targets as targets
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import hook
from jax_vmem_guard.check import check
from jax_vmem_guard.chips import CHIPS, MiB
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.report import Report
from jax_vmem_guard.rows import FAILS, FITS, REPAIRED


def checked(target, **options):
    fun, args = target()
    return check(fun, *args, **options)


@pytest.mark.compat
def test_a_kernel_that_fits_needs_what_its_blocks_take():
    """A program that fits as it is: need measured by the compiler, limit by default, nothing changed."""
    (row,) = checked(targets.small, topology="v5e").rows
    assert (row.verdict, row.kernel, row.topology) == (FITS, "scale", "v5e:2x2")
    assert (row.limit_bytes, row.capacity_bytes) == (16 * MiB, 128 * MiB)
    assert row.changes == ()
    assert row.source.endswith(f"check_targets.py:{targets.scale.__code__.co_firstlineno + 4}")


@pytest.mark.parametrize(("chip", "verdict"), [("v4", FAILS), ("v5e", REPAIRED), ("v5p", REPAIRED), ("v6e", FITS)])
def test_the_same_kernel_has_its_verdict_on_each_chip(chip, verdict):
    """32 MiB of windows: too much for v4, above the default limit on v5e and v5p, at the default limit on v6e."""
    (row,) = checked(targets.large, topology=chip, policy=Policy(remedies=("limit",))).rows
    assert row.verdict == verdict
    if verdict != FAILS:
        assert row.measured
        assert row.need_bytes <= row.limit_bytes <= 1.1 * row.need_bytes or verdict == FITS


@pytest.mark.compat
def test_what_does_not_fit_says_why_and_keeps_the_compilers_error():
    """The verdict has the guard's reason; the exception is the compiler's own."""
    result = checked(targets.large, topology="v4", policy=Policy(remedies=("limit",)))
    (row,) = result.rows
    assert row.verdict == FAILS
    assert not result.fits
    assert isinstance(result.error, jax.errors.JaxRuntimeError)
    assert row.need_bytes > row.capacity_bytes
    assert "16.00 MiB" in row.reason
    assert result.exit_code() == 1


def test_is_a_report_of_the_compiled_program():
    """Like what `inspect` gives: kernels with what they used and the limit after repair; also where it failed."""
    fitted = checked(targets.large, topology="v5e", policy=Policy(remedies=("limit",)))
    failed = checked(targets.large, topology="v4", policy=Policy(remedies=("limit",)))
    assert isinstance(fitted, Report)
    assert fitted.kernels[0].used_bytes == fitted.rows[0].need_bytes
    assert fitted.kernels[0].limit_bytes == fitted.rows[0].limit_bytes > 16 * MiB
    assert (failed.fits, failed.kernels[0].used_bytes) == (False, None)


def test_a_repaired_kernel_shows_the_blocks_it_was_compiled_with():
    """One buffer instead of two: half the windows, and the buffers say so."""
    (row,) = checked(targets.large, topology="v5p", policy=Policy(remedies=("buffering",))).rows
    assert row.verdict == REPAIRED
    assert {item.buffers for item in row.items} == {1}
    assert row.windows_bytes == row.need_bytes == 16 * MiB


def test_declared_choices_and_fallbacks_count():
    """The next choice is taken where the first does not fit; a fallback needs no VMEM and is told as such."""
    tunable = vmem_guard.tunable(targets.scale, rows=[2048, 256])
    (row,) = check(lambda x: tunable(x), targets.array(4096), topology="v4").rows
    assert (row.verdict, row.need_bytes) == (REPAIRED, 4 * MiB)
    otherwise = vmem_guard.fallback(lambda x: targets.scale(x, 2048), lambda x: x * 2)
    result = check(lambda x: otherwise(x), targets.array(4096), topology="v4", policy=Policy(remedies=("limit",)))
    (row,) = result.rows
    assert (row.verdict, row.need_bytes) == (REPAIRED, 0)
    assert "fallback runs in its place" in row.reason
    assert result.exit_code(max_share=0.5) == 0


def test_mode_off_judges_the_program_as_it_is():
    """Without repairs the same kernel does not fit v5e."""
    (row,) = checked(targets.large, topology="v5e", policy=Policy(mode="off")).rows
    assert row.verdict == FAILS


def test_agrees_with_compiling_by_hand():
    """Need and verdict are what the compiler says to somebody who compiles for the topology himself."""
    from jax_vmem_guard.used_vmem import used_scoped_vmem

    for chip in CHIPS:
        device = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]
        placed = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
        compiled = jax.jit(lambda x: targets.scale(x, 512)).lower(placed).compile()
        (instruction,) = (row for row in used_scoped_vmem(compiled) if row.is_kernel)
        (row,) = check(targets.scale, targets.array(1024), 512, topology=chip.name).rows
        assert (row.need_bytes, row.verdict) == (instruction.used_bytes, FITS)


@pytest.mark.compat
def test_get_tpu_info_describes_the_chip_it_is_compiled_for():
    """A kernel that asks the chip gets another answer on another chip, also in one process and for one function."""
    fun, args = targets.asks_the_chip()
    jitted = jax.jit(fun)
    windows = {chip: check(jitted, *args, topology=chip).rows[0].windows_bytes for chip in ("v5e", "v5p", "v4")}
    assert windows["v5e"] == 2 * windows["v5p"] == 8 * windows["v4"]


def test_kernels_that_choose_by_the_kind_of_device_are_told_the_chip():
    """`ragged_paged_attention` has no blocks for a CPU; it finds those of the chip."""
    (row,) = checked(targets.chooses_by_device_kind, topology="v5e").rows
    assert (row.kernel, row.verdict) == ("ragged_paged_attention_kernel", FITS)


@pytest.mark.compat
def test_a_kernel_written_for_interpret_mode_is_compiled_for_real():
    """`interpret=True` says where it runs, not whether it fits."""
    (row,) = checked(targets.interpreted, topology="v5e").rows
    assert (row.kernel, row.verdict, row.measured) == ("scale", FITS, True)


def test_a_program_without_kernels_is_compiled_too():
    """It gets a row that says so."""
    result = check(lambda x: jnp.sin(x) @ x.T, targets.array(64), topology="v5e")
    assert [(row.kernel, row.verdict) for row in result.rows] == [("(no TPU kernel)", FITS)]


def test_takes_real_arrays_and_static_values():
    """Arrays stand for their shapes; what is no array reaches the function as it is."""
    seen = []

    def fun(tree, flag, *, rows):
        seen.append((flag, rows))
        return targets.scale(tree["x"], rows)

    result = check(fun, {"x": jnp.ones((64, 1024))}, "flag", rows=16, topology="v5e")
    assert seen == [("flag", 16)]
    assert result.fits


def test_keeps_the_options_of_a_jitted_function():
    """Static arguments of `jax.jit` stay static."""
    jitted = jax.jit(targets.scale, static_argnums=1, donate_argnums=0)
    assert check(jitted, targets.array(64), 16, topology="v5e").fits


@pytest.mark.parametrize("wrap", ["nnx", "equinox"])
def test_takes_functions_jitted_by_libraries(wrap):
    """`nnx.jit` and `eqx.filter_jit` are functions to check like any other."""
    if wrap == "nnx":
        nnx = pytest.importorskip("flax.nnx", reason="needs Flax: pip install flax")
        jitted = nnx.jit(lambda x: targets.scale(x, 16))
    else:
        jitted = pytest.importorskip("equinox", reason="needs Equinox: pip install equinox").filter_jit(
            lambda x: targets.scale(x, 16))
    (row,) = check(jitted, jnp.ones((64, 1024)), topology="v5e").rows
    assert (row.kernel, row.verdict) == ("scale", FITS)


@pytest.mark.compat
def test_the_compilation_cache_is_left_alone(tmp_path):
    """A warm cache must not answer for the compiler, and a check leaves nothing in it."""
    program = ("import check_targets as targets, jax, os, warnings\n"
               "warnings.simplefilter('error')\n"
               "from jax_vmem_guard import check\n"
               "assert check(targets.scale, targets.array(64), 16, topology='v5e').fits\n"
               "assert not os.path.exists(jax.config.jax_compilation_cache_dir) or "
               "not os.listdir(jax.config.jax_compilation_cache_dir)\n"
               "jax.jit(lambda x: x + 1)(1.0)\n"  # what runs here is cached as ever
               "print(len(os.listdir(jax.config.jax_compilation_cache_dir)) > 0)\n")
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((here, str(Path(here).parent))),
             "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
             "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"})
    assert done.stdout.strip() == "True", done.stderr[-2000:]


def test_leaves_jax_as_it_was():
    """Afterwards the function runs here as if it had not been checked, and nothing is installed."""
    was = hook.seams_active()

    @jax.jit
    def fun(x):
        return targets.interpreted()[0](x)

    assert check(fun, targets.array(64), topology="v5e").fits
    assert float(fun(jnp.ones((64, 1024)))[0, 0]) == 2
    assert hook.seams_active() == was
    assert not hook.lowering_detours


def test_errors_of_the_function_are_the_functions():
    """What the function raises while it is traced reaches the caller."""
    with pytest.raises(ZeroDivisionError, match="own fault"):
        checked(targets.breaks, topology="v5e")


@pytest.mark.parametrize(("topology", "words"), [("v9", "v5e, v5p"), ("v5e:9x9x9x9", "v5e:2x2")])
def test_an_unknown_topology_is_named_with_ones_that_work(topology, words):
    with pytest.raises(ValueError, match=words):
        checked(targets.small, topology=topology)


@pytest.mark.compat
def test_a_mesh_without_devices_is_laid_over_the_chips():
    """Arguments placed on an `AbstractMesh` are placed on the topology."""
    assert checked(targets.sharded_abstractly, topology="v5e:2x2").fits


def test_too_few_chips_is_said_so():
    """A mesh of four does not go on one chip: an error that names the number."""
    with pytest.raises(ValueError, match="has 4 devices, but topology `v6e:1x1` has 1 chips"):
        checked(targets.sharded_abstractly, topology="v6e:1x1")


def test_prints_and_serialises():
    """The result reads as a table, as JSON and as a page."""
    import json

    result = checked(targets.large, topology="v5e", policy=Policy(remedies=("limit",)))
    assert "fits after repair" in str(result)
    assert json.loads(result.to_json())["rows"][0]["verdict"] == REPAIRED
    assert "vmem_limit_bytes" in result.to_html()
