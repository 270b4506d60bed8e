"""Programs that need a repair, compiled one after the other with a plan file; for test_plan_in_use.py.

usage: python remembered_programs.py PLAN_FILE

Prints one JSON object: program -> [compiles of the program, compiles of a kernel alone, [[remedy, data], ...]].
"""

import json
import logging
import sys

import conftest  # noqa: F401 - the environment in which libtpu compiles without a TPU
import jax
import jax.numpy as jnp
import kernels_on_chips as chips
import numpy as np
import public_cases as cases
import test_main_job as main_job
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_vmem_guard as vmem_guard
from jax_vmem_guard.testing import inject_oom


def sharded():
    """A kernel in a `shard_map` over four devices."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = Mesh(np.array(devices).reshape(4), ("x",))
    spec = PartitionSpec("x")
    fun = jax.shard_map(lambda x: main_job.add256(x, x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(fun).lower(jax.ShapeDtypeStruct((4 * 8192, 4096), "float32", sharding=NamedSharding(mesh, spec)))


def on(chip, fun, arguments, **options):
    return lambda: chips.lower_with(jax.jit(fun, **options), *arguments, chip=chip)


def three(x):
    return chips.add(x, chips.add(x * 2, chips.add(x * 3, x, block=64), block=512), block=256)


def fused_inputs(x):
    """A kernel that XLA may fuse with what makes its operand: it cannot be compiled alone."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    block = pl.BlockSpec((512, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(x.shape[0] // 512,), in_specs=[block], out_specs=block,
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                          compiler_params=pltpu.CompilerParams(allow_input_fusion=[True]))(x * 2)


def matmul(x, y):
    """No kernel: XLA's own code fails where the caller sets the limit of the compile too low."""
    return jnp.dot(x, y)


PROGRAMS = {fun.__name__: on("v5e", fun, [main_job.ARRAY]) for fun in (
    main_job.inside_scan, main_job.inside_while, main_job.inside_cond, main_job.inside_remat,
    main_job.inside_nested_jit, main_job.backward_of_custom_vjp, main_job.vmapped, three)}
PROGRAMS |= {
    "sharded": sharded,
    "transpose": on("v5e", *cases.transpose()),
    "rms_norm, split": on("v4", *cases.rms_norm(256)),
    "whole_copy": on("v5p", *cases.whole_copy()),
    "matmul_relu": on("v5e", *cases.matmul_relu()),
    "matmul_relu, buffers": on("v4", *cases.matmul_relu()),
    "fused_inputs": on("v5e", fused_inputs, [main_job.ARRAY]),
    "matmul": on("v5e", matmul, [chips.array(2048, 2048, dtype=jnp.bfloat16)] * 2,
                 compiler_options={"xla_tpu_scoped_vmem_limit_kib": "64"}),
}


def compile_all(plan_file: str) -> dict[str, list]:
    vmem_guard.install(vmem_guard.Policy(plan_file=plan_file))
    outcomes = {}
    for name, lower in PROGRAMS.items():
        before = len(vmem_guard.repairs())
        with inject_oom(program="*", times=0) as programs, inject_oom(program="*", times=0, probes=True) as compiles:
            lower().compile()
        changes = [[c.remedy, c.data] for repair in vmem_guard.repairs()[before:] for c in repair.changes]
        outcomes[name] = [programs.compiles, compiles.compiles - programs.compiles, changes]
    vmem_guard.uninstall()
    return json.loads(json.dumps(outcomes))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(compile_all(sys.argv[1])))
