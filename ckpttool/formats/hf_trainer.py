"""A directory of the Hugging Face Trainer as one checkpoint: weights, optimizer, scheduler, random states.

``trainer_state.json``, which is written last, has the step and epoch of the save. A missing or damaged part
is a finding, and the others can still be read.

Source: huggingface/transformers ``trainer.py`` (``_save_checkpoint``) and ``trainer_callback.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from ckpttool.containers.jsontext import DuplicateKeyObject, parse_json
from ckpttool.core.checkpoint import EARLIER_STEP, Checkpoint, FileEntry, Producer, TrainingState
from ckpttool.core.errors import DamagedCheckpoint, NotACheckpoint, require_at_most
from ckpttool.core.report import warning
from ckpttool.core.tensor import Role, Tensor
from ckpttool.formats.interface import Format, Probe, Unit, scan
from ckpttool.formats.opening import OpenedParts, file_entry
from ckpttool.formats.safetensors.reader import MAX_HEADER
from ckpttool.formats.sharded import ShardedPytorch, ShardedSafetensors
from ckpttool.formats.torch.rank_files import FSDP
from ckpttool.formats.torch.ranks_format import fsdp_units
from ckpttool.storage import fs

_CONFIGS = ("config.json", "adapter_config.json")
_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors", ".ckpt", ".pkl", ".distcp")
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)(\.[\w-]+)?\.(safetensors|bin)")
_RESUMED = re.compile(r"(optimizer|scheduler|scaler|rng_state)(_\d+)?\.(pt|pth|bin)")
_STATE_FILE = re.compile(
    r"(optimizer|scheduler|scaler|dl_state_dict)(_\d+)?\.(pt|pth|bin)|sampler(_\d+)?\.bin"
)
_RNG_STATE = re.compile(r"rng_state(_\d+)?\.(pt|pth|bin)")
_WEIGHTS_DIRECTORY = re.compile(r"global_step\d+|pytorch_model_fsdp_\d+")
_RANDOM_STATES = re.compile(r"random_states_\d+\.pkl")
_WRITTEN = re.compile(
    r"""(trainer_state|config|generation_config|adapter_config|\w*processor_config|tokenizer|tokenizer_config
    |special_tokens_map|added_tokens|vocab|chat_template|normalizer|modules|config_sentence_transformers
    |sentence_\w+_config|quantize_config)\.json
    |(training_args|sampler(_\d+)?|scheduler_\d+|optimizer_\d+(_rank\d+)?|v_head|value_head)\.bin
    |(model|pytorch_model|adapter_model|value_head)([._-][\w-]+)*\.(safetensors|bin)(\.index\.json)?
    |(optimizer|scheduler|scaler|rng_state|dl_state_dict)(_\d+)?\.(pt|pth|bin)
    |(random_states|custom_checkpoint)_\d+\.pkl
    |(tokenizer|spiece|sentencepiece\.bpe)\.model|(source|target)\.spm|(vocab|dict)\.txt|merges\.txt|bpe\.codes
    |chat_template\.jinja|additional_chat_templates/|README\.md|latest|zero_to_fp32\.py
    |(configuration|modeling|modular|tokenization|processing|image_processing|feature_extraction)_\w+\.py
    |(global_step|pytorch_model_fsdp_|optimizer_|model_)\d+/|\d+_[A-Z]\w+/""",
    re.VERBOSE,
)
"""Names that ``Trainer``, Accelerate, PEFT, tokenizers and sentence-transformers write in it."""
Entries = Mapping[str, os.DirEntry[str]]
STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"
NUMBERED = re.compile(r"checkpoint-(\d{1,18})")
_DURATION = re.compile(r"eval_(\w+_)?(runtime|model_preparation_time|\w+_per_second)")
"""Logged values of an evaluation that are no metrics."""


class HfTrainer(Format):
    """A directory like ``checkpoint-500`` that ``transformers.Trainer`` or Accelerate wrote."""

    name: ClassVar[str] = "safetensors"
    takes_in = True
    written = _WRITTEN
    specialises = (ShardedSafetensors, ShardedPytorch)

    def matches(self, probe: Probe) -> bool:
        # Weights alone are no save of a training: it takes the trainer's state, a number in the name
        # (``checkpoint-500``) or Accelerate's random states, and files with which it can resume.
        entries = probe.entries
        is_numbered = NUMBERED.fullmatch(_own_name(probe.path)) is not None
        if STATE not in entries and not is_numbered and not _is_accelerate(entries):
            return False
        if any(NUMBERED.fullmatch(name) and entry.is_dir() for name, entry in entries.items()):
            return False  # the run's own directory: a final model next to its checkpoints
        can_resume = any(_RESUMED.fullmatch(name) or FSDP.fullmatch(name) for name in entries) or (
            is_numbered and ARGUMENTS in entries
        )
        if STATE in entries:
            return is_numbered or can_resume or bool(_weights(probe.path, entries))
        return can_resume and bool(_weights(probe.path, entries))

    def open(self, probe: Probe) -> Checkpoint:
        directory, entries = probe.path, probe.entries
        state = _read_json(directory, STATE, "state") if STATE in entries else {}
        is_accelerate = _is_accelerate(entries)
        with OpenedParts("part", allows_losses=probe.allows_losses) as parts:
            if STATE not in entries and not is_accelerate:
                parts.fault("part-missing", "missing; the save was interrupted before its end", STATE)
            metadata: dict[str, Any] = {
                "trainer_state": {key: value for key, value in state.items() if key != "log_history"}
            }
            for name in _CONFIGS:
                if name in entries:
                    try:
                        metadata[_stem(name)] = _read_json(directory, name, "config")
                    except DamagedCheckpoint as failure:
                        parts.fault("part-damaged", failure.reason, name)
            weights = _weights(directory, entries)
            tensors = _add_weights(parts, metadata, weights, entries)
            tensors += _add_rank_sets(parts, metadata, directory, entries)
            taken = {name for unit in weights for name in unit.members}
            loadable = [
                name
                for name, entry in entries.items()
                if name.endswith(_SUFFIXES)
                and entry.is_file()
                and name not in taken
                and not FSDP.fullmatch(name)
            ]
            others = _add_others(parts, metadata, directory, loadable)
            tensors += (_nested(key, one) for key, part in others.items() for one in part.tensors)
            numbered = NUMBERED.fullmatch(_own_name(directory))
            if numbered and "global_step" in state and int(numbered[1]) != state["global_step"]:
                step = f"{state['global_step']!r:.40}"
                message = f"the directory has the number {numbered[1]}, but global_step is {step}"
                parts.findings.append(warning("step-disagrees", message, STATE))
            tensors += _add_directories(parts, entries)
            version = metadata.get("config", {}).get("transformers_version")
            return parts.checkpoint(
                path=directory,
                format=_weights_format(parts, weights),
                variant="accelerate" if is_accelerate else "trainer",
                tensors=tuple(tensors),
                files=tuple(_files(directory)),
                spans=parts.spans,
                metadata=lambda: metadata,
                part_trees=lambda: {key: part.tree for key, part in others.items()},
                training=lambda: training_of(state, metadata.get("training_args", {}), _own_name(directory)),
                producer=Producer(
                    "accelerate" if is_accelerate else "transformers",
                    version if isinstance(version, str) else None,
                ),
            )

    def state_files(self, names: Iterable[str], proven: Collection[str]) -> Iterable[str]:
        return (
            one
            for one in names
            if _STATE_FILE.fullmatch(one) or (one in proven and _RNG_STATE.fullmatch(one))
        )


def _is_accelerate(entries: Entries) -> bool:
    """Return whether ``Accelerator.save_state`` wrote a directory; it writes no trainer state."""
    return STATE not in entries and any(map(_RANDOM_STATES.fullmatch, entries))


def _own_name(path: str) -> str:
    return os.path.basename(fs.abspath(path))


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _read_json(directory: str, name: str, what: str) -> dict[str, Any]:
    path = os.path.join(directory, name)
    with fs.open_source(path) as source:
        require_at_most(path, MAX_HEADER, source.size, "{:,} bytes of JSON")
        parsed = parse_json(path, source.read(0, source.size), what, constants=True, surrogates=True)
    if not isinstance(parsed, dict):
        found = f"the {what} has type {type(parsed).__name__}"
        raise DamagedCheckpoint(path, found, expected="an object", code=f"{what}-not-object")
    if isinstance(parsed, DuplicateKeyObject):
        raise parsed.error(path)
    return parsed


def _weights(directory: str, entries: Entries) -> list[Unit]:
    """Return the sets of weights in a directory; transformers would load the first."""
    units = [*ShardedSafetensors().units(directory, entries), *ShardedPytorch().units(directory, entries)]
    units += (unit for unit in fsdp_units(directory, entries) if not _is_of_optimizer(unit))
    for name, entry in entries.items():
        if _WEIGHTS.fullmatch(name) and entry.is_file():
            units.append(Unit(os.path.join(directory, name), (name,), None))

    # As ``from_pretrained`` does: safetensors before pickles, and a single file before an index. An adapter
    # is loaded onto a model, so it comes last.
    def load_order(unit: Unit) -> tuple[bool, bool, bool]:
        name = os.path.basename(unit.path)
        return name.startswith("adapter_model"), "safetensors" not in name, name.endswith(".json")

    return sorted(units, key=load_order)


def _weights_format(parts: OpenedParts, weights: list[Unit]) -> str:
    """Return the format of the weights; without weights PyTorch's, the format of the other parts."""
    if not weights:
        return "pytorch"
    name = os.path.basename(weights[0].path)
    part = parts.parts.get(name)
    if part is not None:
        return part.format
    return "safetensors" if "safetensors" in name else "pytorch"


