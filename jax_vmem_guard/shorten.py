"""Takes out of texts what says where files are on the machine they come from."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path, PurePosixPath

# What follows a letter, a closing bracket or another slash is part of a name ("jit(f)/while/body/add", "https://..."),
# and what follows "+" of base64.
_POSIX = re.compile(r"(?:(?<=file://)|(?<![\w.)\]}>/*+-]))/(?:[^\s/\"'`:;,()\[\]{}<>=|]+/)+[^\s/\"'`:;,()\[\]{}<>=|]*")
_QUOTED_POSIX = re.compile(r'(?<=")/[^"\n]*/[^"/\n]*(?=")')  # may have spaces and any other letter in it
_WINDOWS = re.compile(r"(?<!\w)[A-Za-z]:\\(?:[^\s\"'`:;,()\[\]{}<>=|\\]+\\)*[^\s\"'`:;,()\[\]{}<>=|\\]*")
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\](.*)")


def shorten_path(path: str, project: Path | None = None) -> str:
    """What may be known of an absolute path.

    A file of the project stays, from the project's folder on; one of an installed package from `site-packages` on; one
    of Python's own library from there on; of any other only the last part stays.
    """
    if packages := _PACKAGES.match(path):
        return f"site-packages/{packages[1]}"
    for root, prefix in ((sysconfig.get_paths()["stdlib"], "python"), (str(project) if project else "", "")):
        if len(PurePosixPath(root).parts) > 1 and path.startswith(root + "/"):
            return str(PurePosixPath(prefix) / path[len(root) + 1:])
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def shorten_paths(text: str, project: Path | None = None) -> str:
    """`text` with every absolute path in it shortened."""
    for pattern in (_QUOTED_POSIX, _POSIX, _WINDOWS):
        text = pattern.sub(lambda found: shorten_path(found[0], project), text)
    return text


def has_path(text: str) -> bool:
    """Whether an absolute path stands in `text`."""
    return any(pattern.search(text) for pattern in (_QUOTED_POSIX, _POSIX, _WINDOWS))
