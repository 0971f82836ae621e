"""A loss of more logits than a step of training computes at a time."""

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, value_inside
from blackswan.falsifiers.system.trial import Trial

ROWS, SEQ, VOCAB = 2, 256, 151_936
"""More than 2²⁶ logits of the vocabulary of Qwen2.5: a quarter of a gigabyte in float32."""
ROUNDING = 1e-4
"""A float32 sum of so many exponentials, and of so many losses, errs by less."""


def lm_loss_of_many_logits(trial: Trial) -> list[Comparison]:
    """Each position has the same logits, so that the loss is the mean of the tokens' own: log Σ exp(logits) − logits[token]."""
    rng = trial.rng("many logits")
    logits = rng.standard_normal(VOCAB).astype(np.float32)
    ids = rng.integers(0, VOCAB, (ROWS, SEQ))
    wide = logits.astype(np.float64)
    expected = float(np.log(np.exp(wide).sum()) - wide[ids[:, 1:]].mean())
    found = trial.pretrainer.loss_of_repeated(logits, ids)
    return [value_inside("loss", found, expected * (1 - ROUNDING), expected * (1 + ROUNDING))]
