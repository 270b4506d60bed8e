"""Tells kernels that are refused for another reason than VMEM: Pallas cannot lower them, or Mosaic will not compile them."""

from __future__ import annotations

from jax_vmem_guard import _jax_trace


def refused_by_compiler(error: BaseException) -> bool:
    """Whether a compile failed because Mosaic, inside the TPU compiler, does not take a kernel (libtpu 0.0.30 to 0.0.52)."""
    return "Mosaic failed to compile TPU kernel" in str(error)


def refused_before_compile(error: BaseException) -> bool:
    """Whether tracing or lowering failed because a kernel asks for something Pallas or Mosaic does not have."""
    return isinstance(error, NotImplementedError) or _jax_trace.raised_by_kernel_lowering(error)


def first_line(error: BaseException) -> str:
    """The first line of an error, with its type."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
