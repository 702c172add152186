"""What can be wrong with a data set, and how memory that ran out is told."""

import torch


class DataError(RuntimeError):
    """The data set is there and is not what it should be; the message says which file and row."""


class DataUnavailable(DataError):
    """The data set is not there and cannot be fetched; the message says what to do."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the device or on the host. PyTorch has no class of its own for the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)
