"""Ray Tune: one Tune trial is one pack, trained by an actor that is reused for the next pack.

Tune gives what a cluster needs (placement, reuse, retries of lost workers, the dashboard).
What it does not give is the record of the study: the actor itself writes each finished pack's
shard to the ledger, so nothing depends on Tune's own snapshots.
"""

import contextlib
import logging
import os
import platform
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

# Quiet and without Tune's own result files: set before ray.tune is imported.
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_MAX_PENDING_TRIALS_PG", "16")

import ray
import torch
from ray import tune
from ray.exceptions import RayError, RayTaskError

from trials.engine.checkpoints import CheckpointError
from trials.engine.data import Dataset
from trials.engine.errors import is_out_of_memory
from trials.engine.measure import choose_lanes_at_once, fewer
from trials.engine.train import PackRun
from trials.ledger import Ledger, LedgerError
from trials.records import Pack, Reason, TrialResult, TrialState
from trials.spec import StudySpec

log = logging.getLogger(__name__)

LOST_WORKER_RETRIES = 2
STEP_SECONDS = 1.0
"""A step trains whole epochs for about this long: each report costs the driver some 10 ms, and a study
of small packs has thousands of epochs."""


CHECKPOINT_SECONDS = 60.0
"""Between a pack's checkpoints: what a lost worker or a killed study has to do again, at most."""


class Unschedulable(RuntimeError):
    """The cluster can never place one pack of this study."""


class PackTrainable(tune.Trainable):
    """Trains one pack, some epochs per `step`, and writes its shard when it has ended.

    An exception inside the training is a result (`failed`, with the traceback in the shard's
    provenance and the log): the same pack would raise again. Anything else that goes wrong
    (a full disk, a lost worker) is left to Tune's retries and then to the next attempt.
    """

    def setup(self, config: dict[str, Any], **shared: Any) -> None:
        self._packs: Sequence[Pack] = shared["packs"]
        self._dataset: Dataset = shared["dataset"]
        self._ledger = Ledger(shared["ledger_root"])
        self._study_name: str = shared["study_name"]
        self._attempt: int = shared["attempt"]
        self._threads: int = shared["threads"]
        self._device: str = shared["device"]
        torch.set_num_threads(self._threads)
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        self._pack = self._packs[config["pack"]]
        self._run: PackRun | None = None
        self._started_at = datetime.now(UTC)
        self._seconds = 0.0
        print(f"pack {self._pack.label}: {len(self._pack.trials)} lanes", flush=True)  # the actor's log

    def __repr__(self) -> str:
        # Ray reads this once, when the actor is made, and the actor goes on to other packs: so the
        # actor is named after the study, and its process title (see `step`) after the pack.
        return self._study_name

    def step(self) -> dict[str, Any]:
        started = time.perf_counter()
        try:
            _set_process_title(f"ray::{self._study_name}/{self._pack.label}")
            while not self._finished() and time.perf_counter() - started < STEP_SECONDS:
                self._advance()
            done, error = self._finished(), None
            results = self._run.results() if done and self._run else None
        except (OSError, LedgerError):  # of the storage, not of the pack
            raise
        except Exception:
            error = traceback.format_exc()
            log.exception("pack %s failed", self._pack.label)
            done = True
            results = [TrialResult.absent(t, TrialState.FAILED, Reason.PACK_ERROR) for t in self._pack.trials]
        self._seconds += time.perf_counter() - started
        if results is not None:
            self._ledger.append(self._pack, results, self._provenance(error))
        epoch = self._run.epoch if self._run else 0
        return {"epoch": epoch, "training_seconds": self._seconds, "done": done}

    def _start(self) -> PackRun:
        """Begin the pack, or go on from its checkpoint, with as many lanes at once as its first attempt had."""
        lanes = self._ledger.lanes_at_once(self._pack.key)
        if lanes is None:
            lanes = choose_lanes_at_once(self._pack, self._dataset, self._device)
            self._ledger.keep_lanes_at_once(self._pack.key, lanes)
        run = PackRun(self._pack, self._dataset, self._device, lanes_at_once=lanes)
        self._kept_at = time.monotonic()
        if (content := self._ledger.checkpoint(self._pack.key)) is not None:
            try:
                run.restore(content)
            except CheckpointError as error:
                log.warning("pack %s begins anew: %s", self._pack.label, error)
                run = PackRun(self._pack, self._dataset, self._device, lanes_at_once=lanes)
        return run

    def _advance(self) -> None:
        """Train an epoch; where memory runs out, halve the lanes and go on from the last checkpoint."""
        try:
            self._run = self._run or self._start()
            self._run.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            lanes = self._ledger.lanes_at_once(self._pack.key) or len(self._pack.trials)
            if fewer(lanes) >= lanes:
                raise
            log.warning("pack %s: out of memory; %d lanes at once from here", self._pack.label, fewer(lanes))
            self._ledger.keep_lanes_at_once(self._pack.key, fewer(lanes))
            self._run = None  # its memory goes before the next one's comes
            return
        if not self._run.finished and time.monotonic() - self._kept_at > CHECKPOINT_SECONDS:
            self._ledger.keep_checkpoint(self._pack.key, self._run.checkpoint())
            self._kept_at = time.monotonic()

    def _finished(self) -> bool:
        return self._run is not None and self._run.finished

    def _provenance(self, error: str | None) -> dict[str, Any]:
        return {
            "started_at": self._started_at.isoformat(),
            "seconds": self._seconds,
            "lanes": len(self._pack.trials),
            "lanes_at_once": self._run.lanes_at_once if self._run else None,
            "attempt": self._attempt,
            "host": platform.node(),
            "device": self._device,
            "threads": self._threads,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "ray": ray.__version__},
            "error": error,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        return None  # the ledger has a pack's checkpoints: they outlive Tune's folder and serve later attempts

    def load_checkpoint(self, checkpoint: Any) -> None:
        return None


