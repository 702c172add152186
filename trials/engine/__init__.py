"""The training engine: models, normalisers, and a pack of trials trained together. Needs torch and NumPy alone.

Loading data sets (`trials.engine.data`) needs the libraries of their formats besides.
"""

from trials.engine.dataset import Dataset, Split
from trials.engine.train import PackRun

__all__ = ["Dataset", "PackRun", "Split"]
