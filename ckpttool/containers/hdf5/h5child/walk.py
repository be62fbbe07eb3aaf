"""One pass over an HDF5 file: groups, datasets, attributes and links; no values but short texts."""

from __future__ import annotations

import time
from typing import Any

from .frames import reason, stay_alive, tell, text
from .library import READABLE, Library
from .sums import Sum

MAX_OBJECTS = 200_000
MAX_DEPTH = 64
MAX_ATTRIBUTE = 1 << 26  # bytes of one attribute; Keras splits its own at 64 KiB
MAX_ATTRIBUTES = 1 << 27  # bytes of all attributes of a file
MAX_ELEMENTS = 1 << 16  # of one attribute; more are described
ATTRIBUTE_COST = 256  # bytes that any attribute counts for
MAX_PATHS = 1 << 26  # characters of all paths; deep groups with long names would multiply
MAX_TEXTS = 1000
SUM_SECONDS = 1.0  # for all attributes that are described and not told

Link = tuple[bytes, int, int]
Below = tuple[str, Any]


class TreeWalk:
    """One pass over all hard links of a file, telling of each object."""

    def __init__(self, library: Library, root: Any) -> None:
        self._lib, self._h5 = library, library.h5
        self._seen: dict[int, tuple[str, bool]] = {}
        self._budget = MAX_ATTRIBUTES
        self._paths = MAX_PATHS
        self._root = root
        self._deadline = time.monotonic() + SUM_SECONDS

    def run(self) -> None:
        """Tell of every object, iteratively: nesting may be as deep as it likes."""
        pending = [("", self._root, 0)]
        self._seen[self._h5.h5o.get_info(self._root).addr] = "", False
        tell(k="group", path="", attrs=self._attributes("", self._root))
        while pending:
            path, group, depth = pending.pop()
            found = []
            for link in self._links(path, group):
                self._paths -= len(path) + len(link[0]) + 1
                if self._paths < 0:
                    tell(
                        k="fault",
                        code="hdf5-limit",
                        path="",
                        message=f"paths of over {MAX_PATHS:,} characters",
                    )
                    return
                below = self._visit(path, group, link, depth)
                if below is not None:
                    found.append((*below, depth + 1))
            pending.extend(reversed(found))

    def _links(self, path: str, group: Any) -> list[Link]:
        """Return the name and kind of each link in a group, and the address that a hard one leads to."""
        links: list[Link] = []

        def add(name: bytes, info: Any) -> bool | None:
            links.append((name, info.type, info.u))
            return True if self._are_too_many(links) else None

        try:
            group.links.iterate(add, info=True)
            if self._are_too_many(links):
                tell(k="fault", code="hdf5-limit", path=path, message=f"over {MAX_OBJECTS:,} objects")
        except self._lib.errors as failure:
            tell(k="fault", code="hdf5-damaged", path=path, message=reason(failure))
        return links

    def _are_too_many(self, links: list[Link]) -> bool:
        return len(links) + len(self._seen) > MAX_OBJECTS

    def _visit(self, path: str, group: Any, link: Link, depth: int) -> Below | None:
        """Tell of one link; return the group it leads to, where it is a new one."""
        name, kind, address = link
        here = f"{path}/{text(name)}"
        try:
            if kind != self._h5.h5l.TYPE_HARD:
                self._tell_link(here, group, name, kind)
                return None
            if address in self._seen:
                first, is_dataset = self._seen[address]
                tell(k="again", path=here, first=first, kind="dataset" if is_dataset else "group")
                return None
            self._seen[address] = here, False
            if depth > MAX_DEPTH:
                tell(k="fault", code="hdf5-limit", path=here, message=f"groups nested over {MAX_DEPTH} deep")
                return None
            opened = self._h5.h5o.open(group, name)
            self._seen[address] = here, isinstance(opened, self._h5.h5d.DatasetID)
            return self._tell_object(here, opened)
        except self._lib.errors as failure:
            tell(k="fault", code="hdf5-damaged", path=here, message=reason(failure))
            return None

    def _tell_link(self, path: str, group: Any, name: bytes, kind: int) -> None:
        """Tell of a link that is none to an object in this file."""
        external, soft = kind == self._h5.h5l.TYPE_EXTERNAL, kind == self._h5.h5l.TYPE_SOFT
        value: Any = group.links.get_val(name) if external or soft else b""
        target = ":".join(map(text, value)) if external else text(value)
        tell(k="link", path=path, kind="external" if external else "soft", target=target)

    def _tell_object(self, path: str, opened: Any) -> Below | None:
        if isinstance(opened, self._h5.h5g.GroupID):
            tell(k="group", path=path, attrs=self._attributes(path, opened))
            return path, opened
        if isinstance(opened, self._h5.h5d.DatasetID):
            tell(k="dataset", path=path, attrs=self._attributes(path, opened), **self._dataset(opened))
        else:
            tell(k="type", path=path)
        return None

    def _dataset(self, dataset: Any) -> dict[str, Any]:
        creation, space, h5d = dataset.get_create_plist(), dataset.get_space(), self._h5.h5d
        shape = (
            space.get_simple_extent_dims() if space.get_simple_extent_type() != self._h5.h5s.NULL else None
        )
        item: dict[str, Any] = {"dtype": self._lib.describe_type(dataset.get_type()), "shape": shape}
        if creation.get_external_count():
            name = creation.get_external(0)[0]
            return {**item, "layout": "external", "target": text(name)}
        layout = creation.get_layout()
        names = {h5d.COMPACT: "compact", h5d.CONTIGUOUS: "contiguous", h5d.CHUNKED: "chunked"}
        item["layout"] = names.get(layout, "virtual")
        if item["layout"] == "virtual":
            return item
        item["stored"] = dataset.get_storage_size()
        if item["dtype"]["class"] == "string" and self._has_few_texts(dataset, item):
            values = self._lib.np.empty(shape, dataset.dtype)
            dataset.read(self._h5.h5s.ALL, self._h5.h5s.ALL, values)
            item["values"] = _plain(values.tolist())
        if layout == h5d.CONTIGUOUS:
            item["offset"] = dataset.get_offset()
        if layout == h5d.CHUNKED:
            item["chunk"] = creation.get_chunk()
            item["filters"] = [creation.get_filter(at)[0] for at in range(creation.get_nfilters())]
        return item

    def _has_few_texts(self, dataset: Any, item: dict[str, Any]) -> bool:
        """Tell whether the texts in a dataset are few."""
        creation = dataset.get_create_plist()
        filters = {creation.get_filter(at)[0] for at in range(creation.get_nfilters())}
        count = 1
        for length in item["shape"] or (0,):
            count *= length
        small = count <= MAX_TEXTS and count * item["dtype"]["size"] <= 1 << 16 and filters <= READABLE
        return small and item["stored"] <= 1 << 16

    def _attributes(self, path: str, opened: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        try:
            names: list[bytes] = []
            self._h5.h5a.iterate(opened, names.append)  # opening them by number would take their square
            for name in names:
                values[text(name)] = self._attribute_value(self._h5.h5a.open(opened, name))
                stay_alive()
        except self._lib.errors as failure:
            tell(k="fault", code="hdf5-attribute", path=path, message=f"an attribute: {reason(failure)}")
        return values

    def _attribute_value(self, attribute: Any) -> Any:
        kind = self._lib.describe_type(attribute.get_type())
        shape = attribute.shape
        self._budget -= ATTRIBUTE_COST
        if shape is None:
            return {"<attribute>": "empty"}
        if kind["class"] == "other":
            return {"<attribute>": kind["what"], **self._checksum(attribute)}
        count = 1
        for length in shape:
            count *= length
        if count > MAX_ELEMENTS:
            return {"<attribute>": kind["what"], "elements": count, **self._checksum(attribute)}
        self._budget -= count * max(kind["size"], 16)
        if count * kind["size"] > MAX_ATTRIBUTE or self._budget < 0:
            raise ValueError(f"{count:,} elements in an attribute")
        values = self._lib.np.empty(shape, attribute.dtype)
        attribute.read(values)
        return _plain(values.tolist())

    def _checksum(self, attribute: Any) -> dict[str, str]:
        """Return the checksum of an attribute, where there is time for it."""
        elements = Sum(self._lib, self._root, min(self._budget, MAX_ATTRIBUTE), self._deadline)
        try:
            elements.add_attribute(attribute)
        except self._lib.errors:
            return {}
        self._budget -= attribute.get_storage_size()
        return {"CRC-32": f"{elements.crc:08x}"}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"b": text(value)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else str(value)