def run_packs(spec: StudySpec, packs: Sequence[Pack], dataset: Dataset, ledger: Ledger, *, attempt: int) -> None:
    """Train packs on the cluster that `ray.init` has joined; returns when each has ended.

    Packs whose worker died more often than is retried are recorded as `lost`. A pack that is
    still missing from the ledger afterwards is for the caller to see (plan − ledger).

    Raises:
        Unschedulable: no node of the cluster has room for a pack.
    """
    resources = {"CPU": spec.resources.cpus_per_pack, "GPU": spec.resources.gpus_per_pack}
    _check_schedulable(resources)
    trainable = _named_trainable(spec.name, resources)
    with_shared = tune.with_parameters(
        trainable,
        packs=tuple(packs),
        dataset=dataset,
        ledger_root=ledger.root,
        study_name=spec.name,
        attempt=attempt,
        threads=spec.resources.cpus_per_pack,
        device="cuda" if spec.resources.gpus_per_pack else "cpu",
    )
    with_shared.__qualname__ = trainable.__name__  # of the wrapper: what Ray shows as the actor's class
    in_flight = None if spec.resources.packs_in_flight == "auto" else spec.resources.packs_in_flight
    with tempfile.TemporaryDirectory(prefix="normstudy-tune-") as scratch:
        tuner = tune.Tuner(
            with_shared,
            param_space={"pack": tune.grid_search(list(range(len(packs))))},
            tune_config=tune.TuneConfig(
                reuse_actors=True,
                max_concurrent_trials=in_flight,
                trial_name_creator=lambda trial: f"{spec.name}/{packs[trial.config['pack']].label}",
                trial_dirname_creator=lambda trial: f"pack-{trial.config['pack']}",
            ),
            run_config=tune.RunConfig(
                name="study",
                storage_path=scratch,
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=LOST_WORKER_RETRIES),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        )
        results = tuner.fit()
    for result in results:
        error = result.error
        if error is None or result.config is None:
            continue
        pack = packs[result.config["pack"]]
        log.error("pack %s: %s", pack.label, error)
        if isinstance(error, RayError) and not isinstance(error, RayTaskError):  # not an exception of our own code
            lost = [TrialResult.absent(trial, TrialState.LOST, Reason.WORKER_LOST) for trial in pack.trials]
            now = datetime.now(UTC).isoformat()
            ledger.append(pack, lost, {"started_at": now, "seconds": 0.0, "attempt": attempt, "error": str(error)})


def _check_schedulable(resources: dict[str, float]) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(kind, 0) >= amount for kind, amount in resources.items()) for node in nodes):
        return
    want = ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items() if amount)
    have = "; ".join(f"{node.get('CPU', 0):g} CPU, {node.get('GPU', 0):g} GPU" for node in nodes)
    raise Unschedulable(f"a pack asks for {want}, but the cluster's nodes have {have}")


def _named_trainable(study_name: str, resources: dict[str, float]) -> type[PackTrainable]:
    """`PackTrainable` under the study's name, which is what Ray's dashboard lists actors by.

    The resources are a method of the class and not `tune.with_resources`, which would wrap the
    class in one of its own name.
    """
    name = "Pack_" + "".join(c if c.isalnum() else "_" for c in study_name)
    bundle = {kind: amount for kind, amount in resources.items() if amount}
    request = classmethod(lambda cls, config: tune.PlacementGroupFactory([bundle]))
    return type(name, (PackTrainable,), {"default_resource_request": request})


def _set_process_title(title: str) -> None:
    # Ray's own function: a second library cannot find the title's memory once Ray has written to it.
    # It is not public, so its absence must not hurt.
    with contextlib.suppress(AttributeError):
        getattr(ray, "_raylet").setproctitle(title)  # noqa: B009
