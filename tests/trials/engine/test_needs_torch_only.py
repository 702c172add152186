"""Training runs on a machine that has only torch (and NumPy): no Ray, no service, no file formats."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "mlflow", "fastapi", "pydantic", "yaml", "pyarrow", "pandas",
                                      "sklearn", "scipy", "filelock", "PIL", "torchvision", "httpx"}:
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
import numpy as np
from trials.engine import Dataset, PackRun, Split
from trials.engine.layers import AffineLikeLinear, PatchNormConv2d
from trials.engine.measure import choose_lanes_at_once
from trials.records import Pack, TrialConfig

def split(n):
    return Split(np.random.default_rng(n).standard_normal((n, 8), np.float32), np.arange(n) % 3)

trial = TrialConfig(dataset="npz", path=None, train_samples=None, validation_fraction=0.1, test_fraction=0.1,
                    split_seed=0, model="mlp", depth=1, width=4, activation="tanh", normaliser="affine_like",
                    optimiser="sgd", epochs=1, last_batch="drop", batch_size=4, learning_rate=0.1, seed=0)
pack, dataset = Pack("0" * 16, "alone", (trial,)), Dataset(split(40), split(10), split(10), 3, "none", (1, 1, 8))
run = PackRun(pack, dataset, lanes_at_once=choose_lanes_at_once(pack, dataset))
run.step()
print(run.results()[0].state)
"""


def test_a_pack_trains_without_any_other_library():
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "succeeded"), done.stderr
