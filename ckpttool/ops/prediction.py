"""The checks ``load`` and ``predict``: loading a checkpoint in its framework, if all other checks passed.

The child process is started first, so that it imports the framework while this one reads the file. It gets
the path to load only if no finding forbids that.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ckpttool.core.report import has_errors, is_safe
from ckpttool.predict.jobs import NotPredictable, job_for
from ckpttool.predict.run import Answer, PredictionChild, StageResult
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.predict.request import PredictionRequest


class Prediction(AbstractContextManager["Prediction"]):
    """One checkpoint's prediction, from the child's start to its answer; leaving it ends the child.

    Raises:
        MissingPackage: The framework is not installed.
    """

    def __init__(self, checkpoint: Checkpoint, request: PredictionRequest) -> None:
        self._child: PredictionChild | None = None
        self._checkpoint, self._as_opened = checkpoint, _stamps(checkpoint)
        self.refusal: str | None = None
        if has_errors(checkpoint.findings):
            self.refusal = "its structure is damaged"
        elif not (request.trust or is_safe(checkpoint.safety)):
            self.refusal = "it isn't known to be safe: loading it could run code (--trust loads it anyway)"
        else:
            try:
                self._job = job_for(checkpoint, request)
            except NotPredictable as reason:
                self.refusal = str(reason)
            else:
                self._child = PredictionChild(checkpoint.path, self._job.framework)

    def answer(self, *, has_failed: bool) -> Answer:
        """Return the results of loading and predicting, or why neither was tried.

        Args:
            has_failed: Whether a check failed, which forbids loading.
        """
        if self._child is None:
            return _skipped_answer(self.refusal or "")
        if not has_failed and _stamps(self._checkpoint) != self._as_opened:
            return _skipped_answer("it changed while it was checked")
        return _skipped_answer("an earlier check failed") if has_failed else self._child.ask(self._job)

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.stop()


def _stamps(checkpoint: Checkpoint) -> Mapping[str, object]:
    """Return stamps of the opened files, by which the child notices changes before it loads them."""
    # They include the change time (ctime), which, unlike the modification time, no program can set. So the
    # child loads exactly the files that were checked, or refuses.
    stamps: dict[str, object] = {}
    for entry in checkpoint.files:
        try:
            status = fs.stat(entry.path)
        except OSError:
            stamps[entry.path] = None
        else:
            stamps[entry.path] = (
                *(status.st_dev, status.st_ino, status.st_size),
                *(status.st_mtime_ns, status.st_ctime_ns),
            )
    return stamps


def _skipped_answer(reason: str) -> Answer:
    """Return the answer of a checkpoint that is not loaded."""
    return Answer(
        StageResult("load", reason, is_skipped=True),
        StageResult("predict", "it was not loaded", is_skipped=True),
    )
