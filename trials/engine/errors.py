"""What can be wrong with a data set."""


class DataError(RuntimeError):
    """The data set is there and is not what it should be; the message says which file and row."""


class DataUnavailable(DataError):
    """The data set is not there and cannot be fetched; the message says what to do."""
