"""The training engine: data sets, models, normalisers, and a pack of trials trained together. Needs torch, not Ray."""

from trials.engine.data import DataError, Dataset, DataUnavailable, Split, load
from trials.engine.train import PackRun

__all__ = ["DataError", "DataUnavailable", "Dataset", "PackRun", "Split", "load"]
