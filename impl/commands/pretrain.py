"""Trains every parameter of a decoder to predict the next token, on shards that `tokenize` wrote.

The output folder then holds checkpoints/ (a Hugging Face checkpoint after each epoch) and state/ (from which --resume goes on).
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blackswan.impl.commands.common import DEVICE_HELP, BadInput, Interrupted, require_place

if TYPE_CHECKING:
    from blackswan.impl.decoder import Decoder
    from blackswan.impl.pretrain_run import PretrainEpoch, PretrainSettings, PretrainStep
    from blackswan.impl.token_shards import TokenBatches

SETTINGS: dict[str, tuple[Any, str]] = {
    "epochs": (int, "passes over the tokens (default: 1)"),
    "micro_batch": (int, "rows computed at a time (default: 8)"),
    "learning_rate": (float, "peak of the schedule (default: 3e-4)"),
    "warmup_fraction": (float, "share of the steps in which the rate rises (default: 0.06)"),
    "schedule": (str, "constant, linear or cosine (default: cosine)"),
    "weight_decay": (float, "of matrices, decoupled (default: 0.1)"),
    "gradient_clip_norm": (float, "largest global norm of a step's gradient (default: 1)"),
    "save_every": (int, "write the state after every N steps too (default: after each epoch)"),
}
"""Type and help of each field of PretrainSettings, whose module imports torch."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--model", metavar="PATH", type=Path, required=True, help="checkpoint folder or .apr file with the initial weights")
    parser.add_argument(
        "--random", action="store_true", help="take the architecture and tokenizer of --model, and random weights of --seed"
    )
    parser.add_argument("--tokens", metavar="DIR", type=Path, required=True, help="folder of token shards")
    parser.add_argument("--validation", metavar="DIR", type=Path, help="folder of held-out token shards")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder of the run; new, or with --resume the run's own")
    parser.add_argument("--batch", metavar="N", type=int, default=8, help="rows in a step (default: %(default)s)")
    parser.add_argument("--seq", metavar="N", type=int, default=512, help="tokens in a row (default: %(default)s)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the order of rows and of random weights (default: 0)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help=DEVICE_HELP)
    parser.add_argument("--resume", action="store_true", help="go on with the run in --output: the same command, and this option")
    for name, (kind, text) in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="NAME" if kind is str else "N", type=kind, help=text)


def run(options: argparse.Namespace) -> None:
    """Trains, with a line for each epoch and now and then one for a step."""
    from blackswan.impl.checkpoint import TOKENIZER, belonging, read_config, special_tokens
    from blackswan.impl.pretrain_run import pretrain
    from blackswan.impl.token_shards import TokenBatches, TokenShards

    require_place(options.output)
    settings, architecture = _settings(options), read_config(options.model)
    if options.seq > architecture.max_positions:
        raise BadInput(f"--seq: {options.seq} tokens; the model was made for at most {architecture.max_positions} positions")
    if not 0 <= options.seed < 2**63:
        raise BadInput(f"--seed: {options.seed}; expected an integer from 0 to {2**63 - 1}")

    def batches(folder: Path, seed: int | None) -> "TokenBatches":
        return TokenBatches(TokenShards(folder, architecture.vocab), batch=options.batch, seq=options.seq, seed=seed)

    train = batches(options.tokens, options.seed)
    validation = None if options.validation is None else batches(options.validation, None)
    decoder, tokenizer = _decoder(options), belonging(options.model, TOKENIZER)
    about = f"{decoder.config.family}, {decoder.config.layers} layers; {len(train.shards):,} tokens"
    shown = _Shown(about, settings.epochs, len(train) * settings.epochs)
    try:
        given = (decoder, train, validation, settings, options.output, tokenizer)
        kept = special_tokens(options.model)
        pretrain(*given, special=kept, resume=options.resume, on_start=shown.start, on_step=shown.step, on_epoch=shown.epoch)
    except KeyboardInterrupt:
        if not _begun(options.output):
            raise
        raise Interrupted(f"interrupted; go on with the same command and --resume, from the state in {options.output}") from None


def _begun(output: Path) -> bool:
    """Whether there is a state, without which --resume finds no run."""
    from blackswan.impl.pretrain_run import STATE

    return (output / STATE).exists()


def _settings(options: argparse.Namespace) -> "PretrainSettings":
    """Raises a BadInput for a value that the settings refuse."""
    from blackswan.impl.config import SCHEDULES
    from blackswan.impl.pretrain_run import PretrainSettings

    if options.schedule not in (None, *SCHEDULES):
        raise BadInput(f"--schedule: {options.schedule!r}; expected one of {', '.join(SCHEDULES)}")
    return PretrainSettings(**{name: value for name in SETTINGS if (value := getattr(options, name)) is not None})


def _decoder(options: argparse.Namespace) -> "Decoder":
    from blackswan.impl.checkpoint import read_config
    from blackswan.impl.device import resolve_device
    from blackswan.impl.pretrain import initial_decoder, random_decoder

    device = resolve_device(options.device)
    if options.random:
        return random_decoder(read_config(options.model), seed=options.seed, device=device)
    return initial_decoder(options.model, options.model, device=device)


class _Shown:
    """Lines for people: epochs on standard output, every hundredth step on standard error."""

    INTERVAL = 100

    def __init__(self, about: str, epochs: int, steps: int) -> None:
        self.about, self.epochs, self.steps = about, epochs, steps

    def start(self) -> None:
        """What is trained, and for how long."""
        print(f"{self.about}, {self.steps:,} steps", flush=True)

    def step(self, step: "PretrainStep") -> None:
        if step.step % self.INTERVAL == 0 or step.step == 1:
            numbers = f"loss {step.loss:.4f}, gradient norm {step.gradient_norm:.3g}, learning rate {step.learning_rate:.3g}"
            print(f"step {step.step}/{self.steps}: {numbers}", file=sys.stderr, flush=True)

    def epoch(self, epoch: "PretrainEpoch") -> None:
        held_out = "" if epoch.validation_loss != epoch.validation_loss else f"held-out loss {epoch.validation_loss:.4f}, "
        print(f"epoch {epoch.epoch + 1}/{self.epochs}: {held_out}{epoch.checkpoint} holds the model", flush=True)
