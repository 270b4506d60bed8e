"""What the compiler reported for one block size corrects the expectation at others."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from kernels_on_chips import array, lower

from jax_vmem_guard.chips import chip_named
from jax_vmem_guard.footprint import footprint
from jax_vmem_guard.kernels import read_kernels
from jax_vmem_guard.learned import Learned, Observation, code_identity

CHIP = chip_named("v5e")
X = array(4096, 1024, dtype=jnp.bfloat16)


def softmax(x, block, scale=1.0):
    def body(x_ref, o_ref):
        v = x_ref[...].astype(jnp.float32) * scale
        e = jnp.exp(v - v.max(-1, keepdims=True))
        o_ref[...] = (e / e.sum(-1, keepdims=True)).astype(x_ref.dtype)

    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(body, grid=(x.shape[0] // block,), in_specs=[spec], out_specs=spec,
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="softmax")(x)


@functools.cache
def kernel(block):
    (read,) = read_kernels(lower(functools.partial(softmax, block=block), X).module)
    return read


def test_the_same_code_at_another_block_size_has_the_same_identity():
    assert code_identity(kernel(256)) == code_identity(kernel(512))
    (other,) = read_kernels(lower(x_twice, X).module)
    assert code_identity(other) != code_identity(kernel(256))


def x_twice(x):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + x_ref[...]
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="softmax")(x)


def test_what_was_seen_of_this_kernel_is_the_expectation():
    learned = Learned()
    used = footprint(kernel(256), CHIP).expected_bytes + (1 << 20)
    learned.observe(kernel(256), CHIP, used)
    assert learned.footprint(kernel(256), CHIP).expected_bytes == used


def test_what_was_seen_at_one_size_corrects_another_by_the_same_factor():
    learned = Learned()
    small, large = footprint(kernel(256), CHIP), footprint(kernel(512), CHIP)
    learned.observe(kernel(256), CHIP, small.expected_bytes + small.spill_bytes)  # twice the spill slots
    corrected = learned.footprint(kernel(512), CHIP)
    assert corrected.spill_bytes == 2 * large.spill_bytes
    assert corrected.certain_bytes == large.certain_bytes
    assert corrected.at_most_bytes >= corrected.expected_bytes


def test_a_near_enough_expectation_stands():
    learned = Learned()
    learned.observe(kernel(256), CHIP, int(footprint(kernel(256), CHIP).expected_bytes * 0.98))
    assert learned.footprint(kernel(512), CHIP) == footprint(kernel(512), CHIP)


def test_another_chip_is_another_matter():
    learned = Learned()
    learned.observe(kernel(256), CHIP, footprint(kernel(256), CHIP).expected_bytes * 2)
    v6e = chip_named("v6e")
    assert learned.footprint(kernel(512), v6e) == footprint(kernel(512), v6e)


def test_less_than_the_buffers_says_nothing_of_the_body():
    learned = Learned()
    assert learned.observe(kernel(256), CHIP, footprint(kernel(256), CHIP).window_bytes - 1) is None
    assert learned.observations() == ()


def test_observations_can_be_written_and_loaded_again():
    learned, again = Learned(), Learned()
    learned.observe(kernel(256), CHIP, footprint(kernel(256), CHIP).expected_bytes * 2)
    again.load(Observation(**o.to_dict()) for o in learned.observations())
    assert again.footprint(kernel(512), CHIP) == learned.footprint(kernel(512), CHIP)
    again.clear()
    assert again.observations() == ()
