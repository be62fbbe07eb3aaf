"""The checks ``load`` and ``predict``: a checkpoint in its framework's hands, when all else is well.

The child process is started first, so that it imports the framework while this one reads the file; it is
told what to load only when nothing that was found forbids it.
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
            self.refusal = (
                "it isn't known to be safe: loading it could run code (--trust loads it all the same)"
            )
        else:
            try:
                self._job = job_for(checkpoint, request)
            except NotPredictable as reason:
                self.refusal = str(reason)
            else:
                self._child = PredictionChild(checkpoint.path, self._job.framework)

    def answer(self, *, has_failed: bool) -> Answer:
        """Return how loading and predicting went, or why neither was tried.

        Args:
            has_failed: Whether a check failed, so that it must not be loaded.
        """
        if self._child is None:
            return _skipped_answer(self.refusal or "")
        if not has_failed and _stamps(self._checkpoint) != self._as_opened:
            return _skipped_answer("it was changed while it was checked")
        return _skipped_answer("a check before failed") if has_failed else self._child.ask(self._job)

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.stop()


def _stamps(checkpoint: Checkpoint) -> Mapping[str, object]:
    """Return the stamps by which changes of opened files are noticed; nobody can set a change time.

    The child reads them once more, and what it is told to load is what was judged.
    """
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
