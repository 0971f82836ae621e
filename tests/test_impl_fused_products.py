"""What surrounds the products of the hand-written step: choice of algorithm, order of weights, work beside them."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from blackswan.impl.fused import weights as weights_module
from blackswan.impl.fused.products import Products, fastest_of
from blackswan.impl.fused.side import SideStream
from blackswan.impl.fused.weights import JoinedWeight, Weights
from blackswan.impl.projection import Projection

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def writes(value: Tensor, out: Tensor) -> Callable[[], object]:
    return lambda: out.copy_(value)


def chosen(values: Sequence[float | None], taken: Sequence[float]) -> int:
    """Of calls that write these values (None: that raise) in so much time each; the first writes the standard, 1."""
    out, expected = torch.zeros(2), torch.ones(2)

    def refused() -> object:
        raise RuntimeError("status 7")

    calls = [refused if value is None else writes(torch.full((2,), value), out) for value in values]
    times = dict(zip(calls, taken, strict=True))
    return fastest_of(calls, expected, out, lambda kept: [times[call] for call in kept])


def test_the_fastest_of_the_algorithms_with_equal_bits_is_chosen() -> None:
    assert chosen([1.0, 1.0, 1.0], [3.0, 1.0, 2.0]) == 1
    assert chosen([1.0, 1.0], [1.0, 2.0]) == 0


def test_an_algorithm_with_other_bits_is_not_chosen_however_fast() -> None:
    assert chosen([1.0, 1.0 + 2**-23, 1.0], [3.0, 1.0, 2.0]) == 2
    assert chosen([1.0, torch.nan], [3.0, 1.0]) == 0


def test_an_algorithm_that_writes_nothing_or_is_refused_is_not_chosen() -> None:
    out, expected = torch.zeros(2), torch.ones(2)
    assert fastest_of([writes(expected, out), lambda: None], expected, out, lambda kept: list(range(len(kept)))[::-1]) == 0
    assert chosen([1.0, None], [3.0, 1.0]) == 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_has_the_bits_of_torchs_own_before_and_after_it_is_tuned(transposed: bool, bias: bool) -> None:
    generator = torch.Generator(DEVICE).manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

    a, b, added = drawn(256, 192), drawn(320, 192).T if transposed else drawn(192, 320), drawn(320) if bias else None
    products = Products()
    before = products.mm(a, b, added)
    stream = torch.cuda.Stream() if CUDA else None
    with torch.cuda.stream(stream):
        products.tune(a, b, added)
    if CUDA:
        torch.cuda.synchronize()
    other = drawn(256, 192)
    for x in (a, other, a[:128]):
        assert torch.equal(products.mm(x, b, added), torch.mm(x, b) if added is None else torch.addmm(added, x, b))
    assert torch.equal(before, products.mm(a, b, added))


@pytest.fixture
def ordered() -> tuple[list[JoinedWeight], Weights]:
    """Three NF4 weights in two buffers."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(32, 64), (64, 32), (16, 64)]
    projections = [Projection(f"p{i}", torch.randn(*shape, generator=generator).to(DEVICE), None, True) for i, shape in enumerate(shapes)]
    weights = Weights(SideStream(DEVICE), torch.float32, DEVICE)
    return [weights.add(JoinedWeight([projection], i % 2, torch.float32)) for i, projection in enumerate(projections)], weights


def test_weights_come_in_order_each_dequantised_beside_the_one_before(ordered: tuple[list[JoinedWeight], Weights]) -> None:
    (first, second, third), weights = ordered
    expected = {weight: weights.of(weight).clone() for weight in (first, second, third)}
    assert {buffer: len(values) for buffer, values in weights.buffers.items()} == {0: 32 * 64, 1: 64 * 32}
    order = [first, second, third, second, first]
    weights.begin(order)
    before: Tensor | None = None
    for weight in order:
        found = weights.take(weight)
        assert torch.equal(found, expected[weight])
        if before is not None:
            assert before.data_ptr() != found.data_ptr()
        before = found


def test_two_uses_in_a_row_are_one_dequantisation(ordered: tuple[list[JoinedWeight], Weights], monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second, _), weights = ordered
    count: list[int] = []
    real = weights_module.nf4_dequantize
    monkeypatch.setattr(weights_module, "nf4_dequantize", lambda *given, **named: count.append(1) or real(*given, **named))
    for _ in range(2):
        weights.begin([first, second, second, first])
        values = [weights.take(weight).clone() for weight in (first, second, second, first)]
        assert torch.equal(values[1], values[2])
        assert torch.equal(values[0], values[3])
    assert len(count) == 6


def test_a_product_out_of_order_is_refused(ordered: tuple[list[JoinedWeight], Weights]) -> None:
    (first, second, third), weights = ordered
    weights.begin([first, second])
    with pytest.raises(RuntimeError, match="out of the order"):
        weights.take(second)
    weights.take(first)
    weights.take(second)
    with pytest.raises(RuntimeError, match="out of the order"):
        weights.take(third)


def test_work_beside_gives_its_result_and_is_awaited() -> None:
    side, made = SideStream(DEVICE), torch.zeros(1 << 20, device=DEVICE)
    doubled = side.run(lambda: made + 2.0, made)
    side.later(lambda: made.add_(1.0), made)
    side.finish()
    assert float(doubled().sum()) == 2.0 * len(made)
    assert float(made.sum()) == len(made)
