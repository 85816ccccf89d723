import pytest
import torch
import torch.nn.functional as F

import amp_lab as lab

aten_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
aten_attention_backward = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the dtype with which the given ops are called below it; matrix products if none is."""

    def __init__(self, *ops):
        super().__init__()
        self.ops = ops or [torch.ops.aten.mm.default]
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.ops:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def half(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).half()


# Each case: a function of FP16 tensors, and the tensors.
PRODUCTS = {
    "mm": (torch.mm, half(17, 33), half(33, 9, seed=1)),
    "mm, transposed": (lambda a, b: a.t() @ b.t(), half(33, 17), half(9, 33, seed=1)),
    "mm, overflow": (torch.mm, half(5, 64, scale=200), half(64, 5, seed=1, scale=200)),
    "mm, subnormal": (torch.mm, half(5, 64, scale=2e-4), half(64, 5, seed=1, scale=2e-4)),
    "addmm": (torch.addmm, half(9), half(17, 33, seed=1), half(33, 9, seed=2)),
    "linear": (F.linear, half(17, 33), half(9, 33, seed=1), half(9, seed=2)),
    "linear of a vector": (F.linear, half(33), half(9, 33, seed=1), half(9, seed=2)),
    "bmm": (torch.bmm, half(3, 17, 33), half(3, 33, 9, seed=1)),
    "baddbmm": (torch.baddbmm, half(3, 17, 9), half(3, 17, 33, seed=1), half(3, 33, 9, seed=2)),
    "mv": (torch.mv, half(17, 33), half(33, seed=1)),
    "dot": (torch.dot, half(333), half(333, seed=1)),
    "conv1d": (F.conv1d, half(2, 4, 20), half(6, 4, 3, seed=1), half(6, seed=2)),
    "conv2d": (F.conv2d, half(2, 4, 9, 9), half(6, 4, 3, 3, seed=1), half(6, seed=2)),
    "conv2d, no bias": (F.conv2d, half(2, 4, 9, 9), half(6, 4, 3, 3, seed=1)),
    "conv2d, stride, padding, groups": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=2, groups=2),
        half(2, 4, 11, 11),
        half(6, 2, 3, 3, seed=1),
    ),
    "conv3d": (F.conv3d, half(2, 3, 5, 6, 7), half(4, 3, 2, 2, 2, seed=1)),
    "conv_transpose2d": (F.conv_transpose2d, half(2, 4, 5, 5), half(4, 6, 3, 3, seed=1)),
}


def forward_and_gradients(function, tensors, weight):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    result = function(*leaves)
    gradients = torch.autograd.grad(result, leaves, weight(result))
    return result.detach(), gradients


def loss_gradient(result):
    generator = torch.Generator().manual_seed(9)
    return torch.randn(result.shape, generator=generator).half().to(result.dtype)


@pytest.mark.parametrize("name", PRODUCTS)
def test_bit_exact_forward_and_backward(name):
    function, *tensors = PRODUCTS[name]
    with lab.tensor_core_emulation():
        result, gradients = forward_and_gradients(function, tensors, loss_gradient)
    exact, exact_gradients = forward_and_gradients(
        function, [t.float() for t in tensors], loss_gradient
    )
    assert result.dtype is torch.float16
    assert torch.equal(result, exact.half())
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert gradient.dtype is torch.float16
        assert torch.equal(gradient, exact_gradient.half())


ATTENTION = {
    "causal": {"is_causal": True},
    "full": {},
    "mask": {"attn_mask": half(16, 16, seed=4)},
    "scale": {"scale": 0.5},
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attention_is_bit_exact(options):
    """The oracle runs PyTorch's FP32 kernel, fed with the rounded result as a Tensor Core would."""
    q, k, v = (half(2, 3, 16, 8, seed=seed).requires_grad_() for seed in range(3))
    weight = half(2, 3, 16, 8, seed=3)
    with Seen(aten_attention, aten_attention_backward) as seen, lab.tensor_core_emulation():
        result = F.scaled_dot_product_attention(q, k, v, **options)
        result.backward(weight)
    assert seen.dtypes == [torch.float32] * 2, "another kernel took over"
    assert {t.dtype for t in (result, q.grad, k.grad, v.grad)} == {torch.float16}

    wide = [t.detach().float() for t in (q, k, v)]
    causal, scale = options.get("is_causal", False), options.get("scale")
    mask = options["attn_mask"].float() if "attn_mask" in options else None
    exact, log_denominator = aten_attention(*wide, 0.0, causal, attn_mask=mask, scale=scale)
    assert torch.equal(result, exact.half())
    gradients = aten_attention_backward(
        *(weight.float(), *wide, exact.half().float(), log_denominator, 0.0, causal),
        attn_mask=mask,
        scale=scale,
    )
    for tensor, gradient in zip((q, k, v), gradients, strict=True):
        assert torch.equal(tensor.grad, gradient.half())


