"""The program `blackswan`: one sub-command a door. Each hands its arguments to the parser that `python -m` and pytest use too."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem


@dataclass(frozen=True)
class Door:
    """A sub-command: the module that has its `parser(prog)` and `main(arguments, prog)`, and the words put before the user's arguments."""

    help: str
    module: str
    first: tuple[str, ...] = ()


DOORS = {
    "falsify": Door("attack the implementation with every claim: pytest falsifiers", "falsifiers.runner.options"),
    "vet": Door("ask your own code every claim on what it has", "falsifiers.runner.vet"),
    "vet-checkpoint": Door("hold a published checkpoint to the reference, layer by layer", "falsifiers.__main__", ("vet-checkpoint",)),
    "vet-model": Door("hold a model of your own, as it is, to the reference on its own weights", "falsifiers.__main__", ("vet-model",)),
    "contracts": Door("check, list and show claims; judge a configuration by the rules", "contracts.__main__"),
    "power": Door("show that every claim can fail: run the claims on wrong programs", "falsifiers.__main__", ("power",)),
    "calibrate": Door("measure error / noise floor of the correct implementation", "falsifiers.__main__", ("calibrate",)),
    "catalogue": Door("write the names of wrong programs and of checks of systems from the code", "falsifiers.__main__", ("catalogue",)),
    "train": Door("train an adapter and head on a corpus", "impl.__main__", ("train",)),
    "pretrain": Door("train a decoder to predict the next token", "impl.__main__", ("pretrain",)),
    "evaluate": Door("loss, accuracy and confusion on a corpus", "impl.__main__", ("evaluate",)),
    "predict": Door("classes and probabilities of texts", "impl.__main__", ("predict",)),
    "merge": Door("write the base model with the adapter merged into it", "impl.__main__", ("merge",)),
    "export": Door("write a checkpoint as an .apr file, or one as a folder", "impl.__main__", ("export",)),
    "tokenize": Door("tokenize a corpus into shards for pre-training", "impl.__main__", ("tokenize",)),
    "summary": Door("what a model or an adapter is", "impl.__main__", ("summary",)),
    "report": Door("render, compare and check verdict files; list kept evidence", "reports.__main__"),
}


class DoorCommand(click.Command):
    """A sub-command whose arguments, help and completion are those of an argparse parser."""

    def __init__(self, name: str, door: Door) -> None:
        rest = click.Argument(
            ["arguments"], nargs=-1, type=click.UNPROCESSED, shell_complete=lambda ctx, _, word: self.shell_complete(ctx, word)
        )
        given = {"ignore_unknown_options": True, "help_option_names": []}
        super().__init__(name, context_settings=given, params=[rest], help=door.help, callback=self._run)
        self.door = door
        self.prog = "blackswan" if door.first else f"blackswan {name}"

    def _called(self, what: str) -> Callable[..., Any]:
        called: Callable[..., Any] = getattr(importlib.import_module(f"blackswan.{self.door.module}"), what)
        return called

    def _run(self, arguments: Sequence[str]) -> None:
        sys.exit(self._called("main")([*self.door.first, *arguments], prog=self.prog))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The options and sub-commands that the parser knows behind what was typed."""
        typed = [*self.door.first, *(ctx.params.get("arguments") or ())]
        found = known(self._called("parser")(self.prog), typed)
        return [CompletionItem(name, help=text) for name, text in found if name.startswith(incomplete)]


def known(parser: argparse.ArgumentParser, typed: Sequence[str]) -> list[tuple[str, str]]:
    """The words that may come next, with their help: a parser's sub-commands, or its options where `typed` names a sub-command already."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            chosen = next((word for word in typed if word in action.choices), None)
            if chosen is not None:
                return known(action.choices[chosen], typed)
            return [(choice.dest, choice.help or "") for choice in action._choices_actions]
    options = [(name, action.help or "") for action in parser._actions for name in action.option_strings]
    return [(name, text) for name, text in options if name.startswith("--")]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="blackswan-contracts", prog_name="blackswan")
def main() -> None:
    """Contracts about QLoRA classification fine-tuning, their falsifiers, and the trainer that they attack.

    `blackswan COMMAND --help` explains a command. For completion in bash: eval "$(_BLACKSWAN_COMPLETE=bash_source blackswan)".
    """


for _name, _door in DOORS.items():
    main.add_command(DoorCommand(_name, _door))
