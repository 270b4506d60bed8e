"""The documentation says what is so: its code runs, its commands exist, and it builds without a warning."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jax_vmem_guard import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)

#: Blocks in these languages are code of ours: each is run, parsed or loaded below. `text` and `json` are for reading.
CHECKED = ("python", "sh", "yaml")
OTHERS = ("text", "json", "console")


def blocks(page, language):
    """(line, code) of each block of a page in one language."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(2)) + 1, match.group(2)) for match in _BLOCK.finditer(text)
            if match.group(1) == language]


def pages_with(language):
    return [pytest.param(page, id=page.name) for page in PAGES if blocks(page, language)]


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs(page, tmp_path):
    """The blocks of a page, one after the other as a reader would type them, in a fresh process."""
    program = "import os\nos.environ.update(JAX_PLATFORMS='cpu', XLA_FLAGS='--xla_force_host_platform_device_count=4')\n"
    for line, code in blocks(page, "python"):
        # Padded with empty lines, so that a traceback names the line of the page.
        program += f"exec(compile({chr(10) * (line - 1) + code!r}, {page.name!r}, 'exec'))\n"
    script = tmp_path / "page.py"
    script.write_text(program, encoding="utf-8")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]


def commands():
    """Every `jax-vmem-guard ...` in a shell block, without its environment, pipes and redirections."""
    for page in PAGES:
        for line, code in blocks(page, "sh") + blocks(page, "yaml"):
            for text in code.replace("\\\n", " ").replace("\n          --", " --").replace(">\n", " ").splitlines():
                found = re.search(r"(?:^|[|\s])jax-vmem-guard (.*?)(?:\|\||&&|\||$)", text)
                if found:
                    yield pytest.param(shlex.split(found.group(1), comments=True), id=f"{page.name}:{line}")


@pytest.mark.parametrize("arguments", list(commands()))
def test_commands_exist(arguments):
    """The command line takes what the pages say."""
    assert cli._parser().parse_args(arguments).command == arguments[0]


def test_every_option_is_on_the_page_of_the_command_line(capsys):
    """Options of `check` and `rehearse` that nobody can read about do not exist for users."""
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in ("check", "rehearse"):
        with pytest.raises(SystemExit):
            cli._parser().parse_args([command, "--help"])
        options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
        assert {option for option in options if option not in page} == set()


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_yaml_loads(page):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install pyyaml")
    for _, code in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(code), dict)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page):
    """A block without a language would be checked by nobody."""
    opening = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("```")][::2]
    assert {line[3:].split()[0] if line[3:].split() else "" for line in opening} <= {*CHECKED, *OTHERS}


def test_the_site_builds_in_strict_mode(tmp_path):
    """No dead link, no page that is not there."""
    pytest.importorskip("mkdocs", reason="needs MkDocs: pip install mkdocs mkdocs-material")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
                          cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "error_e1001.html").is_file()


def test_every_page_is_in_the_navigation():
    """A page outside of it is found by nobody."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in navigation] == []
