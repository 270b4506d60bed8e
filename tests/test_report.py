"""`inspect`: a lowered or compiled program, or StableHLO, as a report."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import MiB, add, array, device

from jax_vmem_guard.report import inspect

X = array(16384, 2048)  # 128 MiB: XLA cannot place it in VMEM by itself


def lowered(fun, *arguments, chip="v5e"):
    sharding = jax.sharding.SingleDeviceSharding(device(chip))
    return jax.jit(fun).lower(*(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments))


def two_adds(x):
    return add(add(x, x, block=128, name="small"), x, block=512, name="large")


def test_a_lowered_program_shows_buffers_limits_and_the_chip():
    small, large = inspect(lowered(two_adds, X)).kernels
    assert (small.name, small.chip, small.window_bytes, small.used_bytes) == ("small", "v5e", 6 * MiB, None)
    assert (small.limit_bytes, small.own_limit, small.capacity_bytes) == (16 * MiB, False, 128 * MiB)
    assert (large.window_bytes, large.headroom_bytes) == (24 * MiB, -8 * MiB)
    assert [(w.role, w.position, w.buffers) for w in small.windows] == [
        ("input", 0, 2), ("input", 1, 2), ("output", 2, 2)]
    assert "kernels_on_chips.py:" in small.source


def test_a_kernel_that_cannot_fit_makes_the_report_say_so():
    report = inspect(lowered(two_adds, X))
    assert [k.fits for k in report.kernels] == [True, False]
    assert report.fits is False
    assert inspect(lowered(two_adds, X, chip="v6e")).fits is True


def test_a_compiled_program_shows_what_was_used_and_the_headroom():
    report = inspect(lowered(two_adds, X, chip="v6e").compile())
    assert {k.name: k.used_bytes for k in report.kernels} == {"small": 6 * MiB, "large": 24 * MiB}
    rows = {i.name.split(".")[0]: i for i in report.instructions}
    assert (rows["large"].limit_bytes, rows["large"].headroom_bytes) == (32 * MiB, 8 * MiB)
    assert report.fits is True


def test_the_windows_of_a_compiled_kernel_are_those_of_the_lowered_one():
    low = lowered(two_adds, X, chip="v6e")
    assert ({k.name: k.windows for k in inspect(low).kernels}
            == {k.name: k.windows for k in inspect(low.compile()).kernels})


def test_a_kernel_s_own_limit_is_the_one_in_force():
    def fun(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...]
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                              compiler_params=pltpu.CompilerParams(vmem_limit_bytes=20 * MiB))(x)

    low = lowered(fun, array(256, 128))
    for program in (low, low.compile()):
        (kernel,) = inspect(program).kernels
        assert (kernel.limit_bytes, kernel.own_limit) == (20 * MiB, True)


def test_stablehlo_needs_to_be_told_the_chip():
    text = lowered(add, array(256, 128), array(256, 128)).as_text()
    assert inspect(text, chip="v4").kernels[0].capacity_bytes == 16 * MiB
    assert inspect(text, topology="tpu7x:2x2x1").chip == "tpu7x"
    with pytest.raises(ValueError, match="chip="):
        inspect(text)


def test_a_flag_that_moves_the_default_limit_can_be_told():
    (kernel,) = inspect(lowered(add, X, X), default_limit_bytes=64 * MiB).kernels
    assert (kernel.limit_bytes, kernel.own_limit) == (64 * MiB, False)


def test_what_is_no_program_is_refused_with_what_to_do():
    with pytest.raises(TypeError, match="check"):
        inspect(lambda x: x, chip="v5e")


def test_the_report_prints_kernels_padding_and_advice():
    def fun(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="narrow")(x)

    text = str(inspect(lowered(fun, array(4, 1, 75))))
    assert "f32[4, 1, 75] padded to [4, 1, 128] x 1" in text
    assert "narrow at " in text
    assert "to shrink it: half the block of input 0" in text


def test_the_report_prints_the_same_cells_without_rich():
    code = (
        "import sys; sys.modules['rich.console'] = None\n"
        "from jax_vmem_guard.report import inspect\n"
        "print(inspect(sys.stdin.read(), chip='v5e'))\n")
    program = lowered(two_adds, X)
    plain = subprocess.run([sys.executable, "-c", code], input=program.as_text(), capture_output=True, text=True,
                           check=True).stdout
    assert "━" not in plain
    line = next(line for line in plain.splitlines() if line.startswith("large "))
    assert line.split()[1:3] == ["24.00", "0.00"]
    assert "24.00" in str(inspect(program))


def test_the_report_turns_into_json():
    data = json.loads(inspect(lowered(two_adds, X, chip="v6e").compile()).to_json())
    assert data["fits"] is True
    assert {k["name"]: k["used_bytes"] for k in data["kernels"]} == {"small": 6 * MiB, "large": 24 * MiB}
    assert all("headroom_bytes" in row for row in data["kernels"] + data["instructions"])


def test_a_program_without_kernels_says_so():
    assert "No TPU kernel" in str(inspect(lowered(lambda x: x + 1, array(8, 128, dtype=jnp.bfloat16))))
