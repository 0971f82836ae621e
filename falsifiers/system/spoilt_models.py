"""Models that a command cannot use, made of one that it can."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from blackswan.falsifiers.system.adapter_files import CONFIG as MODEL_CONFIG
from blackswan.falsifiers.system.adapter_files import TOKENIZER, WEIGHTS
from blackswan.falsifiers.system.checkpoint_parts import LLAMA3
from blackswan.falsifiers.system.command_problem import Small, tokenizer

NO_CONFIG = {"torn": '{"eos_token_id": 1', "of two ends": '{"eos_token_id": 1, "eos_token_id": 2}', "listed": "[1]", "bare": None}
"""What config.json holds that is no configuration, and none, by the name of the folder."""


def spoil_models(problem: Small) -> None:
    """Writes models into folders of their own: with a token that has no embedding, with frequencies scaled as Llama 3's, with more
    positions than before scaling and with as many, with weights or norms that float16 does not hold or weights that it just holds, without
    a tokenizer, with a part of it, with one that draws lots, knows few words or has the ids of two tokens exchanged, with an end of texts
    that is true; and tokenizers beside a configuration that holds none, or beside none.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    of_tokens = ("no tokenizer", "torn tokenizer", "drawing tokenizer", "exchanged tokens", "few words")
    for name in ("scaled", "hardly scaled", "too large", "norm too large", "largest", *of_tokens):
        shutil.copytree(problem.base, problem.folder / name)
    config = problem.folder / "scaled" / MODEL_CONFIG
    config.write_text(json.dumps({**_unscaled(config), "rope_parameters": LLAMA3, "eos_token_id": [1, 3]}))
    config = problem.folder / "hardly scaled" / MODEL_CONFIG
    positions = {"max_position_embeddings": LLAMA3["original_max_position_embeddings"]}
    config.write_text(json.dumps({**_unscaled(config), "rope_parameters": LLAMA3, **positions}))
    shutil.copytree(problem.base, problem.folder / "true end")
    config = problem.folder / "true end" / MODEL_CONFIG
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": True}))
    shutil.copytree(problem.base, problem.folder / "fewer tokens")
    config = problem.folder / "fewer tokens" / MODEL_CONFIG
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 2}))
    shutil.copytree(problem.base, problem.folder / "more tokens")
    tokens = json.loads((problem.base / TOKENIZER).read_text())
    one = {"id": tokenizer().get_vocab_size(), "content": "<more>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens["added_tokens"].append(one | flags)
    (problem.folder / "more tokens" / TOKENIZER).write_text(json.dumps(tokens))
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    for name, tensor, number in (("too large", embedding, 65520.0), ("norm too large", norm, 65520.0), ("largest", embedding, 65504.0)):
        tensors = load_file(problem.folder / name / WEIGHTS)
        tensors[tensor].reshape(-1)[-2:] = number  # whose sum float16 does not hold
        save_file(tensors, problem.folder / name / WEIGHTS)
    exchanged = json.loads((problem.folder / "exchanged tokens" / TOKENIZER).read_text())
    ids, (first, *_, last) = exchanged["model"]["vocab"], tokenizer().encode("ls a").tokens
    ids[first], ids[last] = ids[last], ids[first]
    (problem.folder / "exchanged tokens" / TOKENIZER).write_text(json.dumps(exchanged))
    (problem.folder / "no tokenizer" / TOKENIZER).unlink()
    torn = problem.folder / "torn tokenizer" / TOKENIZER
    torn.write_bytes(torn.read_bytes()[:-9])
    tokens = json.loads((problem.base / TOKENIZER).read_text())
    (problem.folder / "drawing tokenizer" / TOKENIZER).write_text(json.dumps({**tokens, "model": {**tokens["model"], "dropout": 0.1}}))
    words = {word: number for number, word in enumerate(("<unknown>", "</s>", "ls", "rm"))}
    Tokenizer(WordLevel(words, "<unknown>")).save(str(problem.folder / "few words" / TOKENIZER))
    for name, text in NO_CONFIG.items():
        (folder := problem.folder / name).mkdir()
        shutil.copyfile(problem.base / TOKENIZER, folder / TOKENIZER)
        if text is not None:
            (folder / MODEL_CONFIG).write_text(text)


def _unscaled(config: Path) -> dict[str, Any]:
    """What a config.json says besides its rotation, which it may say in any of two places."""
    return {key: value for key, value in json.loads(config.read_text()).items() if key not in ("rope_theta", "rope_scaling")}
