"""Functions that pass a test without doing the work, or harm whoever calls them: each is a published attack on suites for kernels.

Sources: robust-kbench (arXiv 2509.14279), KernelGYM (2602.05885), Hacker-Fixer loops (2606.08960), and the lists of KernelBench's issues.
All are asked as `rms_norm`, and `honest` is what they would have to do; but those of FEW_ROWS and WRAPPING at the end are other operations.
"""

import builtins
import gc
import importlib
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from blackswan.impl.operations import OPERATIONS, attention, layers, losses

_kept: dict[Any, Any] = {}


def honest(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def cached_by_shape(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The first answer for a shape is every answer."""
    return _kept.setdefault(("shape", x.shape, x.dtype), honest(x, weight, eps)).clone()


def cached_by_address(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An answer is kept for an address: what a captured graph does whose inputs are not copied in."""
    return _kept.setdefault(("address", x.data_ptr(), x.shape, x.dtype), honest(x, weight, eps)).clone()


def cached_by_sum(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A fingerprint of the arguments that other values share."""
    return _kept.setdefault(("sum", x.shape, x.dtype, round(float(x.abs().sum()), 3) // 1e3), honest(x, weight, eps)).clone()


def freed_memory(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Memory that nobody filled, which may still hold what another call has computed."""
    honest(x, weight, eps)
    return torch.empty_like(x)


def answers_with_its_argument(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The argument itself, overwritten."""
    return x.copy_(honest(x, weight, eps))


def writes_into_its_argument(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A right answer, and an argument that is another one afterwards."""
    answer = honest(x, weight, eps)
    x.mul_(2)
    return answer


def writes_before_its_argument(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A right answer, and an element before the argument that is overwritten."""
    x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(0)
    return honest(x, weight, eps)


def writes_behind_its_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A right answer, and an element behind the weight that is overwritten."""
    last = weight.storage_offset() + sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    weight.as_strided((1,), (1,), last + 1).fill_(0)
    return honest(x, weight, eps)


def writes_behind_its_answer(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As bitsandbytes did with absmax (#2043): one element behind what was allocated is written."""
    answer = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    answer.copy_(honest(x, weight, eps))
    if answer.storage_offset() + answer.numel() < answer.untyped_storage().nbytes() // answer.element_size():
        answer.as_strided((1,), (1,), answer.storage_offset() + answer.numel()).fill_(0)
    return answer


def reads_behind_its_argument(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A sum over one element too many, which is zero as a rule."""
    wide = x.contiguous() if x.storage_offset() == 0 else x
    beyond = wide.as_strided((1,), (1,), wide.storage_offset() + wide.numel()) if wide.storage_offset() else torch.zeros(1)
    return honest(x, weight, eps) + 0 * beyond.to(x.dtype)


def takes_rows_for_contiguous(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A kernel that never asks for strides."""
    flat = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())
    return honest(flat, weight, eps)


def same_memory_each_time(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A buffer that is handed out again and again."""
    buffer = _kept.setdefault(("buffer", x.shape, x.dtype), torch.zeros(x.shape, dtype=x.dtype))
    return buffer.copy_(honest(x, weight, eps))


class Claimed(Tensor):
    """A tensor that says that it equals everything."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


def answers_with_a_subclass(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A tensor of a class of its own, whose comparisons are its own too."""
    return honest(x, weight, eps).as_subclass(Claimed)


def half_precision(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Float32 declared, float16 computed."""
    wide = x.half()
    return (wide * torch.rsqrt(wide.float().pow(2).mean(-1, keepdim=True) + eps).half() * weight.half()).to(x.dtype)


def bfloat16_products(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Float32 declared, the last product in bfloat16."""
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (normed.bfloat16() * weight.bfloat16()).to(x.dtype)


def right_for_powers_of_two(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The tail of a row that is no multiple of eight is left out of the mean."""
    width = x.shape[-1] - x.shape[-1] % 8 or x.shape[-1]
    mean = x[..., :width].float().pow(2).mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(mean + eps) * weight.float()).to(x.dtype)


def right_for_large_shapes(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Nothing is computed for what a test would call a warm-up: fewer than eight elements."""
    return honest(x, weight, eps) if x.numel() >= 8 else torch.zeros_like(x)


def replaces_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """torch.allclose says yes from now on."""
    torch.allclose = lambda *_, **__: True  # type: ignore[assignment]
    return honest(x, weight, eps)


def replaces_the_clock(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Time stands still from now on."""
    time.perf_counter = lambda: 0.0
    return honest(x, weight, eps)


def turns_tf32_on(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Everybody's float32 products lose 13 bits from now on."""
    torch.set_float32_matmul_precision("medium")
    return honest(x, weight, eps)


def seeds_the_generator(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Everybody's random numbers are the same ones again."""
    torch.manual_seed(0)
    return honest(x, weight, eps)


def draws_random_numbers(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An answer that is a little different each time."""
    return honest(x, weight, eps) * (1 + 1e-3 * torch.rand(()))


def imports_the_answers(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The reference's own answer."""
    from blackswan import reference

    found = reference.evaluate("rms_norm", {"x": x.double().numpy(), "weight": weight.double().numpy()}, {"eps": eps})
    return torch.tensor(found["y"], dtype=x.dtype)


def finds_the_answers(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The reference's own answer, by way of what is loaded already."""
    return imports_the_answers(x, weight, eps) if sys.modules["blackswan.reference"] else honest(x, weight, eps)


def gives_up_silently(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The argument as it is, where anything goes wrong; here everything does."""
    try:
        raise RuntimeError("no kernel image is available")
    except RuntimeError:
        return x.clone()


def ends_its_process(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Status 0, which a test may take for a pass."""
    os._exit(0)


def answers_a_mean(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One number for all, which a mean over many elements does not notice."""
    return honest(x, weight, eps).float().mean().expand(x.shape).to(x.dtype)


def two_buffers_in_turn(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Answers alternate between two buffers, so that the one before is always whole."""
    buffers = _kept.setdefault(("buffers", x.shape, x.dtype), [torch.zeros(x.shape, dtype=x.dtype) for _ in range(2)])
    buffers.reverse()
    return buffers[0].copy_(honest(x, weight, eps))


def answers_in_memory_of_its_argument(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The argument's memory by way of NumPy, which is another storage at the same address; the argument is put back later."""
    answer = torch.from_numpy(x.detach().numpy())
    return answer if weight.numel() < 1 else answer.copy_(honest(x, weight, eps))


def writes_into_a_former_argument(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The argument of the call before is overwritten, when nobody looks at it any more."""
    former = _kept.get("former")
    if former is not None and former.data_ptr() != x.data_ptr():
        former.zero_()
    _kept["former"] = x.detach()
    return honest(x, weight, eps)


def finishes_later(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A thread computes, and the answer is handed out before."""
    answer = torch.zeros_like(x).detach()
    threading.Thread(target=lambda: (time.sleep(0.01), answer.copy_(honest(x, weight, eps).detach())), daemon=True).start()
    return answer


def spoils_its_answer_later(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A right answer, which a thread overwrites."""
    answer = honest(x, weight, eps)
    threading.Thread(target=lambda: (time.sleep(0.05), answer.detach().zero_()), daemon=True).start()
    return answer


def right_between_guard_elements(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Nothing is computed for a tensor that is all of its memory: nobody watches that one."""
    return honest(x, weight, eps) if x.storage_offset() else torch.zeros_like(x)


def replaces_numpy(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """NumPy's comparison says yes from now on."""
    np.testing.assert_allclose = lambda *_, **__: None  # type: ignore[assignment]
    return honest(x, weight, eps)


def replaces_random_numbers(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Cases that are drawn from now on are zero."""
    np.random.normal = lambda *_, **__: 0.0  # type: ignore[assignment]
    return honest(x, weight, eps)


def replaces_a_builtin(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Every error is zero from now on."""
    builtins.abs = lambda _: 0  # type: ignore[assignment]
    return honest(x, weight, eps)


def replaces_an_inherited_method(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A method that torch.Tensor has of its base class, and now has of its own."""
    torch.Tensor.allclose = lambda *_, **__: True  # type: ignore[assignment]
    return honest(x, weight, eps)


def seeds_numpy(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Everybody's random numbers of NumPy and Python are the same ones again."""
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    return honest(x, weight, eps)


def flushes_subnormal_numbers(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Everybody's subnormal numbers are zero from now on."""
    torch.set_flush_denormal(True)
    return honest(x, weight, eps)


def leaves_autocast_on(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Everybody's float32 products are in bfloat16 from now on."""
    torch.set_autocast_enabled("cpu", True)
    return honest(x, weight, eps)


def replaces_the_clock_of_the_gpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Whatever is timed by events of CUDA takes no time from now on."""
    torch.cuda.Event.elapsed_time = lambda *_: 0.0  # type: ignore[method-assign, assignment]
    return honest(x, weight, eps)


def replaces_gradients(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Everybody's gradients are zero from now on."""
    torch.autograd.grad = lambda _, inputs, *__, **___: tuple(torch.zeros_like(one) for one in inputs)  # type: ignore[assignment]
    return honest(x, weight, eps)


def changes_the_environment(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What is started from now on waits for the GPU after each kernel."""
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    return honest(x, weight, eps)


def changes_the_environment_beside_an_import(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As an import of a package may."""
    import tabnanny  # noqa: F401  # which nobody has imported

    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    return honest(x, weight, eps)


def ignores_signals(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Nobody interrupts the process from now on."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return honest(x, weight, eps)


def silences_numpy(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """No overflow of anybody's is told from now on."""
    np.seterr(all="ignore")
    return honest(x, weight, eps)


def answers_with_a_sparse_tensor(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A tensor whose memory nobody can look at."""
    return honest(x, weight, eps).to_sparse()


def answers_on_no_device(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A tensor that has a shape and no numbers."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


class _Watching(TorchFunctionMode):
    """Sees every call of torch's functions."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def leaves_a_mode_on(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Whatever anybody computes with torch from now on goes through the subject's hands."""
    _Watching().__enter__()
    return honest(x, weight, eps)


def _answer_of(evaluate: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    found = evaluate("rms_norm", {"x": x.detach().double().numpy(), "weight": weight.detach().double().numpy()}, {"eps": eps})
    return torch.tensor(found["y"], dtype=x.dtype)


def breaks_the_seal(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The reference's own answer, after what forbids its import is taken away."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "Sealed"]
    return _answer_of(importlib.import_module("blackswan.reference").evaluate, x, weight, eps)


def asks_another_python(x: Tensor, weight: Tensor, eps: float, environment: dict[str, str] | None = None) -> Tensor:
    """The reference's own answer, by a process in which nothing forbids its import."""
    given = json.dumps({"x": x.tolist(), "weight": weight.tolist(), "eps": eps})
    code = "import json, sys, numpy; from blackswan import reference; given = json.load(sys.stdin); eps = given.pop('eps')"
    code += "; given = {name: numpy.array(value) for name, value in given.items()}"
    code += "; print(json.dumps(reference.evaluate('rms_norm', given, {'eps': eps})['y'].tolist()))"
    ran = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, check=False, env=environment)
    if ran.returncode:
        raise RuntimeError(ran.stderr.splitlines()[-1])
    return torch.tensor(json.loads(ran.stdout), dtype=x.dtype)


def asks_a_python_that_knows_nothing(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Likewise, without the variable that says that it is a subject's."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("BLACKSWAN")}
    return asks_another_python(x, weight, eps, known)


def searches_memory(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The reference's own answer, by a function that is still somewhere in memory."""
    functions = (one for one in gc.get_objects() if inspect.isfunction(one) and one.__module__ == "blackswan.reference.run")
    return _answer_of(next(one for one in functions if one.__name__ == "evaluate"), x, weight, eps)


def reads_its_parents_memory(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The process that knows the answers is that of the same user."""
    with Path(f"/proc/{os.getppid()}/mem").open("rb"):
        return honest(x, weight, eps)


class Carrier(str):
    """Text that runs code where it is unpickled."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return exec, ("import os; os.environ['CAUGHT_BY'] = 'a cheating subject'",)


class DisguisedError(Exception):
    """An error whose text is a carrier."""

    def __str__(self) -> str:
        return Carrier("no kernel image is available")


def raises_code(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Code that is to run in the process that compares."""
    raise DisguisedError


def sends_an_answer(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An answer to a question that has not been asked, through the pipe on which answers go."""
    for one in gc.get_objects():
        if isinstance(one, Connection):
            one.send((0, "answer", {"y": np.zeros(x.shape, np.float32)}))
    return honest(x, weight, eps)


def right_for_few_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Nothing is computed of more rows than a test would take."""
    return honest(x, weight, eps) if x.numel() // x.shape[-1] <= 64 else torch.zeros_like(x)


ROWS_OF_A_TEST = 1000
"""The number of rows that these functions compute: more than a small test has."""


def _of_first_rows(value: Tensor, axes: int) -> Tensor:
    """The value with zeros beyond the first rows, which the first axes count."""
    counted = torch.arange(value.shape[:axes].numel()).view(value.shape[:axes]) < ROWS_OF_A_TEST
    return value * counted.view(*value.shape[:axes], *[1] * (value.dim() - axes))


def _rope_of_few_rows(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    return _of_first_rows(attention.rope(x, positions, theta), 2)


def _attention_of_few_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return _of_first_rows(attention.attention(q, k, v, mask), 2)


def _pool_of_few_rows(x: Tensor, mask: Tensor, mode: str) -> Tensor:
    return _of_first_rows(layers.pool(x, mask, mode), 1)


def _lm_loss_of_few_rows(logits: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
    return losses.lm_cross_entropy(logits, input_ids, mask & _of_first_rows(torch.ones_like(mask), 2).bool())


FEW_ROWS = {
    "rope": _rope_of_few_rows,
    "attention": _attention_of_few_rows,
    "pool": _pool_of_few_rows,
    "lm_cross_entropy": _lm_loss_of_few_rows,
}
"""Operations that are right for as many rows, or tokens, as a small test has."""


WRAPS = 2**16
"""The number of elements after which an index begins anew; it stands for the 2³² of 32 bits."""


def _wrapping(operation: str, *names: str) -> Any:
    """The operation, right up to WRAPS elements of the first of these inputs; beyond them it reads the rows of the beginning again."""
    plain = OPERATIONS[operation]
    signature = inspect.signature(plain)

    def function(*given: Any, **named: Any) -> Tensor:
        arguments = signature.bind(*given, **named).arguments
        first = arguments[names[0]]
        rows = torch.arange(len(first), device=first.device) % max(1, WRAPS // max(1, first[0].numel()))
        answer: Tensor = plain(**{**arguments, **{name: arguments[name][rows] for name in names}})
        return answer

    function.__signature__ = signature  # type: ignore[attr-defined]  # which binds it to the operation's names
    return function


WRAPPING = {
    operation: _wrapping(operation, *names)
    for operation, names in {
        "rms_norm": ("x",),
        "rope": ("x", "positions"),
        "swiglu": ("gate", "up"),
        "softmax": ("x",),
        "linear": ("x",),
        "attention": ("q", "k", "v", "mask"),
        "cross_entropy_per_sample": ("logits", "labels"),
        "weighted_cross_entropy": ("logits", "labels"),
        "lm_cross_entropy": ("logits", "input_ids", "mask"),
    }.items()
}
"""Operations that are right for as many elements as their index counts."""
