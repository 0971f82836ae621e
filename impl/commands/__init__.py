"""The commands of `python -m impl`, by name. Their modules import nothing heavy before they run."""

from collections.abc import Mapping

from blackswan.impl.commands import evaluate, export, merge, predict, pretrain, summary, tokenize, train
from blackswan.impl.commands.common import BadInput, Command, Interrupted, TrainingFailed

__all__ = ["COMMANDS", "BadInput", "Command", "Interrupted", "TrainingFailed"]

COMMANDS: Mapping[str, Command] = {
    "train": Command("train an adapter and head on a corpus", train.__doc__ or "", train.add_options, train.run),
    "pretrain": Command("train a decoder to predict the next token", pretrain.__doc__ or "", pretrain.add_options, pretrain.run),
    "evaluate": Command("loss, accuracy and confusion on a corpus", evaluate.__doc__ or "", evaluate.add_options, evaluate.run),
    "predict": Command("classes and probabilities of texts", predict.__doc__ or "", predict.add_options, predict.run),
    "merge": Command("write the base model with the adapter merged into it", merge.__doc__ or "", merge.add_options, merge.run),
    "export": Command("write a checkpoint as an .apr file, or one as a folder", export.__doc__ or "", export.add_options, export.run),
    "tokenize": Command("tokenize a corpus into shards for pre-training", tokenize.__doc__ or "", tokenize.add_options, tokenize.run),
    "summary": Command("what a model or an adapter is", summary.__doc__ or "", summary.add_options, summary.run),
}
