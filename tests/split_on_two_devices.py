"""Run as a script by test_splitting_programs: a kernel under shard_map over two CPU devices, split."""

import conftest  # noqa: F401  (before JAX starts)
import jax
import numpy as np
from library_kernels import matmul
from split_support import Split, apply_splits, find_pallas_calls, integers, same, traced

mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("d",))
rows, whole = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
sharded = jax.shard_map(lambda x, y: matmul(x, y, (16, 64, 32)), mesh=mesh, in_specs=(rows, whole), out_specs=rows,
                        check_vma=False)
x, y = integers(0, 64, 64), integers(1, 64, 64)
program = traced(sharded, x, y)
(site,) = find_pallas_calls(program)
assert site.grid == (2, 2, 1)
changed = apply_splits(program, {site.path: Split(axes=((0, 2), (1, 4)))})
assert find_pallas_calls(changed)[0].grid == (4, 8, 1)
assert same(program, changed, x, y)
print("same on", len(mesh.devices), "devices")
