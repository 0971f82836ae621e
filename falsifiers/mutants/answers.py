"""Wrong answers of the implementation: unsteady ones, probabilities, defaults, a device in the place of another; and rules that err."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from blackswan.contracts.model import Rule
from blackswan.falsifiers.mutants.registry import rule_mutant, wrong_step, wrong_steps
from blackswan.impl.samples import Samples

RUN = "falsifiers.subjects.implementation:Implementation.run"
Step = Callable[..., Any]


def _unsteady(of: tuple[str, str]) -> Step:
    """Every second answer of an operation is one unit in the last place away in the first element of an output."""
    (operation, output), answers = of, count()

    def wrong(run: Step, self: Any, asked: str, *arguments: Any) -> Any:
        outputs = run(self, asked, *arguments)
        if asked == operation and next(answers) % 2:
            moved = outputs[output] = outputs[output].copy()
            moved.reshape(-1)[0] = np.nextafter(moved.reshape(-1)[0], moved.dtype.type(np.inf))
        return outputs

    return wrong


wrong_steps(
    RUN,
    by=_unsteady,
    forward_not_deterministic=("Every second forward pass differs in the last place of one logit.", ("decoder_forward", "logits")),
    training_not_deterministic=("Every second training run differs in the last place of one loss.", ("train_steps", "losses")),
)


@wrong_step(RUN, "S13")
def evaluation_trains(run: Step, self: Any, operation: str, inputs: Any, *others: Any) -> Any:
    """A forward pass writes into a parameter of its caller."""
    outputs = run(self, operation, inputs, *others)
    if operation == "decoder_forward":
        inputs["parameters/model.norm.weight"][...] *= 1.0 + 2.0**-10
    return outputs


wrong_steps(
    "impl.pipeline:class_probabilities",
    probabilities_halved=("Half of each probability.", lambda right, *given: right(*given) / 2),
    probabilities_of_twice_the_logits=("Surer than the model is.", lambda right, logits, several: right(2 * logits, several)),
    probabilities_of_softmax=("The labels of a text share one probability.", lambda right, *given: right(given[0], False)),
    probabilities_of_sigmoid=("The classes of a text each have their own.", lambda right, *given: right(given[0], True)),
    probabilities_of_the_next_class=("Each class has that of its neighbour.", lambda right, *given: right(*given).roll(1, 1)),
    probabilities_of_another_text=("Each text has those of the one before.", lambda right, *given: right(*given).roll(1, 0)),
    probabilities_rounded=("Two digits after the point.", lambda right, *given: right(*given).round(decimals=2)),
    probabilities_in_narrow_numbers=("As precise as the logits.", lambda right, *given: right(*given).to(given[0].dtype).float()),
)
wrong_steps(
    "impl.trainer:class_probabilities",
    evaluation_probabilities_halved=("Half of each probability in an evaluation.", lambda right, *given: right(*given) / 2),
    evaluation_probabilities_of_another_text=("Each has those of the text before.", lambda right, *given: right(*given).roll(1, 0)),
)
wrong_steps(
    "impl.pipeline:classes_of",
    class_is_not_the_most_probable=("The neighbour of the most probable class.", lambda right, *given: right(*given).roll(1, -1)),
)


@wrong_step("impl.pipeline:ClassifyPipeline._samples")
def samples_kept_by_their_texts(samples: Any, self: Any, given: Any) -> Any:
    """Samples with the texts of the call before have its labels."""
    if isinstance(given, Samples):
        return samples(self, given)
    texts = [sample.text for sample in given]
    if vars(self).get("_texts") != texts:
        vars(self).update(_texts=texts, _read=samples(self, given))
    return vars(self)["_read"]


@wrong_step("impl.pipeline:ClassifyPipeline.answers")
def merged_probabilities_halved(answers: Step, pipeline: Any, texts: Any) -> Any:
    """Half of each probability where the updates are merged into the weights."""
    classes, probabilities = answers(pipeline, texts)
    return classes, probabilities / 2 if pipeline.merged else probabilities


@wrong_step("impl.pipeline:ClassifyPipeline.answers")
def labels_answered_in_lists(answers: Step, pipeline: Any, texts: Any) -> Any:
    """The labels of a text are a list, which no sample's are equal to, for these are in a tuple."""
    classes, probabilities = answers(pipeline, texts)
    return [list(each) if pipeline.config.multi_label else each for each in classes], probabilities


@wrong_step("impl.commands.predict:predictions")
def command_answers_in_reverse(predictions: Step, pipeline: Any, texts: Any) -> Any:
    """The command prints the answers of the last text first."""
    return reversed(list(predictions(pipeline, texts)))


