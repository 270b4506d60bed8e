"""`rehearse`: run here, compile for there."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import check_targets as targets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jax_vmem_guard import hook, rehearse_cli
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.rehearsal import rehearse
from jax_vmem_guard.rows import ABORTED, ERROR, FAILS, FITS, REPAIRED

HERE = Path(__file__).parent
LIMIT_ONLY = Policy(remedies=("limit",))


def verdicts(rehearsal):
    return [(row.kernel, row.verdict) for row in rehearsal.rows]


@pytest.mark.compat
def test_a_kernel_runs_here_and_is_compiled_for_there():
    """The result is the kernel's, and the row is the chip's."""
    with rehearse("v5e") as rehearsal:
        out = jax.jit(lambda x: targets.scale(x, 16))(jnp.ones((64, 1024)))
        np.testing.assert_array_equal(out, 2)
    assert verdicts(rehearsal) == [("scale", FITS)]
    assert rehearsal.exit_code() == 0


@pytest.mark.compat
def test_what_needs_repair_is_repaired_there_and_still_runs_here():
    """32 MiB of windows on v5e: the guard's repair is in the row; v4 has not enough."""
    x = jnp.ones((4096, 1024))
    with rehearse("v5e", policy=LIMIT_ONLY) as on_v5e:
        assert float(jax.jit(lambda x: targets.scale(x, 2048))(x)[-1, -1]) == 2
    with rehearse("v4", policy=LIMIT_ONLY) as on_v4:
        assert float(jax.jit(lambda x: targets.scale(x, 2048))(x)[-1, -1]) == 2
    assert verdicts(on_v5e) == [("scale", REPAIRED)]
    assert verdicts(on_v4) == [("scale", FAILS)]
    assert (on_v5e.exit_code(), on_v4.exit_code()) == (0, 1)


def test_zeros_gives_shapes_and_runs_no_kernel():
    """`outputs="zeros"`: the right shape and type, all zero, and the same row."""
    with rehearse("v5e", outputs="zeros") as rehearsal:
        out = jax.jit(lambda x: targets.scale(x, 16) + 1)(jnp.ones((64, 1024)))
        np.testing.assert_array_equal(out, 1)
        gradient = jax.jit(jax.vmap(lambda x: targets.scale(x, 16)))(jnp.ones((3, 64, 1024)))
        assert gradient.shape == (3, 64, 1024)
    assert verdicts(rehearsal) == [("scale", FITS)] * 2


@pytest.mark.compat
def test_functions_jitted_and_compiled_before_are_seen():
    """A function that was called before the rehearsal is rehearsed too, and is as before after it."""

    @jax.jit
    def fun(x):
        return targets.interpreted()[0](x) + targets.interpreted()[0](x)

    x = jnp.ones((64, 1024))
    before = fun(x)
    with rehearse("v5e") as rehearsal:
        np.testing.assert_array_equal(fun(x), before)
    assert verdicts(rehearsal) == [("scale", FITS)] * 2
    np.testing.assert_array_equal(fun(x), before)


@pytest.mark.compat
def test_afterwards_nothing_is_left():
    """Kernels do not run here any more, nothing knows a chip, and nothing is patched."""
    jitted = jax.jit(lambda x: targets.scale(x, 16))
    was = hook.seams_active()
    with rehearse("v5e"):
        jitted(jnp.ones((64, 1024)))
        assert pltpu.get_tpu_info().generation == 5
    with pytest.raises(ValueError, match="interpret"):
        jitted(jnp.ones((64, 1024)))
    with pytest.raises(ValueError, match="cpu"):
        pltpu.get_tpu_info()
    assert hook.seams_active() == was
    assert not hook.lowering_detours


