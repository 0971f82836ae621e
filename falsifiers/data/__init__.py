"""The shipped input: a corpus of shell scripts and a small language model trained on it (see README.md beside this file)."""

from pathlib import Path

DATA = Path(__file__).resolve().parent
CORPUS_TRAIN = DATA / "corpus" / "train.jsonl"
CORPUS_HELDOUT = DATA / "corpus" / "heldout.jsonl"
CHECKPOINT = DATA / "checkpoint"
PROVENANCE = DATA / "PROVENANCE.json"

CLASSES = ("safe", "needs-quoting", "non-deterministic", "non-idempotent", "unsafe")
