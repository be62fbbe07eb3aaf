"""The hostile files: every class of attack over protocols and containers, or a sample of them all."""

from __future__ import annotations

import io
import itertools
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from fixtures.zip_raw import Member, build
from tests.security import hooks, keras_configs, triggers  # noqa: F401  # add to ATTACKS and MODELS
from tests.security.archives import FILES, tree
from tests.security.assembler import PROTOCOLS, pickled, spelled
from tests.security.calls import ATTACKS, USER_MODULE, USER_SOURCE, Place
from tests.security.containers import CONTAINERS, KINDS, Container, beside_a_tensor, in_persistent_id
from tests.security.models import MODELS
from tests.security.streams import STREAMS

EVERYWHERE = ("plain_calls", "os.mknod")
"""The attack that the sample holds in every container and protocol."""
IN_EACH_KIND = {"called_attributes"}
"""Attacks that the sample holds in every kind of container, in one protocol after the other."""
BARE = {"first_opcodes": ("pkl", "bin"), "trailing_pickles": ("pkl", "bin"), "torn_trailing": ("pkl", "bin")}
"""Streams that mean something in a file of their own alone."""
PROTOCOLS_OF = {"python2_names": range(3), "dbm.open": range(3, 6)}
"""Attacks, or variants, whose names mean something else in other protocols."""
ZIPPED = {one.name for one in CONTAINERS if one.holds_tensors}
PADDLE = {"pdparams", "pdopt"}
NOT_IN = {
    "frames/short": ZIPPED,
    "frames/inside_opcode": ZIPPED,
    "driven_counters": PADDLE,
    "patched_classes/type": PADDLE,
    "patched_classes/function": PADDLE,
    "numpy_gadgets/random.generator": PADDLE,
    "numpy_gadgets/random.randomstate": PADDLE,
}
"""Containers whose loader an attack stops: torch's reader has no peek to pass over a frame that is too short,
and numpy.random can't be imported into paddle's process."""
ALONE = {
    "builds/class", "builds/module", "builds/module.os", "builds/users_class",
    "stoppers/ext1", "stoppers/ext2", "stoppers/ext4",
    "patched_classes/type", "patched_classes/function",
    "higher_order/weakref.finalize", "higher_order/atexit", "higher_order/Timer",
    "higher_order/Thread", "higher_order/ThreadPool", "library_writers/distutils.spawn",
}  # fmt: skip
"""What changes the loader's interpreter, or waits for its end."""
ELSEWHERE = {"aliases/nt.system"}
"""What runs on another system than Linux, so that no loader can prove it here."""
USERS = {"users_names", "called_attributes", "keras_work", "keras_half_characters"}
"""Attacks of which unknown may be said: they name only the user's own, take long, or can't be read."""


@dataclass(frozen=True)
class Case:
    """One hostile checkpoint below a directory, the file that a loader is given, and its payload's marker."""

    number: int
    attack: str
    variant: str
    spelling: str
    loader: str
    path: Path
    judged: Path
    marker: Path
    may_be_unknown: bool = False

    @property
    def name(self) -> str:
        return f"{self.attack}/{self.variant}/{self.spelling}"

    @property
    def order(self) -> tuple[str, Path, Path, bool]:
        """The loader, what it is given, where the payload makes a file, and whether that needs a fork."""
        return self.loader, self.path, self.marker.parent, f"{self.attack}/{self.variant}" in ALONE

    @property
    def is_provable(self) -> bool:
        return f"{self.attack}/{self.variant}" not in ELSEWHERE

    @property
    def has_run(self) -> bool:
        return any(self.marker.parent.iterdir())

    def forget(self) -> None:
        """Remove what shows that it has run."""
        shutil.rmtree(self.marker.parent)
        self.marker.parent.mkdir()


