"""A model that somebody has, as it is: a `torch.nn.Module` from their own `from_pretrained` or wrapper, and a map of its names.

Its weights are read out of it, in the dtypes that they are stored in, NF4 as codes; nothing is built anew. PEFT's decorations of names
(`base_model.model.`, `.base_layer`, `.default`) are taken off, then the map is applied. A key of the map is a name or the beginning of one,
in which `*` stands for one part between dots: {"blocks.*.attn.wq": "model.layers.*.self_attn.q_proj"}.
"""

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from blackswan.falsifiers.subjects.conversion import to_numpy
from blackswan.falsifiers.subjects.doors.models import Described
from blackswan.impl.architecture import read_architecture

Arrays = dict[str, Any]
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
EMBEDDING, NORM, HEAD, SCORE = "model.embed_tokens", "model.norm", "lm_head.weight", "score.weight"
PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
NF4_BLOCK = 64
FACTOR = re.compile(r"\.lora_([AB])\.(\w+)\.weight$")
PASSED_OVER = ("quantization_config", "attention_dropout")
"""Keys of a configuration that change nothing here: codes are read from the layers, and in evaluation mode nothing is dropped."""


class HandedModel:
    """A model under test. ValueError says which of its names, shapes or settings cannot be held to the reference, and what was expected.

    `given` is a module, or a function that returns one.
    """

    def __init__(self, given: Any, name: str, device: str = "cpu", told: Described | None = None) -> None:
        self.name, self.device, self._told = name, device, told or Described()
        model = given() if callable(given) and not isinstance(given, nn.Module) else given
        if not isinstance(model, nn.Module):
            raise ValueError(f"{name} gives a {type(model).__name__}; expected a torch.nn.Module, or a function that returns one")
        self._model = model.to(device).eval()
        self._rules = [(_pattern(key), value) for key, value in sorted(self._told.names.items(), key=lambda one: -len(one[0]))]
        self._require_used_names()

    def described(self) -> dict[str, Any]:
        """`scalars`, `parameters` by Hugging Face name, the dtypes of the `trained` ones, `dtype`, `causal`, and `pad` if it has one."""
        scalars, arrays, trained = self._scalars, self._arrays, {}
        for name, value in self._parameters.items():
            if value.requires_grad:
                trained[name] = str(to_numpy(value[:0]).dtype)
        if self._causal is False and "score.bias" not in arrays:
            arrays["score.bias"] = np.zeros(len(arrays[SCORE]), np.float32)
        return {
            "scalars": scalars,
            "parameters": arrays,
            "trained": trained,
            "dtype": self._dtype,
            "causal": self._causal,
            "pad": self._pad,
        }

    def answered(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs under the names of the reference, each as it is: hidden/…, logits, loss and gradient/…"""
        given = {name: torch.tensor(value, device=self.device) for name, value in inputs.items()}
        ids, mask = given["input_ids"], given["mask"]
        labels = torch.where(mask, ids, -100) if self._causal else given["labels"]
        states: dict[str, Tensor] = {}
        hooks = [module.register_forward_hook(_keeping(states, f"hidden/{path}")) for path, module in self._watched.items()]
        self._model.zero_grad()
        try:
            answer = self._model(input_ids=ids, attention_mask=mask.long(), labels=labels)
            logits, loss = _part(answer, "logits", 0), _part(answer, "loss", 1)
            loss = self._loss(logits, labels) if loss is None else loss
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        slopes = {f"gradient/{name}": _slope(value) for name, value in self._parameters.items() if value.requires_grad}
        self._model.zero_grad()
        return {name: to_numpy(value) for name, value in {**states, "logits": logits, "loss": loss, **slopes}.items()}

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of a model that answers with logits alone."""
        if self._causal:
            logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return nn.functional.cross_entropy(logits.float(), labels)

    @cached_property
    def _parameters(self) -> dict[str, Tensor]:
        """Every parameter by its Hugging Face name; a tied head once."""
        found: dict[str, Tensor] = {}
        for theirs, value in self._model.named_parameters(remove_duplicate=False):
            name = self._named(theirs)
            if name is None:
                continue
            if name in found and found[name] is not value:
                raise ValueError(f"{self.name}: {theirs} is {name}, and so is another parameter; expected one of that name")
            found[name] = value
        if HEAD in found and found[HEAD] is found.get(f"{EMBEDDING}.weight"):
            del found[HEAD]
        return found

    def _named(self, theirs: str) -> str | None:
        """The Hugging Face name of a parameter or module; None for a copy that PEFT keeps and does not use."""
        plain = FACTOR.sub(r".lora_\1.weight", theirs)
        for prefix in ("_orig_mod.", "module.", "base_model.model."):
            plain = plain.removeprefix(prefix)
        if ".original_module" in plain:
            return None
        plain = re.sub(r"\.base_layer(?=\.|$)|\.modules_to_save\.\w+(?=\.|$)", "", plain)
        for pattern, value in self._rules:
            if found := pattern.match(plain):
                for part in found.groups():
                    value = value.replace("*", part, 1)
                return value + plain[found.end() :]
        return plain

    def _require_used_names(self) -> None:
        theirs = [name for name, _ in self._model.named_parameters(remove_duplicate=False)]
        for key, (pattern, _) in zip(sorted(self._told.names, key=lambda one: -len(one)), self._rules, strict=True):
            if not any(pattern.search(name) for name in theirs):
                raise ValueError(
                    f"{self.name}: names: there is no {key!r}{_nearest(key, theirs)}; expected the beginning of a parameter's name"
                )

    @cached_property
    def _config(self) -> Any:
        found = self._told.config or next(
            (kept for one in self._model.modules() if hasattr(kept := getattr(one, "config", None), "to_dict")), None
        )
        if found is None:
            raise ValueError(f"{self.name} has no .config of transformers; say the content of its config.json by `config`")
        values = dict(found) if isinstance(found, Mapping) else found.to_dict()
        return {key: value for key, value in values.items() if key not in PASSED_OVER}

    @property
    def _pad(self) -> int | None:
        found = self._config.get("pad_token_id")
        return None if found is None else int(found)

    @cached_property
    def _causal(self) -> bool:
        """Whether it predicts the next token: without a head of classes, and with one of tokens or a tied one."""
        if SCORE in self._parameters:
            return False
        if "lm_head" not in {self._named(name) for name, _ in self._model.named_modules()}:
            self._refuse("has neither lm_head nor score.weight", SCORE, self._parameters)
        return True

    @cached_property
    def _dtype(self) -> str:
        held = self._parameter(f"{EMBEDDING}.weight").dtype
        if held not in DTYPES:
            raise ValueError(f"{self.name}: {EMBEDDING}.weight is {held}; expected one of {', '.join(DTYPES.values())}")
        return DTYPES[held]

    @cached_property
    def _scalars(self) -> dict[str, Any]:
        """The architecture in its configuration, and LoRA, NF4 and the head as they are in its parameters."""
        scalars = asdict(read_architecture(self._config, Path(f"{self.name}: its config")))
        del scalars["max_positions"]
        scalars["tied"] = HEAD not in self._parameters
        classes = 1 if self._causal else len(self._parameter(SCORE))
        if not self._causal and classes < 2:
            raise ValueError(f"{self.name}: {SCORE} has one row, a regression; expected two classes or more")
        if not self._causal and self._pad is None:
            raise ValueError(f"{self.name}: its config has no pad_token_id; expected one, by which a batch shows where samples end")
        return {
            **scalars,
            **self._lora(scalars["layers"]),
            "classes": classes,
            "pooling": self._told.pooling,
            "nf4": self._nf4(scalars["layers"]),
        }

    def _lora(self, layers: int) -> dict[str, Any]:
        factors = {name: value for name, value in self._parameters.items() if name.endswith(".lora_A.weight")}
        targets = sorted({name.split(".")[-3] for name in factors})
        for layer in range(layers):
            for part, projections in PROJECTIONS.items():
                for projection in projections:
                    name = f"model.layers.{layer}.{part}.{projection}.lora_A.weight"
                    if projection in targets and name not in factors:
                        raise ValueError(
                            f"{self.name}: {name} is missing, though other layers have it; expected LoRA in all layers or none"
                        )
        ranks = {len(value) for value in factors.values()}
        if len(ranks) > 1:
            raise ValueError(f"{self.name}: LoRA factors have the ranks {sorted(ranks)}; expected one")
        rank = next(iter(ranks), 1)
        return {"rank": rank, "alpha": self._alpha(rank) if factors else 1.0, "targets": "+".join(targets)}

    def _alpha(self, rank: int) -> float:
        """The alpha by which the factor is alpha / rank."""
        if self._told.alpha is not None:
            return self._told.alpha
        configs = next((kept for one in self._model.modules() if isinstance(kept := getattr(one, "peft_config", None), Mapping)), None)
        if configs is None:
            raise ValueError(f"{self.name} has LoRA factors and no peft_config; say LoRA's `alpha`")
        if len(configs) > 1:
            raise ValueError(f"{self.name} has the adapters {', '.join(configs)}; expected one")
        (config,) = configs.values()
        for key in ("use_dora", "rank_pattern", "alpha_pattern", "layer_replication", "lora_bias"):
            if getattr(config, key, None):
                raise ValueError(f"{self.name}: its LoraConfig has {key}={getattr(config, key)!r}, which the reference does not compute")
        return float(config.lora_alpha) * (rank**0.5 if config.use_rslora else 1.0)

    def _nf4(self, layers: int) -> bool:
        names = [f"model.layers.{i}.{part}.{one}.weight" for i in range(layers) for part, every in PROJECTIONS.items() for one in every]
        quantised = [name for name in names if hasattr(self._parameter(name), "quant_state")]
        plain = [name for name in names if name not in quantised]
        if quantised and plain:
            raise ValueError(f"{self.name}: {plain[0]} is plain and {quantised[0]} is NF4; expected the same of all projections")
        return bool(quantised)

    @cached_property
    def _arrays(self) -> Arrays:
        """The parameters as they are stored; of NF4 weights codes and scales."""
        found: Arrays = {}
        for name, value in self._parameters.items():
            if hasattr(value, "quant_state"):
                found |= self._codes(name, value)
            elif not value.is_floating_point():
                raise ValueError(f"{self.name}: {name} is {value.dtype}; expected a floating-point dtype, or NF4 of bitsandbytes")
            else:
                found[name] = to_numpy(value).copy()
        return found

    def _codes(self, name: str, value: Any) -> Arrays:
        state = value.quant_state
        if state is None or state.quant_type != "nf4" or state.blocksize != NF4_BLOCK:
            kind = "not quantised yet" if state is None else f"{state.quant_type} in blocks of {state.blocksize}"
            raise ValueError(f"{self.name}: {name} is {kind}; expected nf4 in blocks of {NF4_BLOCK}")
        absmax = state.absmax
        if state.nested:
            from bitsandbytes.functional import dequantize_blockwise

            absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset
        codes = value.data.flatten().view(torch.uint8)
        return {f"{name}.nf4.codes": to_numpy(codes).copy(), f"{name}.nf4.absmax": to_numpy(absmax.float()).copy()}

    def _parameter(self, name: str) -> Tensor:
        if name not in self._parameters:
            self._refuse(f"has no parameter {name}", name, self._parameters)
        return self._parameters[name]

    @cached_property
    def _watched(self) -> dict[str, nn.Module]:
        """The modules whose results are the hidden states."""
        modules = {self._named(name): module for name, module in reversed(list(self._model.named_modules()))}
        wanted = [EMBEDDING, *(f"model.layers.{index}" for index in range(self._scalars["layers"])), NORM]
        for path in wanted:
            if path not in modules:
                self._refuse(f"has no module {path}", path, [name for name in modules if name])
        return {path: modules[path] for path in wanted}

    def _refuse(self, what: str, name: str, known: Collection[str]) -> NoReturn:
        raise ValueError(f"{self.name} {what}{_nearest(name, known)}; expected it, or a name of the model's for it in `names`")


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(re.escape(key).replace(r"\*", "([^.]+)") + r"(?=\.|$)")


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; the nearest is {near[0]}" if near else ""


def _part(answer: Any, name: str, place: int) -> Any:
    """The logits or the loss of an answer: by name, or of a tensor or tuple of them the logits first."""
    if isinstance(answer, Tensor):
        return answer if name == "logits" else None
    if isinstance(answer, Mapping):
        return answer.get(name)
    if isinstance(answer, tuple):
        return answer[place] if place < len(answer) else None
    return getattr(answer, name, None)


def _slope(value: Tensor) -> Tensor:
    return torch.zeros_like(value) if value.grad is None else value.grad


def _keeping(states: dict[str, Tensor], name: str) -> Callable[..., None]:
    def keep(module: nn.Module, given: Any, result: Any) -> None:
        del module, given
        states[name] = (result[0] if isinstance(result, tuple) else result).detach()

    return keep
