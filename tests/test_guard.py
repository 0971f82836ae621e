"""`blackswan.guard`: honest runs hold, each planted defect is found by its name and by no other check, and what is not checked is said."""

import logging
import re
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForSequenceClassification, Trainer, TrainingArguments

import blackswan
from blackswan.falsifiers.live.guard import Guard
from blackswan.falsifiers.live.recorded import claims
from blackswan.falsifiers.numeric.case import load
from blackswan.falsifiers.runner.validate_case import require

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "num_labels": 3, "rms_norm_eps": 1e-6}
BOUND = 0.05
EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "guard"
ALL = {"OP-RMSNORM", "LOSS-CE", "LOSS-CE-GRADIENT", "OPT-AVERAGE", "OPT-CLIP", "OPT-CLIP-BOUND", "OPT-ADAMW"}
ADAPTED = {"LORA-GRADIENT-FLOW", "TRN-BASE-FROZEN"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    made = Qwen3ForSequenceClassification(Qwen3Config(**SHAPE))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made  # type: ignore[no-any-return]


@pytest.fixture
def adapted(model: torch.nn.Module) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return get_peft_model(model, settings)  # type: ignore[arg-type, return-value]


def adamw(model: torch.nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    return kind([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)  # type: ignore[call-arg]


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sizes: tuple[int, ...] = (4, 2),
    steps: int = 3,
    clip: bool = True,
    weight: Callable[[int, int, int], float] = lambda rows, total, _: rows / total,
    loss_of: Callable[[Tensor, Tensor], Tensor] = lambda logits, labels: functional.cross_entropy(logits, labels),
) -> None:
    """A loop as people write them; `weight`, of a micro-batch's rows, all rows and the number of micro-batches, multiplies its loss."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(1, 32, (sum(sizes), 5), generator=generator)
        labels = torch.randint(0, 3, (sum(sizes),), generator=generator)
        for ids, wanted in zip(tokens.split(sizes), labels.split(sizes), strict=True):
            loss = loss_of(model(input_ids=ids).logits, wanted)
            (loss * weight(len(ids), sum(sizes), len(sizes))).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND)
        optimizer.step()
        optimizer.zero_grad()


def found(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **how: Any) -> list[tuple[str, str]]:
    """Claim and culprit of every failure of the first step that fails; empty where the run holds."""
    optimizer = optimizer or adamw(model)
    try:
        with blackswan.guard(model, optimizer, max_norm=BOUND):
            train(model, optimizer, **how)
    except blackswan.GuardError as error:
        return [(failure.claim.id, failure.culprit) for failure in error.failures]
    return []


def held(guard: Guard) -> set[str]:
    return set(re.findall(r"^(\S+) held \d+ times$", guard.report(), re.MULTILINE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_honest_loop_holds_and_every_claim_is_asked_that_speaks_of_its_dtype(model: torch.nn.Module, dtype: torch.dtype) -> None:
    model = model.to(dtype)
    optimizer = adamw(model)
    with blackswan.guard(model, optimizer, max_norm=BOUND, frozen=[]) as guard:
        train(model, optimizer)
    narrow = {"OPT-ADAMW", "OPT-CLIP"} if dtype == torch.bfloat16 else set()
    assert held(guard) == ALL - narrow
    assert all(f"not checked: {name}" in guard.report() for name in narrow)
    assert guard.checked == 3


def test_an_honest_loop_in_mixed_precision_holds(model: torch.nn.Module) -> None:
    optimizer = adamw(model)
    with blackswan.guard(model, optimizer, max_norm=BOUND) as guard, torch.autocast("cpu", torch.bfloat16):
        train(model, optimizer)
    assert held(guard) == ALL


def test_an_honest_loop_with_adapters_holds(adapted: torch.nn.Module) -> None:
    optimizer = adamw(adapted)
    with blackswan.guard(adapted, optimizer, max_norm=BOUND) as guard:
        train(adapted, optimizer)
    assert held(guard) == ALL | ADAPTED


def test_a_loss_on_several_labels_holds_and_its_sum_does_not(model: torch.nn.Module) -> None:
    def several(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(logits, functional.one_hot(labels, 3).to(logits.dtype))

    optimizer = adamw(model)
    with blackswan.guard(model, optimizer, max_norm=BOUND) as guard:
        train(model, optimizer, loss_of=several)
    assert {"LOSS-BCE", "LOSS-BCE-GRADIENT", "OPT-AVERAGE"} <= held(guard)
    names = [claim for claim, _ in found(model, loss_of=lambda logits, labels: 3 * several(logits, labels))]
    assert names == ["OPT-AVERAGE", "LOSS-BCE"]


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more is asked about that claim."""
    plain = Guard.__init__

    def blind(self: Guard, *args: Any, **settings: Any) -> None:
        plain(self, *args, **settings)
        ledger, note, hold = self._ledger, self._ledger.note, self._ledger.hold
        monkeypatch.setattr(ledger, "note", lambda claim, *rest: claim in name or note(claim, *rest))
        monkeypatch.setattr(ledger, "hold", lambda claim, *rest: claim in name or hold(claim, *rest))

    monkeypatch.setattr(Guard, "__init__", blind)


def wrong_epsilon(model: torch.nn.Module) -> dict[str, Any]:
    norm = model.model.layers[1].post_attention_layernorm  # type: ignore[union-attr, index]
    plain = norm.forward

    def forward(x: Tensor) -> Tensor:
        norm.variance_epsilon, kept = 1e-3, norm.variance_epsilon
        try:
            return plain(x)  # type: ignore[no-any-return, operator]
        finally:
            norm.variance_epsilon = kept

    norm.forward = forward  # type: ignore[assignment]
    return {}


class Uncorrected(torch.optim.AdamW):
    """AdamW whose moments are not corrected for their start at zero."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    @torch.no_grad()
    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        zero = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        state, (beta1, beta2), gradient = self.state[parameter] or zero, group["betas"], parameter.grad
        assert gradient is not None
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-group["lr"])
        self.state[parameter] = state


def uncorrected(model: torch.nn.Module) -> dict[str, Any]:
    return {"optimizer": adamw(model, Uncorrected)}


def detached(model: torch.nn.Module) -> dict[str, Any]:
    factor = model.base_model.model.model.layers[0].self_attn.v_proj.lora_B["default"]  # type: ignore[union-attr, index]
    factor.forward = lambda x: functional.linear(x, factor.weight.detach())  # type: ignore[union-attr]
    return {}


def base_trained(model: torch.nn.Module) -> dict[str, Any]:
    model.base_model.model.model.layers[1].self_attn.q_proj.base_layer.weight.requires_grad_(True)  # type: ignore[union-attr, index]
    return {}


NORM = "model.layers.1.post_attention_layernorm (Qwen3RMSNorm)"
FACTOR = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.default.weight"
BASE = "base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"
LOOP = "the accumulation of 2 micro-batches"
PLANTED: dict[str, tuple[bool, Callable[[torch.nn.Module], dict[str, Any]], dict[str, str]]] = {
    "the epsilon of one norm": (False, wrong_epsilon, {"OP-RMSNORM": NORM}),
    "clipping left out": (False, lambda _: {"clip": False}, {"OPT-CLIP-BOUND": "the gradients at the optimiser's step"}),
    "no bias correction": (False, uncorrected, {"OPT-ADAMW": "Uncorrected.step at "}),
    "a detached factor": (True, detached, {"LORA-GRADIENT-FLOW": FACTOR}),
    "a base weight trained": (True, base_trained, {"TRN-BASE-FROZEN": BASE}),
    "a mean of unequal means": (
        False,
        lambda _: {"weight": lambda _rows, _total, count: 1 / count},
        {"OPT-AVERAGE": LOOP, "LOSS-CE": "the loss of the step, over 2 micro-batches of 6 samples"},
    ),
    "accumulation that never divides": (
        False,
        lambda _: {"weight": lambda *_: 1.0},
        {"OPT-AVERAGE": LOOP, "LOSS-CE": "the loss of the step, over 2 micro-batches of 6 samples"},
    ),
    "a micro-batch that counts for nothing": (
        False,
        lambda _: {"weight": lambda rows, total, _: rows / total if rows == 4 else 0.0},
        {"OPT-AVERAGE": LOOP, "LOSS-CE": "the loss of the step, over 2 micro-batches of 6 samples"},
    ),
}
"""What is wrong → whether the model has adapters, what plants it, and the failures by claim, with how the culprit of each begins."""


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_found_by_its_name_and_by_its_own_check_alone(
    defect: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_adapters, plant, expected = PLANTED[defect]
    model = request.getfixturevalue("adapted" if with_adapters else "model")
    how = plant(model)
    failures = dict(found(model, **how))
    assert failures.keys() == expected.keys()
    assert all(failures[claim].startswith(culprit) for claim, culprit in expected.items())
    without(tuple(expected), monkeypatch)  # type: ignore[arg-type]
    assert found(model, **({**how, **plant(model)} if "optimizer" in how else how)) == []


def test_an_epsilon_that_is_not_the_configured_one_is_named_where_rounding_hides_it(model: torch.nn.Module) -> None:
    model.bfloat16().model.norm.variance_epsilon = 2e-6  # type: ignore[union-attr]
    assert found(model) == [("OP-RMSNORM", "model.norm (Qwen3RMSNorm)")]


def test_clipping_of_each_tensor_by_itself_is_found(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.nn.utils.clip_grad_norm_

    def each(parameters: Any, max_norm: float, *rest: Any, **more: Any) -> Tensor:
        given = list(parameters)
        norm = plain(given, 1e9)
        for parameter in given:
            plain([parameter], max_norm / len(given), *rest, **more)
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", each)
    assert found(model) == [("OPT-CLIP", "clip_grad_norm_")]


def test_a_loss_of_ones_own_is_held_where_it_is_handed_over(model: torch.nn.Module) -> None:
    def own(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            chosen = torch.log_softmax(factor * logits, -1).gather(1, labels[:, None])
            return guard.loss(-chosen.mean(), logits, labels)

        return loss

    optimizer = adamw(model)
    with blackswan.guard(model, optimizer, max_norm=BOUND) as guard:
        train(model, optimizer, loss_of=own(1.0))
    assert held(guard) == ALL
    guard = blackswan.guard(model, optimizer, max_norm=BOUND)
    with pytest.raises(blackswan.GuardError, match="LOSS-CE-GRADIENT is false of the gradient of the logits of micro-batch 1 of 2"), guard:
        train(model, optimizer, loss_of=own(2.0))


def test_a_number_that_is_none_stops_the_run(model: torch.nn.Module) -> None:
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")  # type: ignore[union-attr, index]
    assert found(model)[0] == ("TRN-NON-FINITE", "model.norm (Qwen3RMSNorm)")


def test_what_is_not_checked_is_said_once(model: torch.nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "blackswan"), blackswan.guard(model, optimizer) as guard:
        train(model, optimizer, clip=False, loss_of=lambda logits, labels: -torch.log_softmax(logits, -1)[:, labels].mean())
    expected = {
        "OPT-ADAMW": "SGD",
        "OPT-CLIP": "no call",
        "OPT-CLIP-BOUND": "max_norm",
        "LOSS-CE, LOSS-BCE and OPT-AVERAGE": "no loss was seen",
    }
    expected |= {"TRN-BASE-FROZEN": "nothing is frozen", "LORA-GRADIENT-FLOW": "no parameters lora_A"}
    for claim, why in expected.items():
        lines = [message for message in caplog.messages if f"not checked: {claim}: " in message]
        assert len(lines) == 1, claim
        assert why in lines[0]
    assert held(guard) == {"OP-RMSNORM"}


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"label_smoothing": 0.1}, "label smoothing"), ({"weight": torch.ones(3)}, "weights"), ({"reduction": "none"}, "not reduced")],
)
def test_a_loss_that_is_not_supported_is_stated(model: torch.nn.Module, settings: dict[str, Any], why: str) -> None:
    optimizer = adamw(model)
    with blackswan.guard(model, optimizer, max_norm=BOUND) as guard:
        train(model, optimizer, loss_of=lambda logits, labels: functional.cross_entropy(logits, labels, **settings).mean())
    assert any(why in line for line in guard.report().splitlines() if line.startswith("not checked: LOSS-CE: "))
    assert not held(guard) & {"LOSS-CE", "LOSS-CE-GRADIENT", "OPT-AVERAGE"}


def test_a_norm_of_another_formula_is_stated(model: torch.nn.Module) -> None:
    model.extra = torch.nn.LayerNorm(4)
    with blackswan.guard(model, adamw(model)) as guard:
        pass
    assert "norms of the class LayerNorm (extra is one)" in guard.report()


def test_a_guard_without_any_step_says_so(model: torch.nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "blackswan"), blackswan.guard(model, adamw(model)):
        pass
    assert caplog.messages == ["blackswan.guard: nothing was checked, for the optimiser made no step"]


def test_steps_are_checked_first_and_every_so_often_while_it_can_be_afforded(model: torch.nn.Module) -> None:
    optimizer, checked = adamw(model), []
    for budget in (1.0, 1e-9):
        with blackswan.guard(model, optimizer, max_norm=BOUND, first=2, every=3, budget=budget) as guard:
            for step in range(1, 8):
                before = guard.checked
                train(model, optimizer, steps=1)
                if guard.checked > before:
                    checked.append(step)
    assert checked == [1, 2, 3, 6, 1, 2]


def test_a_warning_lets_the_run_go_on(model: torch.nn.Module) -> None:
    optimizer = adamw(model)
    guard = blackswan.guard(model, optimizer, max_norm=BOUND, on_fail="warn")
    with pytest.warns(RuntimeWarning, match="OPT-CLIP-BOUND is false") as raised, guard:
        train(model, optimizer, clip=False)
    assert len(raised) == guard.checked == 3


def test_a_failure_leaves_the_parameters_alone_and_takes_every_hook_away(model: torch.nn.Module) -> None:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    functions = (functional.cross_entropy, functional.binary_cross_entropy_with_logits, torch.nn.utils.clip_grad_norm_)
    optimizer = adamw(model)
    with pytest.raises(blackswan.GuardError), blackswan.guard(model, optimizer, max_norm=BOUND):
        train(model, optimizer, weight=lambda *_: 1.0)
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
    assert functions == (functional.cross_entropy, functional.binary_cross_entropy_with_logits, torch.nn.utils.clip_grad_norm_)
    assert not any(module._forward_hooks for module in model.modules())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_the_file_of_a_failure_holds_a_case_of_the_claim_and_the_recorded_answer(model: torch.nn.Module) -> None:
    wrong_epsilon(model)
    optimizer = adamw(model)
    with pytest.raises(blackswan.GuardError) as stopped, blackswan.guard(model, optimizer, folder="kept"):
        train(model, optimizer)
    path = stopped.value.failures[0].replay
    assert path.parent == Path("kept")
    claim, case = load(path)
    require(claims()[claim], case)
    with np.load(path) as stored:
        answer = stored["answer:y"]
    assert stopped.value.failures[0].comparison.actual == answer[stopped.value.failures[0].comparison.index]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every is 0"),
        ({"first": -1}, "first is -1"),
        ({"on_fail": "stop"}, "on_fail is 'stop'; expected one of raise, warn"),
        ({"max_norm": 0.0}, "max_norm is 0.0"),
        ({"budget": 2}, "budget is 2"),
        ({"frozen": "*.weight"}, "expected a list of patterns"),
    ],
)
def test_bad_settings_are_refused(model: torch.nn.Module, settings: dict[str, Any], message: str) -> None:
    for made in (lambda: blackswan.guard(model, adamw(model), **settings), lambda: blackswan.guard.callback(**settings)):
        with pytest.raises(ValueError, match=message.replace("*", "")):
            made()


def test_bad_objects_are_refused(model: torch.nn.Module) -> None:
    with pytest.raises(TypeError, match="optimizer is NoneType; expected"):
        blackswan.guard(model, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model is str"):
        blackswan.guard("model", adamw(model))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter of the model"):
        blackswan.guard(torch.nn.Linear(2, 2), adamw(model))
    with pytest.raises(ValueError, match="no parameter is named like 'nothing"):
        blackswan.guard(model, adamw(model), frozen=["nothing.*"]).attach()
    with pytest.raises(TypeError, match="evry"):
        blackswan.guard.callback(evry=3)
    guard = blackswan.guard(model, adamw(model))
    with guard, pytest.raises(RuntimeError, match="watches already"):
        guard.attach()
    with pytest.raises(ValueError, match=r"expected one number of \[n, classes\]"):
        guard.loss(torch.zeros(()), torch.zeros(2, 3), torch.zeros(3))


def trained(model: torch.nn.Module, micro: int, **settings: Any) -> Any:
    """A run of transformers' Trainer over four steps of eight samples, in so many micro-batches; its callback."""
    rows = [{"input_ids": torch.arange(1, 6) + i % 8, "labels": torch.tensor(i % 3)} for i in range(16)]
    how = {"per_device_train_batch_size": 8 // micro, "gradient_accumulation_steps": micro, "max_steps": 4, "max_grad_norm": BOUND}
    quiet = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    callback = blackswan.guard.callback()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = TrainingArguments(output_dir="run", **how, **quiet, **settings)
        Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()  # type: ignore[arg-type]
    return callback


def test_the_trainer_holds_without_accumulation(model: torch.nn.Module) -> None:
    guard = trained(model, 1).guard
    assert held(guard) == ALL
    assert (guard.checked, guard.step, guard.max_norm) == (3, 4, BOUND)


def test_the_trainer_holds_with_adapters_in_mixed_precision(adapted: torch.nn.Module) -> None:
    assert held(trained(adapted, 1, bf16=True).guard) == ALL | ADAPTED


def test_the_accumulation_of_the_trainer_is_found(model: torch.nn.Module) -> None:
    with pytest.raises(blackswan.GuardError, match="counts 4 times what the mean over all gives it") as stopped:
        trained(model, 4)
    failures = {failure.claim.id: failure for failure in stopped.value.failures}
    assert list(failures) == ["OPT-AVERAGE", "LOSS-CE"]
    assert failures["OPT-AVERAGE"].culprit == "the accumulation of 4 micro-batches"
    loss = failures["LOSS-CE"].comparison
    assert loss.actual == pytest.approx(4 * float(loss.expected or 0), rel=1e-6)


@pytest.mark.parametrize(("micro_batches", "status", "said"), [(4, 1, "OPT-AVERAGE is false"), (1, 0, "OPT-AVERAGE held 3 times")])
def test_the_example_shows_what_its_page_says(micro_batches: int, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "trainer.py"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert example["main"](micro_batches) == status
    assert said in capsys.readouterr().out


def test_a_norm_that_is_not_called_is_stated(model: torch.nn.Module) -> None:
    optimizer = adamw(model)
    model.model.norm.eval()  # type: ignore[union-attr]
    with blackswan.guard(model, optimizer, max_norm=BOUND) as guard:
        train(model, optimizer)
    assert "not checked: OP-RMSNORM: 1 of 9 norms, as model.norm, were not called" in guard.report()
