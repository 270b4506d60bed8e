"""What the guard costs where it has nothing to repair: per call, and per compile of programs that fit.

    python benchmarks/overhead.py

Each row compares the two sides in turns in this one run; a ratio of 1.00 is no cost.
"""

import statistics
import timeit

import chips_without_tpu as bench  # isort: skip

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from rich.console import Console
from rich.table import Table

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import ahead

ROUNDS = 15
CALLS = 20_000


def call_times():
    def add_one(x):
        return x + 1

    x = jnp.float32(1)
    plain, guarded = jax.jit(add_one), vmem_guard.jit(add_one)
    vmem_guard.uninstall()
    for one in (plain, guarded):
        one(x).block_until_ready()
    times = {"jax.jit": [], "jax.jit, installed": [], "vmem_guard.jit": []}
    for _ in range(ROUNDS):
        times["jax.jit"].append(timeit.timeit(lambda: plain(x), number=CALLS))
        vmem_guard.install()
        times["jax.jit, installed"].append(timeit.timeit(lambda: plain(x), number=CALLS))
        times["vmem_guard.jit"].append(timeit.timeit(lambda: guarded(x), number=CALLS))
        vmem_guard.uninstall()
    return {name: min(values) / CALLS * 1e6 for name, values in times.items()}


def program(kernels, rows, kinds):
    """A program of so many kernels that all fit, of so many kinds."""
    def one(x, n):
        def kernel(x_ref, o_ref):
            x = x_ref[...]
            o_ref[...] = jax.nn.softmax(x * (n % kinds + 1.5), axis=-1)

        block = pl.BlockSpec((64, 1024), lambda i: (i, 0))
        return pl.pallas_call(kernel, grid=(rows // 64,), in_specs=[block], out_specs=block,
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def fun(x):
        for n in range(kernels):
            x = one(x, n)
        return x

    return fun


def compile_times(kernels, rows, kinds, rounds):
    """Median seconds of a compile, and median seconds the guard itself takes of it."""
    own, whole = [], []
    original = ahead.outlook

    def timed(*arguments):
        took, answer = bench.seconds(lambda: original(*arguments))
        own.append(took)
        return answer

    ahead.outlook = timed
    try:
        vmem_guard.install()
        for n in range(rounds):
            jax.clear_caches()
            # Another shape each round: kernels that this process has read before would cost nothing.
            fun = program(kernels, rows + 64 * n, kinds)
            lowered = bench.lower(jax.jit(fun), [((rows + 64 * n, 1024), "float32")], "v5e")
            whole.append(bench.seconds(lowered.compile)[0])
    finally:
        ahead.outlook = original
        vmem_guard.uninstall()
    return statistics.median(whole), statistics.median(own)


def main():
    console = Console()
    calls = call_times()
    table = Table("call of", "us", "ratio", title="a call of a compiled function")
    for name, microseconds in calls.items():
        table.add_row(name, f"{microseconds:.2f}", f"{microseconds / calls['jax.jit']:.2f}")
    console.print(table)
    table = Table("kernels", "kinds", "arrays", "compile, s", "guard, ms", "share",
                  title="a compile of a program that fits (v5e)")
    for rows, size in ((512, "small"), (16384, "large")):
        for kernels, kinds, rounds in ((1, 1, 5), (10, 3, 3), (100, 3, 2), (100, 100, 1)):
            whole, own = compile_times(kernels, rows, kinds, rounds)
            table.add_row(str(kernels), str(kinds), size, f"{whole:.2f}", f"{own * 1e3:.1f}", f"{own / whole:.2%}")
    console.print(table)


if __name__ == "__main__":
    main()
