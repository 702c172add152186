"""What planning a study of 100,000 trials takes: seconds, and memory at its peak.

    python -m benchmarks.planning [--rounds 5] [--json FILE]

Each round is a process of its own, which loads what the service loads to plan, and no torch.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from trials.plan import make_plan
from trials.spec import facts_for
from trials.spec.documents import parse_document, preset_text
from trials.spec.models import parse_spec

TRIALS = 100_000
HEAD = ("trials", "packs", "seconds", "memory before, MB", "at the peak, MB")


def main() -> None:
    from benchmarks.common import about, arguments, median, table, write_json  # loads torch: not in the rounds

    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    context = about(rounds=options.rounds)
    command = [sys.executable, "-c", "from benchmarks import planning; print(planning.plan_once())"]
    rounds = [
        json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        for _ in range(options.rounds)
    ]
    figures = {name: median([found[name] for found in rounds]) for name in rounds[0]}
    row = [
        *(f"{figures['trials']:,.0f}", f"{figures['packs']:,.0f}", f"{figures['seconds']:.2f}"),
        *(f"{figures['megabytes_before']:.0f}", f"{figures['megabytes']:.0f}"),
    ]
    markdown = table(HEAD, [row])
    print(markdown)
    content = {"about": context, "warm_up": "none: each round is a new process", "figures": figures}
    write_json(options.json, {**content, "rounds": rounds, "markdown": markdown})


def plan_once() -> str:
    """Plan the `batch-size-digits` preset with enough seeds for `TRIALS` trials; the figures as JSON."""
    document = parse_document(preset_text("batch-size-digits"), "yaml")
    spec = parse_spec({**document, "seeds": 1})
    facts = facts_for(spec.data, ())
    seeds = -(-TRIALS // make_plan(spec, facts).trials)
    before = _peak_megabytes()
    started = time.perf_counter()
    plan = make_plan(parse_spec({**document, "seeds": seeds}), facts)
    seconds = time.perf_counter() - started
    figures = {
        "trials": plan.trials,
        "packs": len(plan.packs),
        "seconds": seconds,
        "megabytes_before": before,
        "megabytes": _peak_megabytes(),
    }
    return json.dumps(figures)


def _peak_megabytes() -> float:
    """The most memory this process has held so far."""
    status = Path("/proc/self/status")
    if status.exists():  # rusage would count what the parent held when it forked
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # macOS: in bytes


if __name__ == "__main__":
    main()