def test_attention_is_close_to_the_native_kernel():
    q, k, v = (half(2, 3, 16, 8, seed=seed) for seed in range(3))
    with lab.tensor_core_emulation():
        emulated = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    native = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(emulated, native, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("function", [torch.addmm, torch.addmv, torch.baddbmm])
def test_factors_are_applied_before_the_rounding(function):
    """Forward only: in the backward pass autograd multiplies by them in a step of its own."""
    shapes = {
        torch.addmm: [(17, 9), (17, 33), (33, 9)],
        torch.addmv: [(17,), (17, 33), (33,)],
        torch.baddbmm: [(3, 17, 9), (3, 17, 33), (3, 33, 9)],
    }[function]
    tensors = [half(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    with lab.tensor_core_emulation():
        result = function(*tensors, beta=0.3, alpha=1.7)
    assert torch.equal(result, function(*[t.float() for t in tensors], beta=0.3, alpha=1.7).half())


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "conv2d", "linear"])
def test_close_to_the_native_kernels(name):
    function, *tensors = PRODUCTS[name]
    with lab.tensor_core_emulation():
        emulated = function(*tensors)
    torch.testing.assert_close(emulated, function(*tensors), rtol=2e-3, atol=2e-2)


def test_it_rounds_once_at_the_end():
    ones = torch.full((1, 4096), 1.0, dtype=torch.float16)
    with lab.tensor_core_emulation():
        assert (ones @ ones.t()).item() == 4096.0
    small = torch.tensor([[2048.0, 1.0, 1.0]], dtype=torch.float16)
    with lab.tensor_core_emulation():
        assert (small @ torch.ones(3, 1).half()).item() == 2050.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_other_dtypes_are_untouched(dtype):
    a = half(8, 8).to(dtype)
    with Seen() as seen, lab.tensor_core_emulation():
        result = a @ a
    assert seen.dtypes == [dtype] and result.dtype is dtype
    assert torch.equal(result, a @ a)


def test_fp16_runs_in_fp32_below():
    with Seen() as seen, lab.tensor_core_emulation():
        half(8, 8) @ half(8, 8)
    assert seen.dtypes == [torch.float32]


def test_on_other_devices_nothing_is_intercepted():
    a = torch.empty(8, 8, dtype=torch.float16, device="meta")
    with Seen() as seen, lab.tensor_core_emulation():
        a @ a
    assert seen.dtypes == [torch.float16]


def test_mixed_dtypes_raise_as_without_emulation():
    a, b = half(4, 4), torch.randn(4, 4)
    with pytest.raises(RuntimeError) as native:
        a @ b
    with lab.tensor_core_emulation(), pytest.raises(RuntimeError) as emulated:
        a @ b
    assert str(emulated.value) == str(native.value)


def test_it_nests():
    a = half(8, 8)
    with lab.tensor_core_emulation():
        with lab.tensor_core_emulation():
            inner = a @ a
        outer = a @ a
    assert torch.equal(inner, outer) and torch.equal(outer, (a.float() @ a.float()).half())


def test_it_is_left_on_an_exception():
    with pytest.raises(ZeroDivisionError), lab.tensor_core_emulation():
        raise ZeroDivisionError
    with Seen() as seen:
        half(4, 4) @ half(4, 4)
    assert seen.dtypes == [torch.float16]


def test_autocast_and_autograd_run_above_it():
    model = lab.SmallCNN()
    images, labels = torch.randn(4, 1, 28, 28), torch.arange(4)
    with lab.tensor_core_emulation():
        with torch.autocast("cpu", torch.float16):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        loss.backward()
    assert logits.dtype is torch.float16 and loss.dtype is torch.float32
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
