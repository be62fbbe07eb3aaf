"""Names and layouts by the user's map file: tensors renamed, turned, joined, cut and left out by rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpttool.converting.ties import retied, untied
from ckpttool.converting.tree_edits import Edit, Edits, edit_tree
from ckpttool.errors import UsageError
from ckpttool.pairing.map_file import TensorMap, TensorRule
from ckpttool.pairing.map_rules import SideNames, apply_rule, fill_stars
from ckpttool.pairing.rearrangement import Unfit
from ckpttool.report import counted
from ckpttool.tensor import Path, Role, Tensor
from ckpttool.writing.interface import Content


def rename_by_map(content: Content, told: TensorMap) -> tuple[Content, list[str]]:
    """Return a content with the names and layouts that a map gives, and what there is to say of it.

    What the map doesn't name stays as it is.
    """
    changes = _Changes(content, told)
    for rule in told.tensors:
        changes.follow(rule)
    for glob, name in told.names.items():
        changes.rename(glob, name)
    for glob in told.drop:
        changes.leave(glob)
    return changes.applied()


class _Changes:
    """What becomes of each tensor: ``edits`` has what stands in its place, nothing for what is gone."""

    def __init__(self, content: Content, told: TensorMap) -> None:
        self._content, self._map = content, told
        self._tensors = {tensor.name: tensor for tensor in content.tensors}
        self._names = SideNames(tensor.name for tensor in content.tensors)
        self._edits: Edits = {}
        self._given: dict[str, str] = {}
        self._decided: dict[str, str] = {}
        self._dropped = 0
        self._state = any(tensor.role is Role.OPTIMIZER for tensor in content.tensors)

    def follow(self, rule: TensorRule) -> None:
        """Follow one ``[[tensor]]``."""
        matched = 0
        for names, targets in self._names.find_groups(rule, self._is_taken):
            missing = next((name for name in names if name not in self._tensors), None)
            if missing is not None:
                raise self._map.wrong(rule.place, f"no tensor is called {missing!r}")
            taken = next((name for name in names if self._is_taken(name)), None)
            if taken is not None:
                raise self._map.wrong(rule.place, f"a table before took {taken!r}")
            sources = [self._tensors[name] for name in names]
            if not rule.is_plain:
                self._require_no_state(rule.place, names[0])
            paths = [self._path(rule.place, sources[0], target) for target in targets]
            try:
                made = apply_rule(sources, rule, paths, flip=False)
            except Unfit as failure:
                raise self._map.wrong(rule.place, f"{names[0]}: {failure} (rule {rule.rule})") from failure
            for target in targets:
                self._give(rule.place, target, names[0], "layout")
            ends = zip(paths, made, strict=True)
            self._edits[id(sources[0])] = [Edit(path[-1], replace(one, path=path)) for path, one in ends]
            self._edits.update((id(source), []) for source in sources[1:])
            matched += 1
        if not matched:
            raise self._map.wrong(rule.place, self._none(rule.sources[0]))

    def rename(self, glob: str, name: str) -> None:
        """Follow one line of ``[names]``."""
        place, matched = f'names."{glob}"', 0
        for own, captured in self._names.find(glob):
            if self._is_taken(own):
                continue
            tensor, target = self._tensors[own], fill_stars(name, captured)
            self._give(place, target, own, "name")
            path = self._path(place, tensor, target)
            self._edits[id(tensor)] = [Edit(path[-1], replace(tensor, path=path))]
            matched += 1
        if not matched:
            raise self._map.wrong(place, self._none(glob))

    def leave(self, glob: str) -> None:
        """Follow one name of ``drop``."""
        names = [own for own, _ in self._names.find(glob) if not self._is_taken(own)]
        if not names:
            raise self._map.wrong("drop", self._none(glob))
        for name in names:
            if self._tensors[name].role is Role.WEIGHTS:
                self._require_no_state("drop", name)
            self._edits[id(self._tensors[name])] = []
        self._dropped += len(names)

    def applied(self) -> tuple[Content, list[str]]:
        """Return the content with all changes."""
        ends = [*self._ends()]
        self._require_single(ends)
        content = self._content
        tensors = retied(ends)
        final = {id(new): tied for (_, new), tied in zip(ends, tensors, strict=True)}
        edits = {
            at: [Edit(edit.key, final[id(edit.tensor)]) for edit in found]
            for at, found in self._edits.items()
        }
        notes = self._notes() + untied([old for old, _ in ends], tensors)
        tree = content.tree
        if tree is not None:
            kept = {id(old): final[id(old)] for old, new in ends if old is new}
            tree, told = edit_tree(tree, edits, kept, content.tensors)
            notes += told
        mapped = {**content.mapped, **self._decided}
        return replace(content, tensors=tensors, tree=tree, mapped=mapped), notes

    def _ends(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor that there will be, behind the one whose place it takes."""
        for tensor in self._content.tensors:
            found = self._edits.get(id(tensor))
            if found is None:
                yield tensor, tensor
            else:
                yield from ((tensor, edit.tensor) for edit in found)

    def _is_taken(self, name: str) -> bool:
        return id(self._tensors[name]) in self._edits

    def _none(self, glob: str) -> str:
        is_taken = any(self._names.find(glob))
        return f"no {'other ' if is_taken else ''}tensor is called {glob!r}"

    def _require_no_state(self, place: str, name: str) -> None:
        if self._state:
            told = (
                f"{name}: an optimizer's state goes with it, and would not fit any more (use --only weights)"
            )
            raise self._map.wrong(place, told)

    def _give(self, place: str, target: str, own: str, what: str) -> None:
        if target in self._given:
            raise self._map.wrong(place, f"{own!r} becomes {target!r}, and so does {self._given[target]!r}")
        self._given[target] = own
        self._decided[target] = what

    def _require_single(self, ends: Sequence[tuple[Tensor, Tensor]]) -> None:
        known: dict[str, str] = {}
        for old, new in ends:
            if new.name in known:
                told = f"{new.name}: {known[new.name]!r} and {old.name!r} would both be called so"
                raise UsageError(f"{self._map.path}: {told}")
            known[new.name] = old.name

    def _path(self, place: str, tensor: Tensor, name: str) -> Path:
        """Return the path of a new name: below the same containers, where these are the content's own."""
        if self._content.tree is None:
            return tuple(name.split(".")) if len(tensor.path) > 1 else (name,)
        around = ".".join(map(str, tensor.path[:-1]))
        front = f"{around}." if around else ""
        if not name.startswith(front) or name == front:
            told = (
                f"{tensor.name!r} can't leave {around!r}, in which it lies, for {name!r} (use --only weights)"
            )
            raise self._map.wrong(place, told)
        return (*tensor.path[:-1], name.removeprefix(front))

    def _notes(self) -> list[str]:
        tables = sum(what == "layout" for what in self._decided.values())
        counts = {
            "renamed": len(self._decided) - tables,
            "made by its tables": tables,
            "dropped": self._dropped,
        }
        parts = [f"{counted(count, 'tensor')} {done}" for done, count in counts.items() if count]
        return [f"by the map: {', '.join(parts)}"]
