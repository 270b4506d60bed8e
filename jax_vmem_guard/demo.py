"""`jax-vmem-guard demo`: JAX's own attention kernels, too large for their limit, before and after. Needs no TPU."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax_vmem_guard.chips import CHIPS, MiB, chip_named


@dataclass(frozen=True)
class Case:
    """A program that dies with E1001: `build()` gives the function and its (shape, dtype) arguments."""

    name: str
    build: Callable[[], tuple[Callable[..., Any], list[tuple[tuple[int, ...], str]]]]


#: Sequence length and head size: float32 heads of 256 need more than the default limit on every chip.
LENGTH, HEAD = 4096, 256


def flash_attention() -> tuple[Callable[..., Any], list[tuple[tuple[int, ...], str]]]:
    """JAX's `flash_attention` with blocks of 2048."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    block = 2048
    sizes = flash.BlockSizes(block_q=block, block_k_major=block, block_k=block, block_b=1)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return flash.flash_attention(q, k, v, causal=True, block_sizes=sizes)

    return attend, [((1, 2, LENGTH, HEAD), "float32")] * 3


def _splash() -> Callable[..., Any]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask

    block = 2048
    sizes = kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block)
    causal = mask.MultiHeadMask([mask.CausalMask((LENGTH, LENGTH))] * 2)
    return kernel.make_splash_mha(causal, block_sizes=sizes, head_shards=1, q_seq_shards=1)


def splash_attention() -> tuple[Callable[..., Any], list[tuple[tuple[int, ...], str]]]:
    """JAX's `splash_attention`, forward, with blocks of 2048."""
    return _splash(), [((2, LENGTH, HEAD), "float32")] * 3


def splash_attention_gradient() -> tuple[Callable[..., Any], list[tuple[tuple[int, ...], str]]]:
    """JAX's `splash_attention`, forward and backward, with blocks of 2048."""
    import jax

    attend = _splash()

    def loss(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v).astype("float32").sum()

    return jax.grad(loss, argnums=(0, 1, 2)), [((2, LENGTH, HEAD), "float32")] * 3


def ragged_paged_attention() -> tuple[Callable[..., Any], list[tuple[tuple[int, ...], str]]]:
    """JAX's `ragged_paged_attention` with its default arguments."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as attention

    return attention, [((128, 32, 128), "bfloat16"), ((256, 128, 16, 128), "bfloat16"), ((8,), "int32"),
                       ((8, 32), "int32"), ((9,), "int32"), ((1,), "int32")]


CASES = (Case("flash_attention", flash_attention), Case("splash_attention", splash_attention),
         Case("splash_attention gradient", splash_attention_gradient),
         Case("ragged_paged_attention", ragged_paged_attention))


def lowered_for(topology: str, build: Callable[[], tuple[Any, list[tuple[tuple[int, ...], str]]]],
                jit: Callable[..., Any]) -> Any:
    """A case lowered by `jit` for the first device of a topology that need not be here."""
    import jax
    from jax.experimental import topologies

    from jax_vmem_guard import _jax

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    function, shapes = build()
    with _jax.answering_for_chip(device, as_devices=(device,)):
        return jit(function).lower(*(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes))


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("demo", help="JAX's own attention kernels, too large for a chip, before and after")
    parser.add_argument("--chip", default="v5e", metavar="CHIP",
                        help=f"chip to compile for: {', '.join(chip.name for chip in CHIPS)} (default v5e)")
    parser.add_argument("--quick", action="store_true", help="only the first kernel")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compile each case without and with the guard and print what changed; exit code 1 if one stays broken."""
    # The compiler runs without a TPU; these must be set before JAX starts it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    try:
        chip = chip_named(options.chip)
    except ValueError as error:
        print(f"jax-vmem-guard demo: {error}", file=sys.stderr)
        return 2
    try:
        import libtpu  # noqa: F401
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        print(f"jax-vmem-guard demo: {error.name} is not installed; pip install 'jax_vmem_guard[tpu,cli]'",
              file=sys.stderr)
        return 2
    # The table shows what the log lines say.
    logging.getLogger("jax_vmem_guard").setLevel(logging.ERROR)
    console = Console()
    table = Table("program", "without the guard", "kernel", "limit, MiB", "with the guard",
                  title=f"JAX's attention kernels on {chip.name}, compiled without a TPU")
    cases = CASES[:1] if options.quick else CASES
    broken = 0
    with console.status("") as status:
        for case in cases:
            status.update(f"{case.name}: compiling without the guard")
            before = _outcome(case, chip.topology, guarded=False)
            status.update(f"{case.name}: compiling with the guard")
            after = _outcome(case, chip.topology, guarded=True)
            broken += after.error is not None
            table.add_row(case.name, before.words, after.kernels, after.limits, after.words, end_section=True)
    console.print(table)
    return 1 if broken else 0


@dataclass(frozen=True)
class Outcome:
    """How one compile went, in words for the table."""

    error: BaseException | None
    words: str
    kernels: str = ""
    limits: str = ""


def _outcome(case: Case, topology: str, *, guarded: bool) -> Outcome:
    import jax

    import jax_vmem_guard as vmem_guard

    done = len(vmem_guard.repairs())
    try:
        lowered_for(topology, case.build, vmem_guard.jit if guarded else jax.jit).compile()
    except Exception as error:
        diagnosis = vmem_guard.diagnose(error)
        if diagnosis is None or diagnosis.size_bytes is None:
            return Outcome(error, f"{type(error).__name__}: {str(error).splitlines()[0][:60]}")
        bound = diagnosis.limit_bytes or diagnosis.capacity_bytes or 0
        return Outcome(error, f"fails: {diagnosis.size_bytes / MiB:.2f} of {bound / MiB:.2f} MiB")
    made = vmem_guard.repairs()[done:]
    if not made:
        return Outcome(None, "compiles")
    repair = made[0]
    return Outcome(None, f"compiles ({repair.compiles} compiles, {repair.probes} probes)",
                   "\n".join(change.kernel for change in repair.changes),
                   "\n".join(_numbers(change.before, change.after) for change in repair.changes))


def _numbers(before: str, after: str) -> str:
    """"limit 16.00 MiB (default)", "limit 24.12 MiB" -> "16.00 -> 24.12"; other changes as they are."""
    if before.startswith("limit ") and after.startswith("limit "):
        return f"{before.split()[1]} -> {after.split()[1]}"
    return f"{before} -> {after}"
