"""``ckpttool init``: a configuration to start from."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from ckpttool.cli.options import quiet_option
from ckpttool.cli.output import say_warning
from ckpttool.core.errors import CheckpointError, NotFound, UsageError, from_os_error
from ckpttool.core.options import argument
from ckpttool.core.text import printable
from ckpttool.storage import fs
from ckpttool.storage.held import open_file

_MODE = 0o644
"""Others may not write to a configuration, or it is not trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitCommand:
    """The options of ``init``."""

    directory: str = argument("[DIR]", "Directory of the project. [default: .]", default=os.curdir)
    quiet: bool = quiet_option()


def init(command: InitCommand) -> int:
    """Write a ckpttool.toml in which every key is commented out, with its default or an example."""
    from ckpttool.cli.config import NAME, find_config, read_document
    from ckpttool.cli.config_tables import config_template
    from ckpttool.cli.config_trust import confirm_trust

    directory, quiet = command.directory, command.quiet
    other = find_config(directory)
    path = os.path.normpath(os.path.join(directory, NAME))
    if other is not None and os.path.dirname(other) == os.path.dirname(path):
        hint = "edit it" if other == path else f"it would be ignored beside a {NAME}"
        raise UsageError(f"{other}: there is a configuration ({hint})")
    if not os.path.isdir(directory):
        raise NotFound(directory, "no such directory")
    _create(path, config_template())
    try:
        confirm_trust(path, read_document(path).tables)
    except (CheckpointError, UsageError) as failure:
        say_warning(f"{failure}, so {printable(path)} is not trusted")
    if other is not None and not quiet:
        say_warning(f"{other} no longer applies in {printable(directory)}: the nearest configuration counts")
    if not quiet:
        print(f"wrote {printable(path)}; edit it, and run `ckpttool config` to see what is in force")
    return 0


def _create(path: str, text: str) -> None:
    """Write a file that must not exist; nothing of it stays if that fails."""
    try:
        descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    except OSError as failure:
        raise from_os_error(failure, path) from failure
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as failure:
        with suppress(OSError):
            fs.unlink(path)
        raise from_os_error(failure, path) from failure
