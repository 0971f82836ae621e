"""What system claims ask of a subject, in plain Python objects and NumPy arrays: one protocol a subject matter.

A subject opens by `subject.door(name)` those that it has; for another it raises Lacks, and the claim is NOT_RUN with that reason.
"""

from blackswan.falsifiers.subjects.doors.corpora import Batch, Corpora, CorpusFile, Label, Split, Statistics, Tokenizing, TokenRows
from blackswan.falsifiers.subjects.doors.devices import Chosen, Devices, PlacedTrainer, Plant, Workload
from blackswan.falsifiers.subjects.doors.files import AdapterSettings, Files, LoadedAdapter
from blackswan.falsifiers.subjects.doors.lacks import Lacks, Session
from blackswan.falsifiers.subjects.doors.memory import (
    Card,
    Classifiers,
    Estimate,
    FreshClassifier,
    Growth,
    Ledger,
    Memory,
    Quantised,
    Usage,
)
from blackswan.falsifiers.subjects.doors.models import ModelOutputs, Models, Rounded
from blackswan.falsifiers.subjects.doors.pretraining import (
    Architecture,
    Parameters,
    Pretrainer,
    Pretraining,
    PretrainingRecord,
    PretrainingStep,
    StreamRows,
    Tokens,
    TrainedDecoder,
)
from blackswan.falsifiers.subjects.doors.training import Trainer

__all__ = [
    "AdapterSettings",
    "Architecture",
    "Batch",
    "Card",
    "Chosen",
    "Classifiers",
    "Corpora",
    "CorpusFile",
    "Devices",
    "Estimate",
    "Files",
    "FreshClassifier",
    "Growth",
    "Label",
    "Lacks",
    "Ledger",
    "LoadedAdapter",
    "Memory",
    "ModelOutputs",
    "Models",
    "Parameters",
    "PlacedTrainer",
    "Plant",
    "Pretrainer",
    "Pretraining",
    "PretrainingRecord",
    "PretrainingStep",
    "Quantised",
    "Rounded",
    "Session",
    "Split",
    "Statistics",
    "StreamRows",
    "TokenRows",
    "Tokenizing",
    "Tokens",
    "TrainedDecoder",
    "Trainer",
    "Usage",
    "Workload",
]
