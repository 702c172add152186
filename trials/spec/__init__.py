"""What a user may ask for: the study document, its checks, and the presets."""

from trials.spec.catalogue import DataFacts, facts_for
from trials.spec.documents import DocumentError, load_preset, parse_document, preset_names, preset_text
from trials.spec.issues import Issue, SpecError, nearest
from trials.spec.models import BatchSizeSlope, DataSpec, Normaliser, StudySpec, parse_spec, warnings_of

__all__ = [
    "BatchSizeSlope",
    "DataFacts",
    "DataSpec",
    "DocumentError",
    "Issue",
    "Normaliser",
    "SpecError",
    "StudySpec",
    "facts_for",
    "load_preset",
    "nearest",
    "parse_document",
    "parse_spec",
    "preset_names",
    "preset_text",
    "warnings_of",
]
