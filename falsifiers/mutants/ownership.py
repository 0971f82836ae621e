"""Programs that write to tensors which somebody else keeps, or read them after they were handed over."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blackswan.falsifiers.mutants.registry import wrong_step

Step = Callable[..., Any]


@wrong_step("impl.classifier:Classifier.__init__")
def masters_are_the_start_values(init: Any, self: Any, config: Any, adaptation: Any, base: Any, trainable: Any, **options: Any) -> None:
    """Start values that need no conversion become the parameters, not copies of them."""
    init(self, config, adaptation, base, trainable, **options)
    for name, parameter in self.trainable_parameters().items():
        if trainable[name].dtype == parameter.dtype and trainable[name].device == parameter.device:
            parameter.data = trainable[name]


@wrong_step("impl.optimiser:AdamW.state")
def state_holds_the_parameters(state: Any, self: Any) -> Any:
    """The state that is given out has the parameters themselves."""
    return state(self) | {f"trainable/{name}": value.detach() for name, value in self.parameters.items()}


@wrong_step("impl.optimiser:AdamW.load_state")
def state_becomes_the_parameters(load: Any, self: Any, state: Any) -> None:
    """The tensors of a state that is loaded become the parameters."""
    load(self, state)
    for name, parameter in self.parameters.items():
        parameter.data = state[f"trainable/{name}"]


@wrong_step("impl.decoder_optimiser:DecoderAdamW.__init__")
def decoder_trains_what_it_was_made_of(init: Any, self: Any, decoder: Any, *settings: Any, **named: Any) -> None:
    """The tensors that a decoder was made of are the parameters that pre-training moves, and not copies of them."""
    given = {name: parameter.data for name, parameter in decoder.named_parameters()}
    init(self, decoder, *settings, **named)
    for name, parameter in self.parameters.items():
        parameter.data = given[name]


@wrong_step("impl.decoder:Body.forward")
def batches_known_by_their_version(forward: Any, self: Any, input_ids: Any, mask: Any) -> Any:
    """A batch's mask is known by its place and version, and tensors of torch's inference mode have none."""
    vars(self)["_known"] = mask.data_ptr(), mask._version
    return forward(self, input_ids, mask)


@wrong_step("impl.decoder_optimiser:DecoderAdamW.load_state")
def decoder_state_becomes_the_moments(load: Any, self: Any, state: Any, steps: int) -> None:
    """The moments of a decoder's state that is loaded become the optimiser's own, which steps write to."""
    load(self, state, steps)
    for group, moments in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
        moments.update({name: state[f"{group}/{name}"] for name in moments})


@wrong_step("impl.optimiser:AdamW.clip")
def gradient_clipped_in_place(clip: Any, self: Any, gradient: Any, max_norm: float) -> Any:
    """The gradient that is given is clipped where it lies."""
    clipped, norm = clip(self, gradient, max_norm / 1000)
    return gradient.copy_(clipped), norm


@wrong_step("impl.trainer:Trainer.gradient_vector")
def gradient_given_out_is_kept(vector: Any, self: Any) -> Any:
    """The vector that is given out is the one that is stepped with."""
    found = vector(self)
    return self._accumulated[0].gradient if len(self._accumulated) == 1 else found


@wrong_step("impl.samples:Samples.batch")
def labels_of_neighbours_are_the_corpus(batch: Any, self: Any, indices: Any, *given: Any) -> Any:
    """The labels of samples that follow one another are no copy of the corpus's, which whoever writes to a batch then changes."""
    found, places = batch(self, indices, *given), list(map(int, indices))
    own = torch.from_numpy(self.targets[places[0] : places[-1] + 1])
    neighbours = places == [*range(places[0], places[-1] + 1)]
    return replace(found, labels=own) if neighbours and own.dtype == found.labels.dtype else found


@wrong_step("impl.samples:Samples.batch")
def labels_of_a_range_are_neighbours(batch: Any, self: Any, indices: Any, *given: Any) -> Any:
    """The labels of a range are read in one piece from its first one on, whatever its step is."""
    found = batch(self, indices, *given)
    start = indices.start if isinstance(indices, range) else 0
    own = torch.from_numpy(self.targets[start : start + len(indices)].copy()).to(found.labels)
    return replace(found, labels=own) if isinstance(indices, range) and own.shape == found.labels.shape else found


@wrong_step("impl.trainer:Trainer.gradient_vector")
def gradients_are_given_out_in_one_vector(vector: Any, self: Any) -> Any:
    """The gradient that is given out lies where the one that was given out before does."""
    found = vector(self)
    return vars(self).setdefault("_given", found).copy_(found)


@wrong_step("impl.pipeline:ClassifyPipeline.answers")
def answers_of_texts_are_for_reading(answers: Any, self: Any, *given: Any) -> Any:
    """Answers to texts are tensors of torch's inference mode, with which nothing can be computed where gradients are kept."""
    with torch.inference_mode():
        return answers(self, *given)


@wrong_step("impl.trainer:Trainer.forward_only")
def answers_are_given_out_in_one_array(forward: Any, self: Any, *given: Any, **named: Any) -> Any:
    """The probabilities of an evaluation lie where those of the evaluation before do, if they are as many."""
    found = forward(self, *given, **named)
    if found.probabilities is None:
        return found
    kept = vars(self).setdefault("_answers", {}).setdefault(found.probabilities.shape, found.probabilities)
    return replace(found, probabilities=kept.copy_(found.probabilities))


