"""Applies the user's map file to a content: renames, rearranges, joins, splits and drops tensors."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.errors import UsageError
from ckpttool.core.tensor import Path, Role, Tensor
from ckpttool.core.text import counted
from ckpttool.formats.writer import Content
from ckpttool.weights.converting.ties import carry_ties, lost_ties
from ckpttool.weights.converting.tree_edits import edit_tree
from ckpttool.weights.pairing.map_file import SideNames, TensorMap, TensorRule, apply_rule, fill_stars
from ckpttool.weights.pairing.rearrangement import LayoutMismatch


def rename_by_map(content: Content, tensor_map: TensorMap) -> tuple[Content, list[str]]:
    """Return a content with the names and layouts of a map, and notes.

    Tensors that the map doesn't name are unchanged.
    """
    edits = _MapEdits(content, tensor_map)
    for rule in tensor_map.tensors:
        edits.apply_table(rule)
    for glob, name in tensor_map.names.items():
        edits.rename(glob, name)
    for glob in tensor_map.drop:
        edits.drop(glob)
    return edits.apply()


class _MapEdits:
    """Edits of a content by the rules of a map.

    ``_edits`` has the replacements by ``id`` of a tensor; an empty list drops it.
    """

    def __init__(self, content: Content, tensor_map: TensorMap) -> None:
        self._content, self._map = content, tensor_map
        self._tensors = {tensor.name: tensor for tensor in content.tensors}
        self._names = SideNames(tensor.name for tensor in content.tensors)
        self._edits: dict[int, list[Tensor]] = {}
        self._claimed: dict[str, str] = {}
        self._mapped: dict[str, str] = {}
        self._dropped = 0
        self._has_state = any(tensor.role is Role.OPTIMIZER for tensor in content.tensors)

    def apply_table(self, rule: TensorRule) -> None:
        """Apply one ``[[tensor]]`` table."""
        matched = 0
        for names, targets in self._names.find_groups(rule, self._is_taken):
            missing = next((name for name in names if name not in self._tensors), None)
            if missing is not None:
                raise self._map.error_at(rule.place, f"no tensor {missing!r}")
            taken = next((name for name in names if self._is_taken(name)), None)
            if taken is not None:
                raise self._map.error_at(rule.place, f"an earlier table uses {taken!r}")
            sources = [self._tensors[name] for name in names]
            if not rule.is_plain:
                self._require_no_state(rule.place, names[0])
            paths = [self._path(rule.place, sources[0], target) for target in targets]
            try:
                results = apply_rule(sources, rule, paths, from_torch=False)
            except LayoutMismatch as failure:
                raise self._map.error_at(rule.place, f"{names[0]}: {failure} (rule {rule.rule})") from failure
            for target in targets:
                self._claim(rule.place, target, names[0], "layout")
            # A join puts its result in the place of the first source, and removes the others. A split puts
            # all parts in the place of its source.
            self._edits[id(sources[0])] = [
                replace(tensor, path=path) for path, tensor in zip(paths, results, strict=True)
            ]
            self._edits.update((id(source), []) for source in sources[1:])
            matched += 1
        if not matched:
            raise self._map.error_at(rule.place, self._no_match(rule.sources[0]))

    def rename(self, glob: str, name: str) -> None:
        """Apply one line of ``[names]``."""
        place, matched = f'names."{glob}"', 0
        for source, captured in self._names.find(glob):
            if self._is_taken(source):
                continue
            tensor, target = self._tensors[source], fill_stars(name, captured)
            self._claim(place, target, source, "name")
            self._edits[id(tensor)] = [replace(tensor, path=self._path(place, tensor, target))]
            matched += 1
        if not matched:
            raise self._map.error_at(place, self._no_match(glob))

    def drop(self, glob: str) -> None:
        """Apply one glob of ``drop``."""
        names = [name for name, _ in self._names.find(glob) if not self._is_taken(name)]
        if not names:
            raise self._map.error_at("drop", self._no_match(glob))
        # The state of an optimizer has an entry for each weight, so it would not fit without one.
        for name in names:
            if self._tensors[name].role is Role.WEIGHTS:
                self._require_no_state("drop", name)
            self._edits[id(self._tensors[name])] = []
        self._dropped += len(names)

    def apply(self) -> tuple[Content, list[str]]:
        """Return the content with all edits, and notes."""
        content = self._content
        # (Old tensor, new tensor), in the order of the old ones.
        placed: list[tuple[Tensor, Tensor]] = []
        for tensor in content.tensors:
            placed += [(tensor, new) for new in self._edits.get(id(tensor), [tensor])]
        known: dict[str, str] = {}
        for old, new in placed:
            if new.name in known:
                problem = f"{new.name}: {known[new.name]!r} and {old.name!r} would both get this name"
                raise UsageError(f"{self._map.path}: {problem}")
            known[new.name] = old.name
        tensors = carry_ties(placed)
        tied = {id(new): tensor for (_, new), tensor in zip(placed, tensors, strict=True)}
        by_table = sum(what == "layout" for what in self._mapped.values())
        counts = {
            "renamed": len(self._mapped) - by_table,
            "made by its tables": by_table,
            "dropped": self._dropped,
        }
        parts = [f"{counted(count, 'tensor')} {done}" for done, count in counts.items() if count]
        notes = [f"by the map: {', '.join(parts)}", *lost_ties([old for old, _ in placed], tensors)]
        tree = content.tree
        if tree is not None:
            edits_of_tree = {at: [tied[id(new)] for new in edits] for at, edits in self._edits.items()}
            kept = {id(old): tied[id(old)] for old, new in placed if old is new}
            tree, tree_notes = edit_tree(tree, edits_of_tree, kept, content.tensors)
            notes += tree_notes
        mapped = {**content.mapped, **self._mapped}
        return replace(content, tensors=tensors, tree=tree, mapped=mapped), notes

    def _is_taken(self, name: str) -> bool:
        return id(self._tensors[name]) in self._edits

    def _no_match(self, glob: str) -> str:
        is_taken = any(self._names.find(glob))
        return f"no {'other ' if is_taken else ''}tensor {glob!r}"

    def _require_no_state(self, place: str, name: str) -> None:
        if self._has_state:
            problem = "the optimizer's state would no longer fit it (use --only weights)"
            raise self._map.error_at(place, f"{name}: {problem}")

    def _claim(self, place: str, target: str, source: str, what: str) -> None:
        if target in self._claimed:
            problem = f"{source!r} and {self._claimed[target]!r} both become {target!r}"
            raise self._map.error_at(place, problem)
        self._claimed[target] = source
        self._mapped[target] = what

    def _path(self, place: str, tensor: Tensor, name: str) -> Path:
        """Return the path for a new name; in a tree, it must be in the same container."""
        if self._content.tree is None:
            return tuple(name.split(".")) if len(tensor.path) > 1 else (name,)
        containers = ".".join(map(str, tensor.path[:-1]))
        front = f"{containers}." if containers else ""
        if not name.startswith(front) or name == front:
            problem = f"can't be moved out of {containers!r} to {name!r} (use --only weights)"
            raise self._map.error_at(place, f"{tensor.name!r} {problem}")
        return (*tensor.path[:-1], name.removeprefix(front))