@pytest.mark.compat
def test_compiler_options_are_for_there():
    """Options of `jax.jit` and of `compile` reach the topology's compiler; this machine's would refuse them."""
    x = jnp.ones((4096, 1024))
    options = {"xla_tpu_scoped_vmem_limit_kib": str(48 * 1024)}
    unchanged = Policy(mode="off")
    with rehearse("v5e", policy=unchanged, outputs="zeros") as rehearsal:
        jax.jit(lambda x: targets.scale(x, 2048))(x)
        jax.jit(lambda x: targets.scale(x, 2048), compiler_options=options)(x)
        jax.jit(lambda x: targets.scale(x, 2048)).lower(x).compile(options)(x)
    assert verdicts(rehearsal) == [("scale", FAILS), ("scale", FITS), ("scale", FITS)]


def test_lowering_alone_compiles_nothing():
    """A program that the script only lowers is not judged, nor one that it compiles after the rehearsal."""
    with rehearse("v5e") as rehearsal:
        lowered = jax.jit(lambda x: targets.scale(x, 16)).lower(jnp.ones((64, 1024)))
    assert float(lowered.compile()(jnp.ones((64, 1024)))[0, 0]) == 2
    assert rehearsal.rows == ()


@pytest.mark.compat
def test_programs_without_kernels_are_left_alone():
    """They are not compiled for the topology, and host callbacks of the others run here."""
    said = []

    @jax.jit
    def plain(x):
        jax.debug.callback(lambda v: said.append(float(v)), x[0])
        return x + 1

    @jax.jit
    def with_kernel(x):
        jax.debug.callback(lambda v: said.append(float(v)), x[0, 0], ordered=True)
        return targets.scale(x, 16)

    with rehearse("v5e") as rehearsal:
        plain(jnp.ones(4)).block_until_ready()
        with_kernel(jnp.ones((64, 1024))).block_until_ready()
        jax.effects_barrier()
    assert said == [1, 1]
    assert verdicts(rehearsal) == [("scale", FITS)]


def test_the_same_program_is_judged_once():
    """Eager calls lower a program each time; it gets one row."""
    with rehearse("v5e") as rehearsal:
        for _ in range(3):
            targets.scale(jnp.ones((64, 1024)), 16)
    assert verdicts(rehearsal) == [("scale", FITS)]