@wrong_step("impl.pipeline:ClassifyPipeline._samples")
def samples_kept_by_their_list(samples: Any, self: Any, given: Any) -> Any:
    """A list that is filled anew has the samples that it had in the call before."""
    if vars(self).get("_list") is not given:
        vars(self).update(_list=given, _of_the_list=samples(self, given))
    return vars(self)["_of_the_list"]


@wrong_step("impl.projection:call")
def updates_merged_where_nothing_is_trained(call: Step, path: Any, operation: Any, **given: Any) -> Any:
    """Without gradients the update is added to the weight first, and rounded with it."""
    import torch

    if operation != "lora_linear" or torch.is_grad_enabled():
        return call(path, operation, **given)
    lora_a, lora_b, alpha = (given.pop(name) for name in ("lora_a", "lora_b", "alpha"))
    update = alpha / lora_a.shape[0] * (lora_b @ lora_a)
    return call(path, "linear", **{**given, "weight": (given["weight"] + update).to(given["weight"].dtype)})


def _other(**values: Any) -> Step:
    """Settings with other values than the published ones."""
    return lambda right, *given: replace(right(*given), **values)


wrong_steps(
    "impl.config:ClassifyConfig.qlora_default",
    qlora_without_nf4=("NF4 off.", _other(quantize_nf4=False)),
    qlora_of_another_rank=("Rank 64 with alpha 128.", _other(lora_rank=64, lora_alpha=128.0)),
    qlora_alpha_of_the_rank=("Alpha is the rank.", _other(lora_alpha=16.0), "S31"),
    qlora_rate_of_small_models=("One learning rate for models of every size.", _other(learning_rate=2e-4)),
    qlora_rate_below_13b=("A model of exactly 13B parameters has the lower rate.", lambda right, size: right(size + 1)),
    qlora_in_larger_batches=("Batches of 32.", _other(batch_size=32), "S31"),
    qlora_without_clipping=("No clipping of the gradient.", _other(gradient_clip_norm=None)),
    qlora_of_longer_texts=("Texts of 512 tokens.", _other(max_seq_len=512)),
    qlora_of_one_epoch=("One epoch.", _other(epochs=1)),
    qlora_on_all_projections=("LoRA on all projections.", _other(lora_targets="all")),
)
wrong_steps(
    "impl.config:ClassifyConfig.from_mapping",
    settings_of_shorter_texts=(
        "Texts have 256 tokens where a program says nothing.",
        lambda right, given: right({"max_seq_len": 256} | given),
    ),
)
wrong_step("impl.settings:resolve", name="rank_keeps_the_default_alpha", doc="Alpha stays 32 where a rank is given alone.")(
    lambda resolve, *given: replace(resolve(*given), lora_alpha=32.0)
)


@wrong_step("impl.settings:resolve")
def rank_beyond_64_keeps_its_alpha(resolve: Step, *given: Any) -> Any:
    """Alpha stops growing at a rank of 64: larger updates are scaled by less than was said."""
    found = resolve(*given)
    return replace(found, lora_alpha=min(found.lora_alpha, 128.0))


@wrong_step("impl.config:target_modules")
def full_fine_tuning_becomes_lora(targets_of: Step, targets: str) -> Any:
    """LoRA on all projections where training of all parameters was asked for."""
    return targets_of("all" if targets == "full" else targets)


@wrong_step("impl.config:target_modules")
def full_fine_tuning_without_a_reason(targets_of: Step, targets: str) -> Any:
    """Training of all parameters is refused as a name that is unknown."""
    return targets_of("every" if targets == "full" else targets)


wrong_steps(
    "impl.pipeline:base_shapes",
    summary_counts_no_norms=("The norms' parameters are not counted.", lambda right, *given: _kept(right(*given), "norm")),
    summary_counts_no_biases=("The biases are not counted.", lambda right, *given: _kept(right(*given), ".bias")),
)
wrong_step("impl.pipeline:ClassifyPipeline.summary", name="summary_of_other_bytes", doc="The frozen weights take ten times their bytes.")(
    lambda summary, pipeline: summary(pipeline).replace(" bytes frozen", "0 bytes frozen")
)
wrong_steps(
    "impl.pipeline:ClassifyPipeline.summary",
    summary_of_classes_alone=(
        "Several labels a sample are called classes.",
        lambda right, self: right(self).replace("labels, ", "classes, "),
    ),
    summary_of_a_whole_alpha=(
        "An alpha of 2.5 is shown as 2: who checks a run by its summary is told of another one.",
        lambda right, self: re.sub(r"alpha (\d+)\.\d+", r"alpha \1", right(self)),
    ),
    summary_pads_on_the_right=(
        "The side of the padding is the default one.",
        lambda right, self: right(self).replace("padded on the left", "padded on the right"),
    ),
    summary_of_two_targets=(
        "Queries and values are named, whatever is adapted.",
        lambda right, self: re.sub(r"on q_proj, .*", "on q_proj, v_proj", right(self)),
    ),
)
wrong_step("impl.memory:Estimate.table", name="memory_smallest_first", doc="The smallest part of the memory comes first.")(
    lambda table, self: "\n".join([*table(self).splitlines()[-2::-1], table(self).splitlines()[-1]])
)
wrong_step("impl.pipeline:ClassifyPipeline.summary", name="summary_of_plain_nf4", doc="NF4 is NF4, double quantised or not.")(
    lambda summary, pipeline: summary(pipeline).replace(" with double quantisation", "")
)


