"""A whole study through the service against Ray Tune with one plain-loop trial per actor.

    python -m benchmarks.study [--preset batch-size-digits] [--fraction 0.15] [--rounds 1] [--json FILE]

The service's time is from POST to the study's end: submission, the driver's start, training, tracking
in MLflow, analysis and report. The stack (Ray, MLflow, the service) is up before. Tune's time is that
of `Tuner.fit` on a Ray that is up before, without tracking, analysis or report (`benchmarks.tune_loop`).

Tune trains a share of the trials, spread evenly over the cells, and its time is scaled by their
number; what it takes until its first trial begins is counted once and not scaled. The last training
losses of the two are compared, trial by trial, so that both are known to have done the same work.
"""

import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.common import about, arguments, median, table, write_json
from service.client import Client
from service.parts import usable_cores
from service.stack import Stack, interruptible
from trials.engine.data import load
from trials.ledger import Ledger
from trials.plan import make_plan
from trials.records import TrialConfig
from trials.spec.catalogue import facts_for
from trials.spec.documents import load_preset, preset_text

HEAD = ("way", "trials run", "seconds", "scaled to all trials, s", "trials/s", "median difference of losses")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--preset", default="batch-size-digits", help="one whose data need no download")
    parser.add_argument("--fraction", type=float, default=0.15, help="share of the trials that Tune runs")
    parser.add_argument("--rounds", type=int, default=1, help="of both, in turns")
    options = parser.parse_args()
    from benchmarks.tune_loop import run_tune

    cores = usable_cores()
    context = about(preset=options.preset, rounds=options.rounds, fraction=options.fraction, used_cores=cores)
    spec = load_preset(options.preset)
    plan = make_plan(spec, facts_for(spec.data, ()))
    dataset = load(spec.data, (), Path(tempfile.gettempdir()))
    trials = [trial for pack in plan.packs for trial in pack.trials]
    some = spread(trials, options.fraction)
    service, tune, differences = [], [], []
    for _ in range(options.rounds):
        seconds, account, losses = run_study(options.preset)
        service.append({"seconds": seconds, **account})
        print(f"service: {len(trials)} trials in {seconds:.1f} s", file=sys.stderr, flush=True)
        start, training, tune_losses = run_tune(some, dataset, cores)
        tune.append({"seconds_to_first_trial": start, "seconds_after": training})
        print(f"Tune: {len(some)} trials in {start:.1f} + {training:.1f} s", file=sys.stderr, flush=True)
        differences.append(difference(losses, tune_losses))
    ours = median([run["seconds"] for run in service])
    theirs = median([run["seconds_to_first_trial"] + run["seconds_after"] for run in tune])
    scale = len(trials) / len(some)
    scaled = median([run["seconds_to_first_trial"] + run["seconds_after"] * scale for run in tune])
    rows = [
        ["the service", str(len(trials)), f"{ours:.1f}", f"{ours:.1f}", f"{len(trials) / ours:.1f}", "–"],
        [
            *("Ray Tune, plain loop", str(len(some)), f"{theirs:.1f}", f"{scaled:.1f}", f"{len(trials) / scaled:.2f}"),
            f"{median(differences):.1e}",
        ],
    ]
    ratio = scaled / ours
    markdown = table(HEAD, rows) + f"\n\nThe study through the service is **{ratio:.1f} times** as fast."
    wait = median([run["seconds_to_first_pack"] for run in service])
    markdown += f" Its first pack began {wait:.1f} s after the POST."
    last = service[-1]
    markdown += (
        f" Of the driver's {last['wall_seconds']:.1f} s Tune had the packs for {last['fit_seconds']:.1f} s; "
        f"the actors trained for {last['training_seconds']:.1f} s in all, "
        f"and the tracking thread was busy for {last['tracking_seconds']:.1f} s."
    )
    print(markdown)
    figures = {
        "ratio": ratio,
        "seconds_to_first_pack": wait,
        "service_seconds": ours,
        "tune_seconds_scaled": scaled,
        "loss_difference": differences,
    }
    content = {"about": context, "warm_up": "both stacks up", "figures": figures, "service": service, "tune": tune}
    write_json(options.json, {**content, "markdown": markdown})


def run_study(preset: str) -> tuple[float, dict[str, Any], dict[str, float | None]]:
    """Seconds from POST to the end on a fresh stack, the driver's own account, and training losses by trial key."""
    with tempfile.TemporaryDirectory(prefix="normstudy-bench-") as folder:
        stack = Stack(Path(folder))
        state = stack.start()
        try:
            with Client(state.api) as client:
                began = time.perf_counter()
                study = client.submit(preset_text(preset))
                study = client.wait(study["id"], meanwhile=stack.tend, pause=0.1, timeout=3600)
                seconds = time.perf_counter() - began
                if study["state"] != "COMPLETED":
                    raise RuntimeError(f"the study is {study['state']}: {study['reason']}")
                results = pq.read_table(io.BytesIO(client.export(study["id"], "parquet")))
            ledger = Ledger(str(stack.folder.studies / study["id"]))
            account = json.loads(ledger.read_file("attempts/1.json"))
            first = min(ledger.provenance(key)["started_at"] for key in ledger.finished())
            submitted = datetime.fromisoformat(study["created_at"])
            account["seconds_to_first_pack"] = (datetime.fromisoformat(first) - submitted).total_seconds()
        finally:
            stack.stop()
    losses = dict(zip(results["trial_key"].to_pylist(), results["train_loss"].to_pylist(), strict=True))
    return seconds, account, losses


def spread(trials: Sequence[TrialConfig], fraction: float) -> list[TrialConfig]:
    """A share of the trials at even distances in the plan's order, which goes by cell: each batch size alike."""
    count = max(1, round(len(trials) * fraction))
    return [trials[int((place + 0.5) * len(trials) / count)] for place in range(count)]


def difference(losses: dict[str, float | None], tune: dict[str, float]) -> float:
    """Median relative difference over the trials that both have; unstable trainings differ, by rounding alone."""
    pairs = [(ours, theirs) for key, theirs in tune.items() if (ours := losses.get(key)) is not None]
    return float(np.median([abs(ours - theirs) / max(abs(theirs), 1e-3) for ours, theirs in pairs]))


if __name__ == "__main__":
    with interruptible():  # so that a signal leaves nothing running
        main()
