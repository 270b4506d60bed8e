"""Programs that reach the compiler by other doors: other libraries' jit, `jax.export`, `pl.kernel`, several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernels_on_chips import MiB, add, array, device, lower_with, used_by_kernels

import jax_vmem_guard as vmem_guard

LARGE = array(8192, 4096)
add256 = functools.partial(add, block=256)


@pytest.fixture
def installed():
    done = len(vmem_guard.repairs())
    vmem_guard.install()
    yield lambda: vmem_guard.repairs()[done:]
    vmem_guard.uninstall()


def placed(chip="v5e"):
    return jax.ShapeDtypeStruct(LARGE.shape, LARGE.dtype, sharding=jax.sharding.SingleDeviceSharding(device(chip)))


def test_flax_nnx_jit_is_guarded(installed):
    from flax import nnx

    nnx.jit(lambda x: add256(x, x)).lower(placed()).compile()
    assert installed()[0].changes[0].need_bytes == 24 * MiB


def test_a_caller_of_an_exported_program_is_guarded(installed):
    exported = jax.export.export(jax.jit(lambda x: add256(x, x)), platforms=["tpu"])(LARGE)
    again = jax.export.deserialize(exported.serialize())
    lower_with(jax.jit(lambda x: again.call(x) + 1), LARGE).compile()
    [change] = installed()[0].changes
    assert change.remedy == "limit" and change.need_bytes == 24 * MiB


def test_pallas_kernels_written_with_pl_kernel_are_guarded(installed):
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=1)

    @functools.partial(pl.kernel, out_type=jax.ShapeDtypeStruct((4608, 1024), jnp.float32), mesh=mesh,
                       scratch_types=[pltpu.VMEM((4608, 1024), jnp.float32)])
    def double(x_hbm, o_hbm, scratch):
        pltpu.sync_copy(x_hbm, scratch)
        scratch[...] = scratch[...] * 2
        pltpu.sync_copy(scratch, o_hbm)

    compiled = lower_with(jax.jit(double), array(4608, 1024)).compile()
    [change] = installed()[0].changes
    assert change.remedy == "limit" and change.need_bytes >= 18 * MiB
    assert max(used_by_kernels(compiled)) >= 18 * MiB


def test_a_kernel_that_talks_to_other_devices_cannot_be_probed_and_takes_three_compiles(installed):
    """Each device hands its shard to the next: alone on one device the kernel means nothing."""
    mesh = Mesh(np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices).reshape(4), ("x",))

    def kernel(x_ref, o_ref, send, receive, scratch):
        scratch[...] = x_ref[...]
        to = jax.lax.rem(jax.lax.axis_index("x") + 1, 4)
        copy = pltpu.make_async_remote_copy(src_ref=scratch, dst_ref=o_ref, send_sem=send, recv_sem=receive,
                                            device_id=(to,), device_id_type=pl.DeviceIdType.MESH)
        copy.start()
        copy.wait()

    def shift(x):
        whole = pl.BlockSpec(memory_space=pltpu.VMEM)
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), in_specs=[whole], out_specs=whole,
                              scratch_shapes=[pltpu.SemaphoreType.DMA] * 2 + [pltpu.VMEM(x.shape, x.dtype)],
                              compiler_params=pltpu.CompilerParams(has_side_effects=True))(x)

    spec = PartitionSpec("x")
    sharded = jax.shard_map(shift, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    argument = jax.ShapeDtypeStruct((4 * 8192, 1024), jnp.float32, sharding=NamedSharding(mesh, spec))
    jax.jit(sharded).lower(argument).compile()
    [repair] = installed()
    [change] = repair.changes
    assert repair.compiles <= 3 and repair.probes == 0
    assert change.need_bytes <= change.data["limit_bytes"] <= 1.1 * change.need_bytes
