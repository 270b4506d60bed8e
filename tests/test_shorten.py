"""Paths of the machine are taken out of texts, and nothing else is."""

import sysconfig
from pathlib import Path

import pytest

from jax_vmem_guard.shorten import shorten_path, shorten_paths

PROJECT = Path("/home/ann/secret client/model")


@pytest.mark.parametrize("path, expected", [
    ("/home/ann/secret client/model/layers/attention.py", "layers/attention.py"),
    ("/opt/venv/lib/python3.11/site-packages/flax/nnx/module.py", "site-packages/flax/nnx/module.py"),
    ("/usr/lib/python3/dist-packages/jax/_src/api.py", "site-packages/jax/_src/api.py"),
    (f"{sysconfig.get_paths()['stdlib']}/runpy.py", "python/runpy.py"),
    ("/home/ann/other/tool.py", "tool.py"),
    (r"C:\Users\ann\tool.py", "tool.py"),
])
def test_a_path_keeps_what_is_not_the_machines(path, expected):
    """The project's files keep their place in it, packages theirs, others their name only."""
    assert shorten_path(path, PROJECT) == expected


@pytest.mark.parametrize("text, expected", [
    ('source_file="/home/ann/secret client/model/a b.py" source_line=3', 'source_file="a b.py" source_line=3'),
    ("see /home/ann/x/y.txt, and more", "see y.txt, and more"),
    ("--xla_dump_to=/tmp/ann/dump", "--xla_dump_to=dump"),
    ("file:///home/ann/x.html", "file://x.html"),
    ("PATH=/a/bin:/b/bin", "PATH=bin:bin"),
    (r"at C:\Users\ann\t.py", "at t.py"),
])
def test_paths_are_found_wherever_they_stand(text, expected):
    """Quoted ones with spaces, values of flags, URLs of files."""
    assert shorten_paths(text, PROJECT) == expected


@pytest.mark.parametrize("text", [
    'op_name="jit(step)/while/body/closed_call/dot_general"', "See https://openxla.org/xla/errors/error_1001 for more",
    "jit(f)/jit(main)/pallas_call", "3/4 of 1/2", '"body":"TUzv+/ab/cd/ef=="', "bf16[8,128]{1,0:T(8,128)(2,1)S(1)}",
])
def test_names_with_slashes_are_no_paths(text):
    """JAX's operation names, URLs, fractions and encoded kernels stay as they are."""
    assert shorten_paths(text, PROJECT) == text
