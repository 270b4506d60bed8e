"""Compiles, seconds and final limit until a program works: the guard, raising by hand, and libtpu's hidden adjuster.

    python benchmarks/time_to_working.py [--all]

`by hand` is what people do: raise the kernel's limit to what the message says plus 10 %, and again, until it compiles.
`adjuster` is the compile option `xla_tpu_enable_tpu_custom_call_scoped_vmem_adjustments`. Seconds are given as ratios
to one successful compile of the same program with the right limits, all in one run.
"""

import argparse
import functools

import chips_without_tpu as bench  # isort: skip

import jax
from rich.console import Console
from rich.table import Table

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import custom_call, demo
from jax_vmem_guard.chips import MiB, chip_named
from jax_vmem_guard.kernels import read_kernels
from jax_vmem_guard.probe import prober

ADJUSTER = {"xla_tpu_enable_tpu_custom_call_scoped_vmem_adjustments": "true"}


def rows_kernel(block):
    """An elementwise kernel whose windows alone exceed the limit: certain to fail."""
    from jax.experimental import pallas as pl

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    def fun(x, y):
        spec = pl.BlockSpec((block, 4096), lambda i: (i, 0))
        return pl.pallas_call(kernel, grid=(8192 // block,), in_specs=[spec, spec], out_specs=spec,
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)

    return fun, [((8192, 4096), "float32")] * 2


def with_limits(lowered, limits):
    """A compile of the lowered program with these limits, by ordinal of the kernel, in bytes."""
    from jax_vmem_guard import _jax

    def change(ordinal, config):
        if ordinal in limits:
            config["scoped_memory_configs"] = [{"memory_space": 1, "offset": 0, "size": limits[ordinal]}]
        return ordinal in limits

    computation = lowered._lowering
    program = _jax.Program(computation, type(computation).compile)
    return program.compile_changed(custom_call.edit(custom_call.label(program.module), change))


def by_hand(lowered, chip):
    """Raise the limit of the kernel that the message names to the size it states plus 10 %, until it compiles."""
    limits, compiles = {}, 0
    while True:
        compiles += 1
        try:
            with_limits(lowered, limits)
            return compiles, limits
        except jax.errors.JaxRuntimeError as error:
            diagnosis = vmem_guard.diagnose(error)
            [label] = custom_call.labels_in(diagnosis.label or "")[:1]
            ordinal = int(label[1:])
            wanted = min(int(diagnosis.size_bytes * 1.1), chip.capacity_bytes)
            if limits.get(ordinal) == wanted or compiles > 12:
                raise
            limits[ordinal] = wanted


def measure(name, build, chip_name, table):
    chip = chip_named(chip_name)
    fun, shapes = build()
    fresh = functools.partial(bench.lower, shapes=shapes, chip=chip_name)
    vmem_guard.uninstall()
    hand_seconds, (hand_compiles, hand_limits) = bench.seconds(lambda: by_hand(fresh(jax.jit(fun)), chip))
    jax.clear_caches()
    prober.clear()
    done = len(vmem_guard.repairs())
    lowered = fresh(vmem_guard.jit(fun))
    guard_seconds, _ = bench.seconds(lowered.compile)
    [repair] = vmem_guard.repairs()[done:]
    vmem_guard.uninstall()
    jax.clear_caches()
    plain = fresh(jax.jit(fun))
    by_fingerprint = {change.fingerprint: change.data["limit_bytes"] for change in repair.changes}
    right = {k.ordinal: by_fingerprint[k.fingerprint] for k in read_kernels(plain._lowering._hlo)
             if k.fingerprint in by_fingerprint}
    one, _ = bench.seconds(lambda: with_limits(plain, right))
    jax.clear_caches()
    adjuster_seconds, _ = bench.seconds(lambda: fresh(jax.jit(fun)).compile(compiler_options=ADJUSTER))
    table.add_row(f"{name} {chip_name}", f"{one:.1f}", f"{guard_seconds / one:.2f}x, {repair.compiles}+{repair.probes}",
                  f"{hand_seconds / one:.2f}x, {hand_compiles}", f"{adjuster_seconds / one:.2f}x, 1",
                  " ".join(f"{change.data['limit_bytes'] / MiB:.1f}" for change in repair.changes),
                  " ".join(f"{value / MiB:.1f}" for value in hand_limits.values()),
                  " ".join(f"{min(1.1 * c.need_bytes, chip.capacity_bytes) / MiB:.1f}" for c in repair.changes))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="the gradients too: some minutes more")
    options = parser.parse_args()
    table = Table("program", "one compile, s", "guard: time, compiles+probes", "by hand: time, compiles",
                  "adjuster: time, compiles", "limits MiB: guard", "by hand", "adjuster",
                  title="until it works; times as ratios to one successful compile")
    measure("add 256 (certain)", functools.partial(rows_kernel, 256), "v5e", table)
    measure("add 512 (certain)", functools.partial(rows_kernel, 512), "v6e", table)
    cases = {case.name: case for case in demo.CASES}
    names = ["flash_attention", "splash_attention", "ragged_paged_attention"]
    if options.all:
        names.append("splash_attention gradient")
    for name in names:
        for chip in ("v5e", "v6e"):
            measure(name, cases[name].build, chip, table)
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