@dataclass
class Corpus:
    """Writes cases below a directory."""

    root: Path
    count: int = 0

    def __post_init__(self) -> None:
        self.modules.mkdir(parents=True)
        (self.modules / f"{USER_MODULE}.py").write_text(USER_SOURCE)

    @property
    def modules(self) -> Path:
        """What the loaders can import of the user's own."""
        return self.root / "modules"

    def place(self) -> Place:
        """Return a place for the next case."""
        self.count += 1
        ran, files = self.root / "ran" / f"{self.count:05}", self.root / "cases" / f"{self.count:05}"
        ran.mkdir(parents=True)
        files.mkdir(parents=True)
        return Place(f"{ran}/m", str(files))

    def write(self, attack: str, variant: str, spelling: str, loader: str, place: Place, target: str) -> Case:
        """Write the files of a place."""
        directory = Path(place.directory)
        for name, data in place.files.items():
            path = directory / name
            if "/" in name:
                path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        path, marker = directory / target, Path(place.marker)
        judged = directory / target.partition("/")[0]
        unknown = attack in USERS
        return Case(self.count, attack, variant, spelling, loader, path, judged, marker, unknown)

    def all(self, *, every: bool) -> Iterator[Case]:
        """Write the cases and yield them."""
        yield from self._calls(every=every)
        yield from self._streams(every=every)
        for attack, generator in (*FILES.items(), *MODELS.items()):
            for variant in _variants(generator):
                place = self.place()
                loader, target = _pick(generator(place), variant)()
                yield self.write(attack, variant, "file", loader, place, target)

    def _calls(self, *, every: bool) -> Iterator[Case]:
        turn = itertools.count()
        for attack, generator in ATTACKS.items():
            for number, variant in enumerate(_variants(generator)):
                wide = every or (attack, variant) == EVERYWHERE
                allowed = PROTOCOLS_OF.get(attack, PROTOCOLS_OF.get(variant, PROTOCOLS))
                if attack in IN_EACH_KIND:
                    spellings, wide = _in_each_kind(number, every=every), True
                else:
                    spellings = _spellings(turn, wide=wide)
                for container, protocol in spellings:
                    if protocol not in allowed or _stops(attack, variant, container):
                        continue
                    try:
                        yield self.call(attack, variant, container, protocol)
                    except ValueError:  # this protocol can't spell it
                        continue
                    if not wide:
                        break
        for variant in ("os.system", "os.mknod"):
            place, container = self.place(), CONTAINERS[2]
            inside = in_persistent_id(_pick(ATTACKS["plain_calls"](place), variant))
            data = pickled({"weight": inside}, 2)
            yield self._contained("persistent_id", variant, "zip-2", container, place, data)

    def call(self, attack: str, variant: str, container: Container, protocol: int) -> Case:
        """Write a call in a container.

        Raises:
            ValueError: The protocol has no opcode for it.
        """
        place = self.place()
        expression = beside_a_tensor(_pick(ATTACKS[attack](place), variant), container, protocol)
        spelling = f"{container.name}-{protocol}"
        return self._contained(attack, variant, spelling, container, place, pickled(expression, protocol))

    def whole(self, attack: str, variant: str, checkpoint: Path, target: str, loader: str) -> Case:
        """Write an honest checkpoint whose pickle makes a call before all else, and throws it away."""
        place = self.place()
        evil = spelled(_pick(ATTACKS[attack](place), variant), 2) + b"0"
        name = checkpoint.name
        contents = tree(checkpoint, name) if checkpoint.is_dir() else {name: checkpoint.read_bytes()}
        contents[target] = _before(contents[target], evil)
        place.files.update(contents)
        return self.write(attack, variant, name, loader, place, target)

    def _streams(self, *, every: bool) -> Iterator[Case]:
        turn = itertools.count()
        for attack, generator in STREAMS.items():
            for variant in _variants(generator):
                wide = every or (attack, variant) == EVERYWHERE
                choice = [one for one in CONTAINERS if one.name in BARE.get(attack, (one.name,))]
                choice = [one for one in choice if not _stops(attack, variant, one)]
                start = next(turn)
                for step in range(len(choice) if wide else 1):
                    container = choice[(start + step) % len(choice)]
                    place = self.place()
                    data = _pick(generator(place), variant)
                    yield self._contained(attack, variant, container.name, container, place, data)

    def _contained(
        self, attack: str, variant: str, spelling: str, container: Container, place: Place, data: bytes
    ) -> Case:
        place.files.update(container.write(data))
        loader = "pickles" if attack in ("trailing_pickles", "torn_trailing") else container.loader
        return self.write(attack, variant, spelling, loader, place, container.target)


def _stops(attack: str, variant: str, container: Container) -> bool:
    """Tell whether a container's loader fails before the payload."""
    return container.name in NOT_IN.get(attack, ()) or container.name in NOT_IN.get(f"{attack}/{variant}", ())


def _before(data: bytes, code: bytes) -> bytes:
    """Return a file whose pickle runs code behind its head, before all else."""
    if data.startswith(b"PK"):
        with ZipFile(io.BytesIO(data)) as archive:
            members = [Member(info.filename, archive.read(info)) for info in archive.infolist()]
        return build(
            [
                Member(one.name, _before(one.data, code)) if one.name.endswith("data.pkl") else one
                for one in members
            ]
        )
    return data[:2] + code + data[2:]


def _spellings(turn: Iterator[int], *, wide: bool) -> Iterable[tuple[Container, int]]:
    """Return containers and protocols: all of them, or all in an order that moves on with each turn."""
    if wide:
        return itertools.product(CONTAINERS, PROTOCOLS)
    start = next(turn)
    return [
        (CONTAINERS[(start + step) % len(CONTAINERS)], (start + 2 + step) % len(PROTOCOLS))
        for step in range(12)
    ]


def _in_each_kind(number: int, *, every: bool) -> Iterable[tuple[Container, int]]:
    """Return a container of each kind in all protocols, or in one that moves on with both."""
    if every:
        return itertools.product(KINDS, PROTOCOLS)
    return [(one, (number + at) % len(PROTOCOLS)) for at, one in enumerate(KINDS)]


def _variants(generator: Any) -> list[str]:
    """Return the names of the variants, found with a place that is nowhere."""
    return [name for name, _ in generator(Place("/nowhere/m", "/nowhere"))]


def _pick(variants: Iterable[tuple[str, Any]], wanted: str) -> Any:
    return next(made for name, made in variants if name == wanted)
