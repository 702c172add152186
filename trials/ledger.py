"""The truth about a study: one atomic Parquet shard per finished pack.

    <storage>/<study id>/
        spec.json            written by the service at submission
        shards/<pack>.parquet   written by the pack's actor, once, when it has ended
        lanes/<pack>.json       how many of its trials train at once, as first measured
        checkpoints/<pack>.npz  where a long pack is; deleted when it has ended
        tracked/<pack>.json     written by the tracking thread once MLflow has the pack
        data.json            checksum of the data set, written by the first attempt
        attempts/<n>.json    where an attempt's time went, written by its driver
        analysis/…           results.parquet (all trials in the plan's order), verdict.json and report.html,
                             written by the service when the study has ended

*Run a study* always means: plan − ledger → run the missing packs. Any file system that
pyarrow knows (local, NFS, S3) will do; a file is visible whole or not at all.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from trials.plan import Plan
from trials.records import Pack, Reason, TrialResult, TrialState
from trials.table import RESULTS_SCHEMA, conform, results_table

_META_KEY = b"normstudy.pack"


class LedgerError(RuntimeError):
    """A file of the ledger is missing, damaged, or not of this study."""


class Ledger:
    """One study's folder. Cheap to make; safe to use from several processes at once.

    Args:
        root: path or URI of the study's folder (`file:///…`, `s3://…`, or an absolute path).
    """

    def __init__(self, root: str):
        self.root = root
        self._fs, self._base = pafs.FileSystem.from_uri(root)
        self._verified: dict[str, tuple[int, Any]] = {}  # shard name → (size, mtime) once its footer was read

    # -- shards ------------------------------------------------------------------------------

    def append(self, pack: Pack, results: Sequence[TrialResult], provenance: Mapping[str, Any]) -> None:
        """Record a finished pack, atomically. `provenance` (timing, host, versions) goes into the
        file's metadata, not into rows: rows must be the same however often a pack is run.

        A shard that is already there and readable stays: results are deterministic, so a late
        duplicate adds nothing. Only a pack that was `lost` is replaced, and is then untracked again.

        Raises:
            LedgerError: where `results` are not exactly the pack's trials, in its order.
        """
        if tuple(r.config for r in results) != pack.trials:
            raise LedgerError(f"results of pack {pack.label} are not its {len(pack.trials)} trials in order")
        if self._is_readable(pack.key):
            if not self._is_lost(pack.key):
                return
            self._delete(f"{self._base}/tracked/{pack.key}.json")
        table = results_table([pack.key] * len(results), results)
        metadata = {_META_KEY: json.dumps(dict(provenance), allow_nan=False).encode()}
        sink = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata(metadata), sink)
        self._write(self._shard(pack.key), sink.getvalue().to_pybytes())
        self.drop_checkpoint(pack.key)

    def finished(self) -> set[str]:
        """Keys of the packs with a readable shard. A truncated or damaged shard does not count."""
        return set(self.finished_at())

    def finished_at(self) -> dict[str, float]:
        """When each finished pack's shard was written (Unix time, by the storage's clock)."""
        selector = pafs.FileSelector(f"{self._base}/shards", allow_not_found=True)
        written: dict[str, float] = {}
        for info in self._fs.get_file_info(selector):
            if info.extension != "parquet":
                continue
            key = info.base_name.removesuffix(".parquet")
            stamp = (info.size, info.mtime_ns)
            if self._verified.get(key) == stamp or self._is_readable(key):
                self._verified[key] = stamp
                written[key] = (info.mtime_ns or 0) / 1e9
        return written

    def missing(self, plan: Plan) -> list[Pack]:
        """The packs of the plan that have yet to run, in order."""
        finished = self.finished()
        return [pack for pack in plan.packs if pack.key not in finished]

    def to_run(self, plan: Plan) -> list[Pack]:
        """What a new attempt has to run: the missing packs, and those whose worker was lost."""
        finished = self.finished()
        return [pack for pack in plan.packs if pack.key not in finished or self._is_lost(pack.key)]

    def shard(self, pack_key: str) -> pa.Table:
        """The rows of one finished pack, by this release or an earlier one.

        Raises:
            LedgerError: where the shard is missing or damaged.
        """
        try:
            with pq.ParquetFile(self._shard(pack_key), filesystem=self._fs) as file:
                return conform(file.read())
        except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: a table of other columns
            raise LedgerError(f"shard {pack_key} cannot be read: {error}") from error

    def provenance(self, pack_key: str) -> dict[str, Any]:
        """Timing, host and versions of one finished pack's run."""
        metadata = pq.read_schema(self._shard(pack_key), filesystem=self._fs).metadata or {}
        return json.loads(metadata.get(_META_KEY, b"{}"))

    def table(self, plan: Plan, absent: tuple[TrialState, Reason] | None = None) -> pa.Table:
        """All trials in the plan's order.

        Trials without a shard are left out, or get a row in the state `absent` says.
        """
        finished = self.finished()
        parts: list[pa.Table] = []
        for pack in plan.packs:
            if pack.key in finished:
                parts.append(self.shard(pack.key))
            elif absent is not None:
                gone = [TrialResult.absent(trial, *absent) for trial in pack.trials]
                parts.append(results_table([pack.key] * len(gone), gone))
        return pa.concat_tables(parts) if parts else RESULTS_SCHEMA.empty_table()

    # -- packs under way -------------------------------------------------------------------------

    def lanes_at_once(self, pack_key: str) -> int | None:
        """How many of the pack's trials train at once; None where nobody has said so yet, or the file is damaged."""
        name = f"lanes/{pack_key}.json"
        try:
            lanes = json.loads(self.read_file(name))["lanes_at_once"] if self.has_file(name) else None
        except (ValueError, TypeError, KeyError):
            lanes = None
        return lanes if type(lanes) is int and lanes >= 1 else None

    def keep_lanes_at_once(self, pack_key: str, lanes: int) -> None:
        """Settle it for this and every later attempt."""
        self._write(f"{self._base}/lanes/{pack_key}.json", json.dumps({"lanes_at_once": lanes}).encode())

    def checkpoint(self, pack_key: str) -> bytes | None:
        """The pack's last checkpoint, if it has one."""
        name = f"checkpoints/{pack_key}.npz"
        return self.read_file(name) if self.has_file(name) else None

    def keep_checkpoint(self, pack_key: str, content: bytes) -> None:
        """Replace the pack's checkpoint."""
        self._write(f"{self._base}/checkpoints/{pack_key}.npz", content)

    def drop_checkpoint(self, pack_key: str) -> None:
        """Delete the pack's checkpoint, if there is one."""
        self._delete(f"{self._base}/checkpoints/{pack_key}.npz")

    # -- what MLflow already has -----------------------------------------------------------------

    def mark_tracked(self, pack_key: str, run_ids: Sequence[str]) -> None:
        """Note that MLflow has every trial of the pack."""
        self._write(f"{self._base}/tracked/{pack_key}.json", json.dumps({"run_ids": list(run_ids)}).encode())

    def tracked(self) -> set[str]:
        """Keys of the packs that MLflow has."""
        selector = pafs.FileSelector(f"{self._base}/tracked", allow_not_found=True)
        infos = self._fs.get_file_info(selector)
        return {info.base_name.removesuffix(".json") for info in infos if info.extension == "json"}

    # -- other files -----------------------------------------------------------------------------

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file of the study's folder, atomically; `name` may have folders."""
        self._write(f"{self._base}/{name}", content)

    def read_file(self, name: str) -> bytes:
        """
        Raises:
            LedgerError: where there is no such file.
        """
        try:
            with self._fs.open_input_stream(f"{self._base}/{name}") as stream:
                return stream.read()
        except OSError as error:
            raise LedgerError(f"no {name} in {self.root}: {error}") from error

    def has_file(self, name: str) -> bool:
        return self._fs.get_file_info(f"{self._base}/{name}").type == pafs.FileType.File

    def _shard(self, pack_key: str) -> str:
        return f"{self._base}/shards/{pack_key}.parquet"

    def _is_readable(self, pack_key: str) -> bool:
        """Whether the shard is whole: a Parquet file's footer is its end, a damaged page fails the read."""
        if self._fs.get_file_info(self._shard(pack_key)).type != pafs.FileType.File:
            return False
        try:
            self.shard(pack_key)
        except LedgerError:
            return False
        return True

    def _is_lost(self, pack_key: str) -> bool:
        return TrialState.LOST in self.shard(pack_key)["state"].to_pylist()

    def _delete(self, path: str) -> None:
        if self._fs.get_file_info(path).type == pafs.FileType.File:
            self._fs.delete_file(path)

    def _write(self, path: str, content: bytes) -> None:
        folder, name = path.rsplit("/", 1)
        self._fs.create_dir(folder, recursive=True)
        if isinstance(self._fs, pafs.S3FileSystem):  # an S3 object appears whole when its upload ends
            with self._fs.open_output_stream(path) as stream:
                stream.write(content)
            return
        temporary = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"
        with self._fs.open_output_stream(temporary) as stream:
            stream.write(content)
        self._fs.move(temporary, path)
