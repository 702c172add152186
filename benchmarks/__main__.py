"""All benchmarks, one after the other, and what they say together.

    make bench                            # about ten minutes on two quiet cores
    make bench ARGS="--only engine,tracking"
    make bench ARGS=--deep                # more rounds, a larger share for Tune: about forty minutes
    make bench ARGS=--quick               # whether everything runs; the figures are worth nothing

Each runs in a process of its own. Results go to benchmarks/results/latest.json and latest.md, and the
tables between the markers of docs/performance.md. What is not run keeps its earlier result, with the
time and the versions it was measured with.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import about, write_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- begin: written by `make bench` -->", "<!-- end: written by `make bench` -->"

TITLES = {
    "engine": "The engine on one core",
    "study": "A whole study",
    "tracking": "Tracking",
    "planning": "Planning 100,000 trials",
    "probes": "Probes",
}
DEPTHS: dict[str, dict[str, list[str]]] = {
    "default": {
        "engine": [],
        "study": [],
        "tracking": [],
        "planning": [],
        "probes": ["--rounds", "1"],
    },
    "deep": {
        "engine": ["--rounds", "15", "--seconds", "0.4"],
        "study": ["--rounds", "3", "--fraction", "0.3"],
        "tracking": ["--trials", "960", "--rounds", "5"],
        "planning": ["--rounds", "9"],
        "probes": ["--rounds", "5"],
    },
    "quick": {
        "engine": ["--widths", "16", "--batches", "32", "--lanes", "4", "--rounds", "1", "--seconds", "0.01"],
        "study": ["--fraction", "0.02"],
        "tracking": ["--trials", "24", "--rounds", "1"],
        "planning": ["--rounds", "1"],
        "probes": ["--rounds", "1"],
    },
}

# (what, at least, aim, the figure in the results)
Figure = Callable[[Mapping[str, Any]], float | None]


def _engine(name: str, least: bool = True, **shape: Any) -> Figure:
    """The worst (or the best) of a figure over the cells of a shape."""

    def figure(results: Mapping[str, Any]) -> float | None:
        cells = [
            cell["figures"][name]
            for cell in results.get("engine", {}).get("cells", [])
            if name in cell["figures"] and all(cell[key] in values for key, values in shape.items())
        ]
        return (min(cells) if least else max(cells)) if cells else None

    return figure


def _plain(benchmark: str, name: str) -> Figure:
    return lambda results: results.get(benchmark, {}).get("figures", {}).get(name)


def _at(width: int, batch_size: int) -> Figure:
    return _engine("best_over_plain", normaliser=["none"], width=[width], batch_size=[batch_size])


GOALS: list[tuple[str, float, float, Figure]] = [
    ("engine ÷ plain loop, W = 16, B = 8", 9, 14, _at(16, 8)),
    ("engine ÷ plain loop, W = 16, B = 32", 7, 10, _at(16, 32)),
    ("engine ÷ plain loop, W = 16, B = 128", 3.5, 5, _at(16, 128)),
    ("engine ÷ plain loop, W = 64, B = 8", 3.5, 5, _at(64, 8)),
    ("engine ÷ plain loop, W = 64, B = 32", 2, 3, _at(64, 32)),
    ("engine ÷ plain loop, W = 64, B = 128", 1.7, 2, _at(64, 128)),
    ("engine ÷ plain loop, the worst shape, lanes as picked", 1.0, 1.0, _engine("picked_over_plain")),
    (
        "share of `torch.mm`'s peak, B ≥ 128, the worst shape",
        0.7,
        0.9,
        _engine("share_of_mm_peak", batch_size=[128, 512]),
    ),
    ("share of the core's peak, B ≥ 128, the worst shape", 0.7, 0.9, _engine("share_of_peak", batch_size=[128, 512])),
    ("engine ÷ JAX, the same pack, the worst shape", 1.0, 1.5, _engine("over_jax_same_pack")),
    ("engine ÷ JAX, the same pack, the best shape", 1.0, 1.5, _engine("over_jax_same_pack", least=False)),
    ("whole study through the service ÷ Ray Tune with plain loops", 8, 20, _plain("study", "ratio")),
    ("tracking: CPU per trial of 50 metrics, ms (at most)", -25, -10, _plain("tracking", "cpu_ms")),
    ("POST to the first pack's start, stack up, s (at most)", -10, -5, _plain("study", "seconds_to_first_pack")),
    ("planning 100,000 trials, s (at most)", -2, -2, _plain("planning", "seconds")),
    ("planning 100,000 trials, MB at the peak (at most)", -300, -300, _plain("planning", "megabytes")),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--deep", dest="depth", action="store_const", const="deep", default="default")
    depth.add_argument("--quick", dest="depth", action="store_const", const="quick")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(TITLES), help=", ".join(TITLES))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="of the engine's benchmark")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of latest.json and latest.md")
    options = parser.parse_args()
    if unknown := set(options.only) - set(TITLES):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(TITLES)}")
    latest = options.output / "latest.json"
    results: dict[str, Any] = json.loads(latest.read_text()) if latest.exists() else {}
    failed = []
    for name in options.only:
        if find_spec(f"benchmarks.{name}") is None:
            continue
        arguments = DEPTHS[options.depth][name] + (["--clock", options.clock] if name == "engine" else [])
        print(f"\n{TITLES[name]}: python -m benchmarks.{name} {' '.join(arguments)}", file=sys.stderr, flush=True)
        found = run(name, arguments)
        if found is None:
            failed.append(name)
            continue
        results[name] = found
        write_json(latest, results)
        text = markdown(results)
        (options.output / "latest.md").write_text(f"# Benchmarks\n\n{text}\n")
        if options.output == RESULTS and options.depth != "quick":
            publish(text)
    print("\n" + markdown(results))
    if failed:
        print(f"failed: {', '.join(failed)}; what they said is above", file=sys.stderr)
    return 1 if failed else 0


def run(name: str, arguments: list[str]) -> dict[str, Any] | None:
    """One benchmark in its own process; None where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        writes = name != "probes"  # it prints only
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, *(["--json", str(file)] if writes else [])]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        seconds = round(time.perf_counter() - began, 1)
        if done.returncode:
            print(done.stdout, file=sys.stderr)
            return None
        if writes:
            found = json.loads(file.read_text())
        else:
            found = {"about": about(), "warm_up": "one epoch", "markdown": f"```\n{done.stdout.strip()}\n```"}
    return {**found, "arguments": arguments, "took_seconds": seconds}


