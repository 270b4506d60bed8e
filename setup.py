"""Puts `jax_vmem_guard.pth` beside the package, so that the environment variable works from the first import of JAX on.

Everything else is in setup.cfg, which has no word for a file at the root of site-packages.
"""

import os

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = "jax_vmem_guard.pth"


class BuildWithPth(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            self.copy_file(PTH, os.path.join(self.build_lib, PTH))

    def get_outputs(self, include_bytecode=True):
        return [*super().get_outputs(include_bytecode), os.path.join(self.build_lib, PTH)]


setup(cmdclass={"build_py": BuildWithPth})
