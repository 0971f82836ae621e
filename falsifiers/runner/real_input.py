"""Real input: a trained checkpoint and a corpus, as cases. Tensors are read without `impl`, so that a bug in its loading cannot hide."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric import apr_format
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.generators import generator_for
from blackswan.falsifiers.numeric.precision import held_dtype, round_to, signatures
from blackswan.falsifiers.numeric.strategies import Draw, loss_cotangent, parameters
from blackswan.reference.classifier import trainable_names
from blackswan.reference.decoder import parameter_shapes
from blackswan.reference.table import Array

BATCH, LONGEST = 2, 64
MOST_CLASSES = 10_000
"""That a head is made for; a corpus with a label above has a mistake in it."""
ADAPTER = {"rank": 8, "alpha": 16.0, "targets": "q_v", "pooling": "mean", "nf4": False}


class RealInput:
    """A model (folder or .apr file) and a corpus file. ValueError or FileNotFoundError names the file and what is wrong with it."""

    def __init__(self, model: Path, corpus: Path) -> None:
        self.model, self.corpus = model, corpus
        self._rounded: dict[tuple[str, str], Array] = {}

    def check(self) -> None:
        """Reads everything small, and the headers of the weights, as the implementation does, so that bad input stops before any claim.

        What is read later has passed here.
        """
        from blackswan.impl.checkpoint import load_checkpoint

        load_checkpoint(self.model)
        if not self.rows:
            raise ValueError(f"{self.corpus}: the corpus is empty; expected one JSON object a line")

    @cached_property
    def scalars(self) -> dict[str, Any]:
        """The architecture, as the attributes and scalars of decoder_forward: one reader says what is supported, here and in training."""
        from blackswan.impl.checkpoint import read_config

        config = asdict(read_config(self.model))
        del config["max_positions"]
        return config | (config.pop("rope_scaling") or {})

    @cached_property
    def rows(self) -> list[tuple[list[int], int]]:
        """Token ids and label of every sample."""
        from tokenizers import Tokenizer

        from blackswan.impl.checkpoint import belonging
        from blackswan.impl.corpus import load_corpus

        path = belonging(self.model, "tokenizer.json")
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; a checkpoint needs its own tokenizer")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises Exception itself
            raise ValueError(f"{path}: not a usable tokenizer ({error})") from None
        samples = [(sample.text, sample.label) for sample in load_corpus(self.corpus, MOST_CLASSES) if isinstance(sample.label, int)]
        encoded = [encoding.ids[:LONGEST] or [0] for encoding in tokenizer.encode_batch([text for text, _ in samples])]
        worst = max((max(ids) for ids in encoded), default=0)
        if worst >= self.scalars["vocab"]:
            raise ValueError(f"{path}: gives token {worst}, but {self.model} has vocab_size {self.scalars['vocab']}")
        return [(ids, label) for ids, (_, label) in zip(encoded, samples, strict=True)]

    @property
    def classes(self) -> int:
        """One more than the largest label, and at least two."""
        return max(2, 1 + max(label for _, label in self.rows))

    def case(self, claim: Claim, draw: Draw, flavour: str, dtype: str) -> Case:
        """Two samples of the corpus, by the draw's seed, padded on the right to the longer one."""
        assert claim.operation is not None
        signature = signatures()[claim.operation]
        chosen = generator_for(draw.seed, "samples").integers(0, len(self.rows), BATCH)
        ids, mask, labels = _padded([self.rows[i] for i in chosen])
        scalars = {**self.scalars}
        if "classes" in signature.attributes:
            scalars |= {**ADAPTER, "classes": self.classes, **draw.scalars}
        known = {"input_ids": ids, "mask": mask, "labels": labels}
        inputs = {name: known[name] for name in signature.inputs if name in known}
        inputs |= self._parameters(scalars, draw.seed, dtype)
        cotangents = {"loss": loss_cotangent(draw.seed, dtype)} if "loss" in signature.outputs else {}
        sizes = {name: value for name, value in scalars.items() if isinstance(value, int) and not isinstance(value, bool)}
        sizes |= {"batch": BATCH, "seq": ids.shape[1]}
        wanted = {name: scalars[name] for name in (*signature.scalars, *signature.attributes) if name in scalars}
        return Case(claim.operation, dtype, sizes, wanted, draw.seed, flavour, inputs, cotangents)

    def _parameters(self, scalars: Mapping[str, Any], seed: int, dtype: str) -> dict[str, Array]:
        found = {f"parameters/{name}": self._parameter(name, dtype) for name in parameter_shapes(self.scalars)}
        if "classes" in scalars:
            adapters = parameters("classifier", scalars, "normal", seed, dtype)
            found |= {f"parameters/{name}": adapters[f"parameters/{name}"] for name in trainable_names(scalars)}
        return found

    def _parameter(self, name: str, dtype: str) -> Array:
        key = (name, dtype)
        if key not in self._rounded:
            stored = self.stored(name).astype(np.float64)
            self._rounded[key] = np.asarray(round_to(stored, held_dtype("storage", dtype)), np.float64)
        return self._rounded[key]

    def stored(self, name: str) -> Array:
        """The tensor as the checkpoint has it; of an .apr file with GGUF's names also in Hugging Face's order of rows."""
        if self.model.is_dir():
            with safe_open(self._files[name], framework="numpy") as file:
                return np.asarray(file.get_tensor(name))
        gguf = apr_format.gguf_name(name)
        if name in self._apr or gguf not in self._apr:
            return apr_format.array(self._apr[name])
        heads = {"q_proj": self.scalars["heads"], "k_proj": self.scalars["kv_heads"]}.get(name.split(".")[-2])
        value = apr_format.array(self._apr[gguf])
        return apr_format.huggingface_rows(value, heads) if heads and self.scalars["family"] == "llama" else value

    @cached_property
    def _apr(self) -> dict[str, apr_format.Stored]:
        return apr_format.read(self.model)[2]

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Tensor name → file."""
        index, found = self.model / "model.safetensors.index.json", dict[str, Path]()
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else ["model.safetensors"]
        for path in {self.model / name for name in names}:
            with safe_open(path, framework="numpy") as file:
                found |= dict.fromkeys(file.keys(), path)
        return found


def _padded(rows: Sequence[tuple[list[int], int]]) -> tuple[Array, Array, Array]:
    longest = max(len(ids) for ids, _ in rows)
    input_ids = np.zeros((len(rows), longest), np.int64)
    mask = np.zeros((len(rows), longest), bool)
    for index, (ids, _) in enumerate(rows):
        input_ids[index, : len(ids)] = ids
        mask[index, : len(ids)] = True
    return input_ids, mask, np.array([label for _, label in rows], np.int64)