def markdown(results: Mapping[str, Any]) -> str:
    """The goals with what was reached, and each benchmark's own table under what it was measured with."""
    parts = [goals(results)]
    for name, title in TITLES.items():
        if name in results:
            parts.append(f"### {title}\n\n{_context(results[name])}\n\n{results[name]['markdown']}")
    return "\n\n".join(parts)


def goals(results: Mapping[str, Any]) -> str:
    lines = ["| what | at least | aim | measured | |", "|---|---|---|---|---|"]
    for what, least, aim, figure in GOALS:
        value = figure(results)
        sign = -1 if least < 0 else 1  # a goal below zero is a most and not a least
        if value is None:
            shown, mark = "not measured", ""
        else:
            shown = f"{value:.0%}" if "share" in what else f"{value:.3g}"
            mark = "aim" if sign * value >= aim else "reached" if sign * value >= least else "**missed**"
        form = ".0%" if "share" in what else "g"
        lines.append(f"| {what} | {format(abs(least), form)} | {format(abs(aim), form)} | {shown} | {mark} |")
    return "\n".join(lines)


def _context(found: Mapping[str, Any]) -> str:
    known = found["about"]
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    fixed = {"time", "cpu", "cores", "load_average", "python", "versions"}
    more = "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in known.items() if name not in fixed)
    return (
        f"{known['time']}; {known['cpu']}, {known['cores']} cores, load average at the start "
        f"{known['load_average'][0]}; Python {known['python']}, {versions}; {more + '; ' if more else ''}"
        f"warm-up: {found['warm_up']}; took {found['took_seconds']:.0f} s."
    )


def publish(text: str) -> None:
    """Put the tables between the markers of the page."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"{PAGE} has lost its markers, {BEGIN} and {END}")
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