def test_what_the_tpu_cannot_lower_is_a_row_and_runs_here():
    """A kernel with a block the TPU does not take: the script goes on, the row says what the compiler's front said."""
    from jax.experimental import pallas as pl

    def bad(x):
        block = pl.BlockSpec((3, 5), lambda i: (i, 0))
        return pl.pallas_call(targets.scale_kernel, grid=(2,), in_specs=[block], out_specs=block,
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with rehearse("v5e") as rehearsal:
        jax.jit(bad)(jnp.ones((6, 10))).block_until_ready()
    (row,) = rehearsal.rows
    assert row.verdict == ERROR
    assert "block" in row.reason
    assert rehearsal.exit_code() == 2


def test_guarding_and_unguarding_inside_does_not_end_the_rehearsal():
    """A script that installs and uninstalls the guard itself is rehearsed all the same."""
    with rehearse("v5e") as rehearsal:
        hook.install()
        hook.uninstall()
        targets.scale(jnp.ones((64, 1024)), 16)
    assert verdicts(rehearsal) == [("scale", FITS)]


def test_kernels_that_choose_by_the_kind_of_device_are_told_the_chip():
    """JAX's ragged paged attention finds its blocks, while the script still sees this machine's devices."""
    fun, shapes = targets.chooses_by_device_kind()
    arguments = [jnp.ones(x.shape, x.dtype) for x in shapes]
    with rehearse("v5e", outputs="zeros") as rehearsal:
        assert fun(*arguments).shape == shapes[0].shape
        assert jax.devices()[0].platform == "cpu"
    assert verdicts(rehearsal) == [("ragged_paged_attention_kernel", FITS)]


def test_two_rehearsals_at_once_are_refused():
    with rehearse("v5e"), pytest.raises(RuntimeError, match="running already"), rehearse("v6e"):
        pass


def test_unknown_outputs_are_refused():
    with pytest.raises(ValueError, match="interpret, zeros"), rehearse("v5e", outputs="nothing"):
        pass


# ---- the command


def run_cli(*arguments):
    """The command's exit code."""
    parser = argparse.ArgumentParser()
    rehearse_cli.add_parser(parser.add_subparsers())
    options = parser.parse_args(["rehearse", *map(str, arguments)])
    return options.run(options)


@pytest.fixture
def script(tmp_path):
    """Writes a script that may use the targets of the tests."""

    def write(text):
        file = tmp_path / "script.py"
        file.write_text(f"import sys; sys.path.insert(0, {str(HERE)!r})\n" + text)
        return file

    return write


def test_a_script_nobody_adapted(tmp_path):
    """jit bound at import, AOT, nnx.jit, a scan of kernels, shard_map over four devices, an eager kernel: to the end."""
    rows_file = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from jax_vmem_guard import rehearse_cli; import argparse;"
         "p = argparse.ArgumentParser(); rehearse_cli.add_parser(p.add_subparsers());"
         "o = p.parse_args(sys.argv[1:]); sys.exit(o.run(o))",
         "rehearse", "--topology=v5e:2x2", "--devices=4", "--remedies=limit", f"--json={rows_file}",
         HERE / "unadapted_script.py", "256"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the last line" in done.stdout
    rows = json.loads(rows_file.read_text())["rows"]
    programs = {row["program"] for row in rows}
    assert {"forward", "<lambda>", "accumulate", "apply", "attend"} <= programs
    assert {row["verdict"] for row in rows} == {FITS}
    assert all("flash_attention" in row["kernel"] and row["measured"] for row in rows)


def test_argv_exit_code_and_output_are_the_scripts(script, capfd):
    """The script has its own arguments and ends with its own exit code, and what was judged until then is told."""
    file = script("import check_targets, jax.numpy as jnp\n"
                  "check_targets.scale(jnp.ones((64, 1024)), 16)\n"
                  "print('arguments', sys.argv[1:])\nsys.exit(7)\n")
    assert run_cli("--topology=v5e", file, "--steps", "3") == 7
    printed = capfd.readouterr()
    assert "arguments ['--steps', '3']" in printed.out
    assert "1 kernel on v5e:2x2: 1 fits." in printed.out
    assert "exited with code 7" in printed.err


def test_a_failing_kernel_gives_exit_code_1_and_a_page(script, tmp_path):
    """The script itself succeeds."""
    file = script("import check_targets, jax.numpy as jnp\ncheck_targets.scale(jnp.ones((4096, 1024)), 2048)\n")
    page = tmp_path / "page.html"
    assert run_cli("--topology=v4", "--remedies=limit", "--outputs=zeros", f"--html={page}", file) == 1
    assert "does not fit" in page.read_text()


def test_a_script_without_kernels_says_so(script, capfd):
    """Exit code 2, and why that may be."""
    assert run_cli("--topology=v5e", script("import jax.numpy as jnp\njnp.ones(3) + 1\n")) == 2
    assert "default_backend" in capfd.readouterr().out


def test_when_the_compiler_aborts_the_program_is_named(script, tmp_path):
    """The process dies with the compiler; what was judged before is kept, and the program it died of is told."""
    rows_file = tmp_path / "rows.json"
    file = script(
        "import check_targets, jax, jax.numpy as jnp\n"
        "x = jnp.ones((64, 1024))\n"
        "check_targets.scale(x, 16)\n"
        "def total(x): return jnp.cumsum(check_targets.scale(jnp.tile(x, (64, 1)), 16), axis=0)\n"
        "jax.jit(total).lower(x).compile({'xla_tpu_scoped_vmem_limit_kib': '1'})\n")
    assert run_cli("--topology=v5e", f"--json={rows_file}", file) == 2
    rows = json.loads(rows_file.read_text())["rows"]
    assert [(row["program"], row["verdict"]) for row in rows] == [("wrapped", FITS), ("total", ABORTED)]


def test_a_missing_script_is_refused(capsys):
    assert run_cli("--topology=v5e", "nothing.py") == 2
    assert "no script 'nothing.py'" in capsys.readouterr().err
