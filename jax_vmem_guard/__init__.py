"""Compile-time middleware for JAX on TPU: programs whose Pallas kernels run out of scoped VMEM compile anyway."""

from jax_vmem_guard._version import __version__

__all__ = ["__version__"]
