"""A small transformer in Equinox, with JAX's splash attention.

Blocks of 2048 tokens: the forward kernel needs 25 MiB of scoped VMEM, more than the 16 MiB a v5e gives by default.

    JAX_VMEM_GUARD=fix python examples/train_equinox.py            # on a TPU
    jax-vmem-guard rehearse --topology v5e:2x2 examples/train_equinox.py   # on a laptop
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

VOCABULARY, LENGTH, HEADS, HEAD_DIM, BATCH = 64, 2048, 2, 128, 1
WIDTH = HEADS * HEAD_DIM
BACK = 256
BLOCKS = splash.BlockSizes(
    block_q=LENGTH, block_kv=LENGTH, block_kv_compute=LENGTH // 2, block_q_dkv=BACK, block_kv_dkv=BACK,
    block_kv_dkv_compute=BACK, block_q_dq=BACK, block_kv_dq=BACK)


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    mlp: eqx.nn.Linear
    logits: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.qkv = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=keys[1])
        self.out = eqx.nn.Linear(WIDTH, WIDTH, key=keys[2])
        self.mlp = eqx.nn.Linear(WIDTH, WIDTH, key=keys[3])
        self.logits = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[4])

    def __call__(self, tokens):
        attend = splash.make_splash_mha(masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))] * HEADS),
                                        block_sizes=BLOCKS, head_shards=1, q_seq_shards=1)
        x = jax.vmap(self.embed)(tokens)
        q, k, v = jnp.moveaxis(jax.vmap(self.qkv)(x).reshape(LENGTH, 3, HEADS, HEAD_DIM), (1, 2), (0, 1))
        attended = attend(q * HEAD_DIM**-0.5, k, v)  # [heads, length, head_dim]
        x = x + jax.vmap(self.out)(jnp.moveaxis(attended, 0, 1).reshape(x.shape))
        x = x + jax.nn.gelu(jax.vmap(self.mlp)(x))
        return jax.vmap(self.logits)(x)


@eqx.filter_value_and_grad
def loss_fn(model, tokens):
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


OPTIMIZER = optax.adam(3e-3)


@eqx.filter_jit
def train_step(model, state, tokens):
    loss, gradient = loss_fn(model, tokens)
    updates, state = OPTIMIZER.update(gradient, state)
    return eqx.apply_updates(model, updates), state, loss


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
    model = Transformer(jax.random.key(0))
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    tokens = batches(jax.random.key(1))
    for step in range(steps):
        model, state, loss = train_step(model, state, tokens)
        print(f"step {step} loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