def _in_one_place(tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """The tensors where those of the same name, shape and dtype were before."""
    return {name: _PLACES.setdefault((name, value.shape, value.dtype), value).copy_(value) for name, value in tensors.items()}


_PLACES: dict[Any, Tensor] = {}


@wrong_step("impl.tokens:Tokens.pad")
def batches_are_given_out_in_one_place(pad: Any, self: Any, rows: Any) -> Any:
    """The ids of a batch lie where those of the batch before do, if it was as large."""
    return tuple(_in_one_place(dict(enumerate(pad(self, rows)))).values())


@wrong_step("impl.merge:merge_adapter")
def merged_weights_are_given_out_in_one_place(merge: Any, *given: Any) -> Any:
    """Merged weights lie where those of the merge before do."""
    return _in_one_place(merge(*given))


@wrong_step("impl.trainer:Trainer.__init__")
def class_weights_scaled_in_place(init: Any, self: Any, *given: Any, **options: Any) -> None:
    """Class weights are scaled to a mean of one where they lie."""
    if options.get("class_weights") is not None:
        options["class_weights"].div_(options["class_weights"].mean())
    init(self, *given, **options)


@wrong_step("impl.merge:lora_merge")
def merge_updates_the_base(merge: Any, weight: Any, *factors: Any) -> Any:
    """The update is added to the base's own tensor."""
    return weight.copy_(merge(weight, *factors))


_SHAPES: dict[str, Any] = {}


@wrong_step("impl.classifier:trainable_shapes")
def shapes_kept_for_an_architecture(shapes: Any, *given: Any) -> Any:
    """A list of trained tensors is the same object for each that asks for it."""
    return _SHAPES.setdefault(repr(given), shapes(*given))


@wrong_step("impl.dispatch:_local")
def recorded_ids_are_the_callers(local: Any, value: Any) -> Any:
    """A recorded input of whole numbers is the tensor itself, in which the next batch may be."""
    return local(value) if value.is_floating_point() else value


@wrong_step("impl.dispatch:_local")
def recorded_inputs_are_written_to(local: Any, value: Any) -> Any:
    """A recorded input that has no gradient is the tensor itself, to which the optimiser writes later."""
    return local(value) if value.requires_grad else value


@wrong_step("impl.pipeline:ClassifyPipeline._logits")
def copies_answer_by_their_original(logits: Step, self: Any, texts: Any) -> Any:
    """A function that a pipeline keeps for its answers stays that of the original in a copy."""
    return vars(self).setdefault("_answer", lambda given: logits(self, given))(texts)


@wrong_step("impl.pipeline:ClassifyPipeline._logits")
def answers_of_threads_mixed(_: Step, self: Any, texts: Any) -> Any:
    """The logits of batches are gathered in a list that the pipeline keeps, in which those of two threads meet."""
    rows = vars(self).setdefault("_rows", [])
    rows.clear()
    for start in range(0, len(texts), self.config.batch_size):
        given = self.tokens.batch(texts[start : start + self.config.batch_size])
        rows.append(self.classifier(*(each.to(self.device) for each in given)).detach().cpu())
    return torch.cat(rows)


@wrong_step("impl.decoder:frozen")
def frozen_for_everybody(frozen: Step, tensor: Tensor) -> Any:
    """A tensor that a model is made of requires no gradient any more, also where somebody trains it."""
    return frozen(tensor.requires_grad_(False))


@wrong_step("impl.classifier:Classifier.__init__")
def heads_of_tied_models_refused(init: Any, self: Any, config: Any, adaptation: Any, base: Any, *given: Any, **options: Any) -> None:
    """A head of a language model is refused beside the embedding that it is tied to, as such a model's state has it."""
    if config.tied and "lm_head.weight" in base:
        raise ValueError("unexpected tensor 'lm_head.weight'")
    init(self, config, adaptation, base, *given, **options)


@wrong_step("impl.optimiser:AdamW.step")
def copies_of_turned_parameters_moved(step: Step, self: Any, *given: Any) -> None:
    """Parameters that do not lie row by row in memory stay as they were: a copy of them is moved."""
    turned = {name: value.detach().clone() for name, value in self.parameters.items() if not value.is_contiguous()}
    step(self, *given)
    for name, value in turned.items():
        self.parameters[name].data.copy_(value)


@wrong_step("impl.decoder:Norm.__init__")
def norms_put_together_once(init: Step, self: Any, path: str, weight: Tensor, eps: float, operation: str = "rms_norm") -> None:
    """A norm computes with the weight that it was made of, also where another one was put in its place."""
    from blackswan.impl.dispatch import call

    init(self, path, weight, eps, operation)
    first = self.weight
    vars(self)["forward"] = lambda x: call(path, operation, x=x, weight=first, eps=eps)


@wrong_step("impl.nf4:Nf4Weight.__init__")
def codes_not_in_the_state(init: Step, self: Any, *given: Any) -> None:
    """A model's state dict has no weights in NF4, and one that is loaded leaves those of the model."""
    init(self, *given)
    self._non_persistent_buffers_set.update(("codes", "absmax"))


@wrong_step("impl.decoder:Attention.forward")
def positions_of_the_first_batch_in_a_memory(forward: Step, self: Any, x: Any, mask: Any, positions: Any) -> Any:
    """Positions are counted once for a mask, and kept when another batch is written into its memory."""
    if vars(self).get("seen", (None,))[0] is not mask:
        self.seen = mask, positions
    return forward(self, x, mask, self.seen[1])


class _Drawn(dict[str, Any]):
    """Another value at the next look."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self[name] = value.flip(0)
        return value


wrong_step(
    "impl.decoder:random_tensors", name="random_weights_drawn_at_each_look", doc="A random weight is drawn anew when it is read again."
)(lambda draw, *given: _Drawn(draw(*given)))
