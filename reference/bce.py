"""Binary cross-entropy with logits, for multi-label classification: mean of max(z, 0) − z·t + log(1 + e^(−|z|)).

Derivation: −t log σ(z) − (1 − t) log(1 − σ(z)) = log(1 + e^z) − z t, and log(1 + e^z) = max(z, 0) + log(1 + e^(−|z|)) does not overflow.
Its derivative is σ(z) − t, here (1 − t) σ(z) − t σ(−z), which does not cancel.
"""

import numpy as np

from blackswan.reference.cross_entropy import require_finite
from blackswan.reference.sigmoid import complement, sigmoid
from blackswan.reference.table import Array


def _check(logits: Array, targets: Array) -> None:
    if logits.shape != targets.shape:
        raise ValueError(f"targets have shape {list(targets.shape)}; expected that of the logits, {list(logits.shape)}")
    require_finite(logits)
    outside = ~((targets >= 0) & (targets <= 1))
    if outside.any():
        where = tuple(int(i) for i in np.argwhere(outside)[0])
        raise ValueError(f"targets{list(where)} is {float(targets[where])}; expected 0 to 1")


def forward(logits: Array, targets: Array) -> Array:
    """Mean over samples and classes; logits and targets [batch, classes]. ValueError for a non-finite logit or a target outside [0, 1]."""
    _check(logits, targets)
    below = np.log1p(np.exp(-np.abs(logits)))  # [batch, classes], added last: beside a large logit nothing would be left of it
    loss: Array = (np.maximum(logits, 0.0) - logits * targets + below).mean()
    return loss


def backward(dloss: Array, logits: Array, targets: Array) -> dict[str, Array]:
    """Gradient of logits: (σ(z) − t) / (batch · classes); dloss []."""
    _check(logits, targets)
    return {"logits": dloss * ((1.0 - targets) * sigmoid(logits) - targets * complement(logits)) / logits.size}
