"""`python -m jax_vmem_guard`: the same as the console script `jax-vmem-guard`."""

import sys

from jax_vmem_guard.cli import main

sys.exit(main())
