"""A page of HTML about the checkpoints of a directory, which sorts, filters and draws without a network.

The page is ``report.html`` beside this module; it reads the document that ``list --json`` prints.
"""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files

from ckpttool.core.result import dumps
from ckpttool.core.text import printable
from ckpttool.runs.listing import Listing


def report_page(title: str, subtitle: str, listing: Listing) -> bytes:
    """Return the page: the facts, the curves of all runs in one panel, and sortable tables.

    Args:
        title: What was looked at.
        subtitle: When and how.
        listing: With what a policy would keep, if one was given.
    """
    document = listing.document()
    document["problems"] = [{"path": one.path, "problem": one.message} for one in listing.problems]
    parts = {
        "title": escape(printable(title)),
        "subtitle": escape(printable(subtitle)),
        "data": _script_json(document),
        "best": _script_json(listing.best),
    }
    page = files("ckpttool.cli.render").joinpath("report.html").read_text("utf-8")
    return re.sub("@@([a-z]+)@@", lambda match: parts[match[1]], page).encode()


def _script_json(value: object) -> str:
    """Return JSON for a script of HTML: no name of a file can end the script."""
    return dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