def _add_weights(
    parts: OpenedParts, metadata: dict[str, Any], weights: list[Unit], entries: Entries
) -> list[Tensor]:
    """Open all sets of weights, and return the tensors of the first."""
    # All are opened, since other programs may load a second set, which may hold code or be damaged.
    if not weights and not any(map(_WEIGHTS_DIRECTORY.fullmatch, entries)):
        parts.fault("part-missing", "no model.safetensors, pytorch_model.bin or adapter_model", None)
    tensors: list[Tensor] = []
    for unit in weights:
        name = os.path.basename(unit.path)
        part = parts.add_unit(name, unit)
        if unit is not weights[0]:
            used = os.path.basename(weights[0].path)
            message = f"a second set of weights; only the tensors of {used} are listed"
            parts.findings.append(warning("weights-twice", message, name))
        elif part is not None:
            tensors += (replace(tensor, role=Role.WEIGHTS) for tensor in part.tensors)
        if part is not None and part.metadata:
            metadata[_key(name, metadata)] = dict(part.metadata)
    return tensors


def _add_rank_sets(
    parts: OpenedParts, metadata: dict[str, Any], directory: str, entries: Entries
) -> list[Tensor]:
    """Open the optimizer files of all ranks, and return the whole tensors."""
    tensors: list[Tensor] = []
    for unit in filter(_is_of_optimizer, fsdp_units(directory, entries)):
        key = os.path.basename(unit.path)
        if (part := parts.add_unit(key, unit)) is not None:
            tensors += (_nested(key, tensor) for tensor in part.tensors)
            metadata[key] = dict(part.metadata)
    return tensors


