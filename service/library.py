"""The studies whose results were read lately, and the storage they lie on."""

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pyarrow.fs as pafs

from service.results import StudyResults
from service.store import Study, StudyState
from trials.ledger import Ledger, LedgerError


def check_storage(address: str) -> None:
    """Write a small file, read it, and remove it.

    Raises:
        OSError, pyarrow.ArrowException, LedgerError: the storage does not take it, or does not give it back.
        ValueError: not the address of a storage.
    """
    name, content = f".ready-{uuid.uuid4().hex}", b"normstudy\n"
    place = Ledger(address)
    place.write_file(name, content)
    if place.read_file(name) != content:
        raise LedgerError("a file that was just written reads otherwise")
    files, base = pafs.FileSystem.from_uri(address)
    files.delete_file(f"{base}/{name}")


def no_progress(study: Study) -> dict[str, Any]:
    """The progress of a study whose ledger cannot be read."""
    return {
        "trials_total": study.trials,
        "trials_done": 0,
        "packs_total": study.packs,
        "packs_done": 0,
        "states": {},
        "trials_per_second": None,
        "seconds_left": None,
    }


class Library:
    """The studies whose results were read lately.

    Args:
        root_of: address of a study's folder, by its id.
        capacity: studies kept in memory.
    """

    def __init__(self, root_of: Callable[[str], str], capacity: int = 32):
        self._root_of, self._capacity = root_of, capacity
        self._open: OrderedDict[str, StudyResults] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, study: Study) -> StudyResults:
        with self._lock:
            results = self._open.pop(study.id, None) or StudyResults(study, self._root_of(study.id))
            self._open[study.id] = results
            while len(self._open) > self._capacity:
                self._open.popitem(last=False)
            return results

    def progress(self, study: Study) -> dict[str, Any]:
        """A study's progress: from the ledger while it is under way, as it was kept when it ended."""
        if study.progress is not None and StudyState(study.state).has_ended:
            return study.progress
        results = self.open(study)
        results.refresh()
        return results.progress(study)

    def is_tracked(self, study: Study) -> bool:
        """Whether MLflow has all it should have of the study by now."""
        if StudyState(study.state).has_ended:
            return study.published
        results = self.open(study)
        results.refresh()
        return results.is_tracked
