"""What a trained classifier is held to: the most frequent class, and TF-IDF with logistic regression, chosen by cross-validation."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TOKENS = {"words": r"(?u)\b\w\w+\b", "blank-separated tokens": r"\S+"}
LONGEST = (1, 2, 3)
STRENGTHS = (10.0, 100.0, 1000.0)
FOLDS = 5


@dataclass(frozen=True)
class TfIdf:
    """A choice of features and strength: tokens, n-grams up to `longest`, inverse regularisation C; its cross-validated accuracy."""

    tokens: str
    longest: int
    strength: float
    accuracy: float

    def __str__(self) -> str:
        """The choice in words."""
        grams = "single" if self.longest == 1 else f"1- to {self.longest}-grams"
        return f"TF-IDF of {self.tokens} ({grams}), logistic regression (C {self.strength:g})"


def majority(train_labels: Sequence[int], count: int) -> list[int]:
    """The most frequent class of the training labels, `count` times."""
    return [Counter(train_labels).most_common(1)[0][0]] * count


def candidates(texts: Sequence[str], labels: Sequence[int], groups: Sequence[int]) -> list[TfIdf]:
    """Every choice with its accuracy in cross-validation on these samples, the best first.

    Folds are stratified by class and keep groups whole: the twin of a text, in the training part with another label, would mislead.
    """
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_score

    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=0)
    found = []
    for tokens, longest in itertools.product(TOKENS, LONGEST):
        for strength in STRENGTHS:
            scores = cross_val_score(_model(tokens, longest, strength), list(texts), list(labels), cv=folds, groups=list(groups))
            found.append(TfIdf(tokens, longest, strength, float(scores.mean())))
    return sorted(found, key=lambda choice: -choice.accuracy)


def predictions(choice: TfIdf, texts: Sequence[str], labels: Sequence[int], asked: Sequence[str]) -> list[int]:
    """Trained on the samples, the classes of the texts that are asked for."""
    model = _model(choice.tokens, choice.longest, choice.strength).fit(list(texts), list(labels))
    return [int(label) for label in model.predict(list(asked))]


def _model(tokens: str, longest: int, strength: float) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    features = TfidfVectorizer(ngram_range=(1, longest), token_pattern=TOKENS[tokens], lowercase=False)
    return make_pipeline(features, LogisticRegression(C=strength, max_iter=2000))