def _is_of_optimizer(unit: Unit) -> bool:
    return os.path.basename(unit.path).startswith("optimizer")


def _add_others(
    parts: OpenedParts, metadata: dict[str, Any], directory: str, names: list[str]
) -> dict[str, Checkpoint]:
    """Open other loadable files, and return them by the file's stem."""
    others: dict[str, Checkpoint] = {}
    for name in names:
        path, key = os.path.join(directory, name), _key(name, metadata)
        is_known = _RESUMED.fullmatch(name) or name == ARGUMENTS
        if not is_known and not _is_recognised(path, allows_losses=parts.allows_losses):
            message = "no format recognises it, so it was not checked"
            parts.findings.append(warning("part-unrecognised", message, name))
        elif (part := parts.add_file(name, path)) is not None:
            others[key] = part
            metadata[key] = dict(part.metadata)
    return others


def _key(name: str, metadata: Mapping[str, Any]) -> str:
    """Return the stem of a file's name, or the whole name if another file has the stem."""
    return name if _stem(name) in metadata else _stem(name)


def _nested(key: str, tensor: Tensor, role: Role | None = None) -> Tensor:
    """Return a tensor with a key in front of its path, and the role of an optimizer or training state."""
    owner = None if tensor.shares_with is None else f"{key}.{tensor.shares_with}"
    role = role or (Role.OPTIMIZER if key.startswith("optimizer") else Role.TRAINING)
    return replace(tensor, path=(key, *tensor.path), role=role, shares_with=owner)


