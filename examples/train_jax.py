"""A small transformer in plain JAX and optax, with JAX's own flash attention.

The attention kernel takes sixteen sequences at a time (`block_b`): 24 MiB of scoped VMEM, where a v5e gives a kernel
16 MiB unless it asks for more. On a v5e this script ends with E1001 in its first step; under the guard it trains:

    JAX_VMEM_GUARD=fix python examples/train_jax.py            # on a TPU
    jax-vmem-guard rehearse --topology v5e:2x2 examples/train_jax.py   # on a laptop
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

VOCABULARY, WIDTH, LENGTH, HEADS, HEAD_DIM, BATCH = 64, 128, 256, 4, 128, 16
ATTENTION = HEADS * HEAD_DIM
BLOCKS = BlockSizes(
    block_q=LENGTH, block_k_major=LENGTH, block_k=LENGTH, block_b=BATCH,
    block_q_major_dkv=LENGTH, block_k_major_dkv=LENGTH, block_k_dkv=LENGTH, block_q_dkv=LENGTH,
    block_k_major_dq=LENGTH, block_k_dq=LENGTH, block_q_dq=LENGTH)


def init(key):
    keys = iter(jax.random.split(key, 5))

    def matrix(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    return {"embed": matrix(VOCABULARY, WIDTH), "qkv": matrix(WIDTH, 3 * ATTENTION), "out": matrix(ATTENTION, WIDTH),
            "mlp": matrix(WIDTH, WIDTH), "logits": matrix(WIDTH, VOCABULARY)}


def normalize(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def forward(params, tokens):
    x = params["embed"][tokens]
    qkv = (normalize(x) @ params["qkv"]).reshape(*tokens.shape, 3, HEADS, HEAD_DIM)
    q, k, v = jnp.moveaxis(qkv, (2, 3), (0, 2))  # each [batch, heads, length, head_dim]
    attended = flash_attention(q, k, v, causal=True, sm_scale=HEAD_DIM**-0.5, block_sizes=BLOCKS)
    x = x + jnp.moveaxis(attended, 1, 2).reshape(*tokens.shape, ATTENTION) @ params["out"]
    x = x + jax.nn.gelu(normalize(x) @ params["mlp"])
    return normalize(x) @ params["logits"]


def loss_fn(params, tokens):
    logits = forward(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


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
    optimizer = optax.adam(3e-3)

    @jax.jit
    def train_step(params, state, tokens):
        loss, gradient = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    params = init(jax.random.key(0))
    state = optimizer.init(params)
    tokens = batches(jax.random.key(1))
    for step in range(steps):
        params, state, loss = train_step(params, state, tokens)
        print(f"step {step} loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
