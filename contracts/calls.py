"""The page of what a call of each operation receives and returns: `python -m contracts calls`."""

import textwrap
from collections.abc import Iterator, Mapping

from blackswan.contracts.model import Input, Output, Signature

PREFACE = """# What a call receives and returns

`python -m contracts calls` makes this page from [operations.yaml](operations.yaml). A function is called with an operation's inputs and
scalars by their names; where none of its parameters has such a name, in the order in which they stand here. One that takes any arguments
(`*args`, as `torch.autograd.Function.apply` does) or tells no signature is called in that order, one that takes any keywords by name.

- **Tensors.** *storage* is the dtype under test, such as float32 or bfloat16. `rows` stands for any leading axes, flattened. A tensor of
  dtype float32 is float64 where float64 is under test.
- **Layout.** Arguments are strided tensors with any strides and any alignment of their first element. A function that takes contiguous
  tensors only is asked with `blackswan vet --contiguous`.
- **Sizes** are one and more, and no multiple of anything. On a GPU arrays may have more elements than 32 bits count.
- **Memory.** Arguments belong to the caller and are not written to. Results are fresh memory, which they share with no argument and with
  the result of no other call. When the call has returned, nothing is written any more, on any stream or by any thread.
- **Result.** One tensor, a tuple in the order of the outputs, or a mapping by their names; plain strided tensors, of no subclass.
- **Gradients** are those of autograd, with respect to the inputs named. A result without a graph says that there is no backward pass,
  and says so in every case or in none.
- **State.** The functions of torch, NumPy and Python, the settings of torch and NumPy, everybody's random numbers, the clock, the
  environment, the working directory and the handlers of signals are afterwards what they were before. What a function prints goes to
  standard error.

A parameter called `dtype` gets the dtype under test. An optional input that is not given is left out, or None by position.
"""


def page(operations: Mapping[str, Signature]) -> str:
    """The page as markdown."""
    return "\n".join([PREFACE, *("\n".join(_operation(signature)) for signature in operations.values())])


def _operation(signature: Signature) -> Iterator[str]:
    yield f"## {signature.name}\n"
    yield textwrap.fill(signature.doc, 140, break_long_words=False, break_on_hyphens=False) + "\n"
    if signature.derived:
        yield "With " + ", ".join(f"`{name}` = {expression}" for name, expression in signature.derived.items()) + ".\n"
    yield "| | name | shape | dtype |\n|---|---|---|---|"
    held = "float32" if signature.precision == "float32" else "storage"
    for name, array in signature.inputs.items():
        yield f"| input | `{name}` | {_shape(array)} | {_input(array, held)} |"
    for name in signature.attributes:
        yield f"| scalar | `{name}` | | int, the size of that name |"
    for name, scalar in signature.scalars.items():
        default = "" if scalar.default is None else f", default {scalar.default}"
        yield f"| scalar | `{name}` | | {' or '.join(map(str, scalar.of)) or scalar.type}{default} |"
    for name, output in signature.outputs.items():
        yield f"| output | `{name}` | {_shape(output)} | {_output(output, held)} |"
    yield f"\nGradients: {', '.join(f'`{name}`' for name in signature.gradients) or 'none'}.\n"


def _shape(array: Input | Output) -> str:
    return f"the parameters of a {array.group}, by name" if array.group else f"[{', '.join(array.shape)}]"


def _output(output: Output, held: str) -> str:
    masters = "float32" if output.group == "trainable" else held
    return masters if output.dtype == "storage" else output.dtype


def _input(array: Input, held: str) -> str:
    kind = {"real": held, "int": "int64"}.get(array.dtype, array.dtype)
    below = f", from 0 to below {array.below}" if array.below else ""
    return f"{kind}{below}{', optional' if array.optional else ''}"
