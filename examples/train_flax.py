"""A small transformer in Flax NNX, with JAX's own flash attention.

Sixteen sequences of 256 tokens at a time (`block_b`): the forward kernel needs 24 MiB of scoped VMEM, more than the 16 MiB
a v5e gives by default.

    JAX_VMEM_GUARD=fix python examples/train_flax.py            # on a TPU
    jax-vmem-guard rehearse --topology v5e:2x2 examples/train_flax.py   # on a laptop
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

VOCABULARY, WIDTH, LENGTH, HEADS, HEAD_DIM, BATCH = 64, 128, 256, 4, 128, 16
ATTENTION = HEADS * HEAD_DIM
BACK = 128
BLOCKS = BlockSizes(
    block_q=LENGTH, block_k_major=LENGTH, block_k=LENGTH, block_b=BATCH,
    block_q_major_dkv=BACK, block_k_major_dkv=BACK, block_k_dkv=BACK, block_q_dkv=BACK,
    block_k_major_dq=BACK, block_k_dq=BACK, block_q_dq=BACK)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * ATTENTION, rngs=rngs)
        self.out = nnx.Linear(ATTENTION, WIDTH, rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(*x.shape[:2], 3, HEADS, HEAD_DIM), (2, 3), (0, 2))
        attended = flash_attention(q, k, v, causal=True, sm_scale=HEAD_DIM**-0.5, block_sizes=BLOCKS)
        return self.out(jnp.moveaxis(attended, 1, 2).reshape(*x.shape[:2], ATTENTION))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(3)])
        self.attention = Attention(rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.logits = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + nnx.gelu(self.mlp(self.norms[1](x)))
        return self.logits(self.norms[2](x))


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_fn(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradient = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradient)
    return loss


def batches(key):
    """Sequences in which every token follows from the one before."""
    def following(token, _):
        return (5 * token + 3) % VOCABULARY, token

    start = jax.random.randint(key, (BATCH,), 0, VOCABULARY)
    return jax.lax.scan(following, start, length=LENGTH + 1)[1].T


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    model = Transformer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    tokens = batches(jax.random.key(1))
    for step in range(steps):
        loss = train_step(model, optimizer, tokens)
        print(f"step {step} loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