def _is_recognised(path: str, *, allows_losses: bool) -> bool:
    from ckpttool.formats import detect

    try:
        with Probe(path, allows_losses=allows_losses) as probe:
            return detect(probe) is not None
    except NotACheckpoint:
        return False


def _add_directories(parts: OpenedParts, entries: Entries) -> list[Tensor]:
    """Open the checkpoints in subdirectories, such as DeepSpeed's, and return their tensors.

    Another directory with files that a framework could load is a warning.
    """
    from ckpttool.formats import open_path

    tensors: list[Tensor] = []
    for name, entry in entries.items():
        if not entry.is_dir(follow_symlinks=False):
            continue
        if _is_recognised(entry.path, allows_losses=parts.allows_losses):
            part = parts.add(name, partial(open_path, entry.path, allows_losses=parts.allows_losses))
            for tensor in () if part is None else part.tensors:
                # Its weights are a second copy of the model's.
                role = Role.OTHER if tensor.role is Role.WEIGHTS else tensor.role
                tensors.append(_nested(name, tensor, role))
            continue
        count = sum(file.path.endswith(_SUFFIXES) for file in _files(entry.path))
        if count:
            message = f"files in it that were not checked: {count:,}"
            parts.findings.append(warning("part-not-checked", message, name))
    return tensors


def _files(directory: str) -> Iterator[FileEntry]:
    """Yield every regular file in a directory and its subdirectories; no link to a directory is followed."""
    pending = [directory]
    while pending:
        for entry in scan(pending.pop()).values():
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            elif entry.is_file():
                yield file_entry(entry.path)


def training_of(state: Mapping[str, Any], arguments: Mapping[str, Any], name: str) -> TrainingState:
    """Return the training state that Trainer recorded, with the metrics that were logged at this step.

    Args:
        state: The content of ``trainer_state.json``.
        arguments: The plain data of ``training_args.bin``.
        name: The name of the directory.
    """
    # The log has an entry for each logged loss and each evaluation. The last loss is taken from any step, as
    # Trainer doesn't log one at each, and marked as earlier; an evaluation at another step was of other
    # weights, so metrics are only those of this step.
    logged: dict[str, Any] = {}
    logged_here: dict[str, Any] = {}
    numbered = NUMBERED.fullmatch(name)
    number_in_name = int(numbered[1]) if numbered else None
    step = _integer(state.get("global_step"))
    history = state.get("log_history")
    for entry in history if isinstance(history, list) else ():
        if isinstance(entry, dict):
            logged.update(entry)
            if _integer(entry.get("step")) == (number_in_name if step is None else step):
                logged_here.update(entry)
    is_loss_earlier = "loss" in logged and "loss" not in logged_here
    fields: dict[str, tuple[Any, str]] = {
        "epoch": (_number(state.get("epoch")), f"{STATE} epoch"),
        "step": (step, f"{STATE} global_step"),
        "loss": (
            _number(logged.get("loss")),
            f"{STATE} log_history loss{EARLIER_STEP * is_loss_earlier}",
        ),
        "learning_rate": (_number(logged.get("learning_rate")), f"{STATE} log_history learning_rate"),
        "best": (_number(state.get("best_metric")), f"{STATE} best_metric"),
        "seed": (_integer(arguments.get("seed")), f"{ARGUMENTS} seed"),
    }
    if step is None:
        fields["step"] = (number_in_name, f"name {name}")
    hyper_parameters = {key: value for key, value in arguments.items() if key != "<class>"}
    if hyper_parameters:
        fields["hyper_parameters"] = (hyper_parameters, ARGUMENTS)
    metrics = {
        key: number
        for key, value in logged_here.items()
        if key.startswith("eval_")
        and _DURATION.fullmatch(key) is None
        and (number := _number(value)) is not None
    }
    origin = {field: where for field, (value, where) in fields.items() if value is not None}
    origin |= {f"metrics.{key}": f"{STATE} log_history {key}" for key in metrics}
    values = {field: value for field, (value, _) in fields.items()}
    return TrainingState(metrics=metrics, origin=origin, **values)


def _number(value: object) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
