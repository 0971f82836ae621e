"""Model, device, tokenizer, LoRA, counts of parameters, and the memory that training takes."""

import argparse

from blackswan.impl import settings
from blackswan.impl.commands.common import BadInput, add_adapter_options, memory_of_a_step, open_saved, parameter_count


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_adapter_options(parser, required=False)
    parser.add_argument("--memory", action="store_true", help="also what a training step needs on a CUDA device (takes some seconds)")
    settings.add_options(parser)


def run(options: argparse.Namespace) -> None:
    """Prints the summary."""
    given = settings.given_options(options)
    if options.adapter is not None:
        if given:
            raise BadInput(f"{next(iter(given.values())).origin}: an adapter has its own settings; expected it with --model alone")
        pipeline = open_saved(options)
    elif options.model is not None:
        from blackswan.impl.pipeline import ClassifyPipeline

        config = settings.resolve(parameter_count(options.model), given)
        pipeline = ClassifyPipeline.from_pretrained(options.model, config, device=options.device)
    else:
        raise BadInput("expected --adapter DIR or --model DIR")
    source = None if pipeline.merged else pipeline.source
    if options.memory and source is None:
        raise BadInput("--memory: expected a model to train on, from a checkpoint folder")
    print(pipeline.summary())
    if options.memory and source is not None:
        config = pipeline.config
        estimate = memory_of_a_step(source, config, config.batch_size * config.accumulation_steps, config.max_seq_len, "cuda")
        step = f"batch {config.batch_size}" + (f" accumulated {config.accumulation_steps} times" if config.accumulation_steps > 1 else "")
        print(f"\nmemory of a training step on CUDA, {step}, {config.max_seq_len} tokens\n{estimate.table()}")
