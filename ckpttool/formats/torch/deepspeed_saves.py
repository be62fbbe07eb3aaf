"""Whether the files of all ranks are of one save: all that they count must be the same.

Source: deepspeedai/DeepSpeed ``deepspeed/runtime/engine.py`` and ``deepspeed/runtime/zero/stage_1_and_2.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats.torch.deepspeed_zero import STATES
from ckpttool.report import Finding, error

_OF_A_JOB = ("dp_world_size", "mp_world_size")
_INNER = ("base_optimizer_state", "optimizer_state_dict")
"""Where the optimizer's own state lies: in stages 1 and 2, and in stage 3."""


def check_model_states(parts: Mapping[str, Checkpoint]) -> Iterator[Finding]:
    """Yield where model states, by the names of their files, are of another step or job than the first."""
    if not parts:
        return
    first = next(iter(parts.values()))
    for name, part in parts.items():
        step, other = part.metadata.get("global_steps"), first.metadata.get("global_steps")
        if step != other:
            yield error(
                "part-stale", f"saved at step {step!r:.20}, and the first rank's at {other!r:.20}", name
            )
        for key in _OF_A_JOB:
            found, wanted = part.metadata.get(key), first.metadata.get(key)
            if found != wanted:
                message = f"{key} is {found!r:.20}, and the first rank's is {wanted!r:.20}"
                yield error("part-stale", message, name)


def check_optimizers(parts: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Yield where a rank's optimizer has made another number of steps than the first rank's.

    A step that is a tensor isn't read: it is compared by the checksum that its file states of it.
    """
    if len(parts) < 2:
        return
    first, *others = parts
    steps, sums = _steps(first), _sums(first)
    for part in others:
        name = os.path.basename(part.path)
        for key, step in _steps(part).items():
            if steps.get(key, step) != step:
                yield error(
                    "part-stale", f"{key} is {step!r:.20}, and the first rank's {steps[key]!r:.20}", name
                )
                break
        else:
            if any(sums.get(path, found) != found for path, found in _sums(part).items()):
                message = "its optimizer has made another number of steps than the first rank's"
                yield error("part-stale", message, name)


def _steps(part: Checkpoint) -> dict[str, object]:
    """Return what is counted as plain numbers: steps of each group, learning rates, the loss scaler's."""
    told = part.metadata.get(STATES)
    outer = told if isinstance(told, Mapping) else {}
    inner: Mapping[str, object] = next(
        (outer[key] for key in _INNER if isinstance(outer.get(key), Mapping)), {}
    )
    found: dict[str, object] = {}
    states, groups = inner.get("state"), inner.get("param_groups")
    for key, state in states.items() if isinstance(states, Mapping) else ():
        _take(found, f"state {key}'s step", state, "step")
    for at, group in enumerate(groups if isinstance(groups, list) else ()):
        _take(found, f"group {at}'s step", group, "step")
        _take(found, f"group {at}'s learning rate", group, "lr")
    _take(found, "the loss scaler's iteration", outer.get("loss_scaler"), "cur_iter")
    return found


def _take(found: dict[str, object], name: str, tree: object, key: str) -> None:
    value = tree.get(key) if isinstance(tree, Mapping) else None
    if type(value) in (int, float):
        found[name] = value


def _sums(part: Checkpoint) -> dict[tuple[object, ...], int]:
    """Return the stated checksums of steps that are tensors of one element, by their paths."""
    steps = [
        one for one in part.tensors if one.path[-1] == "step" and one.size == 1 and one.path[0] == STATES
    ]
    if not steps:
        return {}
    stated = {(span.extent.offset, span.extent.nbytes): span.crc32 for span in part.spans()}
    places = {one.path: one.storage or one.extent for one in steps}
    return {
        path: found
        for path, place in places.items()
        if place is not None and (found := stated.get((place.offset, place.nbytes))) is not None
    }
