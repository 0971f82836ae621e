"""Tokenizes a corpus into shards, on which `pretrain` trains: one stream of tokens, a document after the other, in plain files of ids."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "corpus", type=Path, help="JSONL with a `text`, or without one an `input`, in each line; or a text file: one document"
    )
    parser.add_argument("--model", metavar="PATH", type=Path, required=True, help="checkpoint folder or .apr file with the tokenizer")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder to write, which must not exist")
    parser.add_argument("--end-token", metavar="ID", type=int, help="id that ends each document (default: the model's eos_token_id)")
    parser.add_argument("--shard-tokens", metavar="N", type=int, help="tokens in a shard (default: 100 million)")


def run(options: argparse.Namespace) -> None:
    """Writes the folder."""
    from blackswan.impl.checkpoint import TOKENIZER, belonging
    from blackswan.impl.token_shards import SHARD_TOKENS, end_token, load_encoder, tokenize, write_shards
    from blackswan.impl.tokens import id_count

    end = end_token(options.model) if options.end_token is None else options.end_token
    encoder = load_encoder(belonging(options.model, TOKENIZER))
    vocab = id_count(encoder)
    most = SHARD_TOKENS if options.shard_tokens is None else options.shard_tokens
    count = write_shards(options.output, tokenize(options.corpus, encoder, end), vocab, most)
    print(f"{options.output}: {count} tokens of a vocabulary of {vocab}")