@wrong_step("impl.commands.summary:open_saved")
def summary_memory_of_the_defaults(open_saved: Any, options: Any) -> Any:
    """The memory of an adapter's step is that of the default batch."""
    pipeline = open_saved(options)
    if options.memory:
        pipeline.config = replace(pipeline.config, batch_size=16, accumulation_steps=1)
    return pipeline


@wrong_step("impl.commands.summary:open_saved")
def summary_memory_of_an_adapter_by_default(open_saved: Any, options: Any) -> Any:
    """The memory of an adapter's step is that of its batch with the usual rank, targets, dtype and NF4."""
    pipeline = open_saved(options)
    if options.memory:
        own = pipeline.config
        kept = {name: getattr(own, name) for name in ("num_classes", "batch_size", "accumulation_steps", "max_seq_len")}
        pipeline.config = type(own)(**kept)
    return pipeline


wrong_steps(
    "impl.commands.summary:memory_of_a_step",
    summary_memory_of_one_sample=("The memory of one sample.", lambda right, model, config, _, *given: right(model, config, 1, *given)),
    summary_memory_in_float32=(
        "The memory in float32.",
        lambda right, model, config, *given: right(model, replace(config, dtype="float32"), *given),
    ),
    summary_memory_without_nf4=(
        "The memory of weights that are not in NF4.",
        lambda right, model, config, *given: right(model, replace(config, quantize_nf4=False, double_quantize=False), *given),
    ),
)


def _kept(shapes: Mapping[str, Any], left_out: str) -> dict[str, Any]:
    return {name: shape for name, shape in shapes.items() if left_out not in name}


@wrong_step("falsifiers.subjects.implementation:Implementation.default_configurations", "S31")
def defaults_of_the_ancestor(configurations: Step, self: Any, model_params: float) -> list[dict[str, Any]]:
    """Rank 16 with alpha 16, rate 1e-4 and batches of 32, whatever the model."""
    ancestral = {"lora_rank": 16, "lora_alpha": 16.0, "learning_rate": 1e-4, "batch_size": 32}
    return [{**config, **ancestral} for config in configurations(self, model_params)]


@wrong_step("impl.device:resolve_device", "S26")
def device_falls_back_in_silence(resolve: Step, name: str) -> Any:
    """The CPU instead of a device that is not there or has no such name."""
    try:
        return resolve(name)
    except Exception:  # the defect is that no refusal gets through, whatever it is
        return resolve("cpu")


@rule_mutant()
def rule_never_reports(rule: Rule) -> Rule:
    """A rule that holds for everything."""
    return replace(rule, require="true")


@rule_mutant()
def rule_always_reports(rule: Rule) -> Rule:
    """A rule that holds for nothing."""
    return replace(rule, when="true", require="false", recommend={})


@rule_mutant("S18")
def rule_recommends_what_is_there(rule: Rule) -> Rule:
    """Advice that does not heal.

    Advice on a field that the rule does not ask about by name stays: the field may not be there.
    """
    asked = rule.when + rule.require
    recommend: Mapping[str, str] = {name: name if name in asked else advice for name, advice in rule.recommend.items()}
    return replace(rule, recommend=recommend)


@rule_mutant("own")
def rule_counts_unmixed_batches(rule: Rule) -> Rule:
    """Updates for the rarest class counted as if every batch held nothing else, which asks for 44 epochs where 4 do."""
    return replace(rule, require=rule.require.replace("required_epochs", "100.0 * effective_batch / minority_count"))


@rule_mutant("own")
def rule_for_every_model_size(rule: Rule) -> Rule:
    """A rule for models of one size is asked of all."""
    return replace(rule, when=rule.when.replace("model_params <= 13e9", "true").replace("model_params > 13e9", "true"))


@rule_mutant("own")
def rule_without_the_range_of_alpha(rule: Rule) -> Rule:
    """Twice the rank or more is asked for where a quarter of it is known to work."""
    return replace(rule, when=rule.when.replace("0.25 *", "2.0 *"), require=rule.require.replace("0.25 *", "2.0 *"))


@rule_mutant("own")
def rule_lets_zero_pass(rule: Rule) -> Rule:
    """Zero where only a positive number trains anything."""
    return replace(rule, require=rule.require.replace("> 0.0", ">= 0.0"))
