"""The exercises of notebook 03: right answers pass, and each typical mistake has its own hint."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.amp import custom_bwd, custom_fwd
from torch.testing._internal.autocast_test_lists import AutocastTestLists

import amp_lab as lab
from amp_lab.checks.classification import _ten_ops

P = lab.Policy
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def answer(value):
    """An attempt that returns `value`, whatever it is asked."""
    return lambda *_: value


def stub(*_):
    raise NotImplementedError


RIGHT = {
    "conv_transpose2d": P.LOWER_PRECISION,
    "gelu": P.AS_INPUT,
    "log_softmax": P.FP32,
    "bmm": P.LOWER_PRECISION,
    "max_pool2d": P.AS_INPUT,
    "group_norm": P.FP32,
    "mul": P.AS_INPUT,
    "cumsum": P.FP32,
    "bilinear": P.WIDEST,
    "mse_loss": P.FP32,
}


def test_the_ten_answers_stand_in_pytorchs_own_lists():
    """`gelu` and `max_pool2d` are on none of them, which is what AS_INPUT means."""
    lists = AutocastTestLists("cpu")
    sources = {
        P.LOWER_PRECISION: lists.torch_fp16,
        P.FP32: lists.torch_fp32 + lists.nn_fp32,
        P.WIDEST: lists.torch_need_autocast_promote,
        P.AS_INPUT: lists.torch_expect_builtin_promote,
    }
    listed = {entry[0]: policy for policy, entries in sources.items() for entry in entries}
    assert {name: listed.get(name, P.AS_INPUT) for name in RIGHT} == RIGHT
    assert {name: cuda for name, (cuda, _) in _ten_ops().items()} == RIGHT


def segment_sum_float(linear, x, segment, count):
    h = F.relu(linear(x)).float()
    return torch.zeros(count, h.shape[1], device=x.device).index_add(0, segment, h)


def segment_sum_to_total(linear, x, segment, count):
    total = torch.zeros(count, linear.out_features)
    total.index_add_(0, segment, F.relu(linear(x)).to(total.dtype))
    return total


def segment_sum_scatter(linear, x, segment, count):
    h = F.relu(linear(x))
    index = segment[:, None].expand_as(h)
    return h.new_zeros(count, h.shape[1], dtype=torch.float32).scatter_add(0, index, h.float())


def broken(linear, x, segment, count):
    h = F.relu(linear(x))
    return torch.zeros(count, h.shape[1], device=h.device).index_add(0, segment, h)


def sum_in_16_bits(linear, x, segment, count):
    h = F.relu(linear(x))
    return torch.zeros(count, h.shape[1], dtype=h.dtype).index_add(0, segment, h)


def float_after_the_sum(linear, x, segment, count):
    return sum_in_16_bits(linear, x, segment, count).float()


def rounded_at_the_end(linear, x, segment, count):
    """The kernel of `sum` adds up in FP32, and rounds its result."""
    h = F.relu(linear(x))
    return torch.stack([h[segment == i].sum(0) for i in range(count)]).float()


def segment_sum_loop(linear, x, segment, count):
    h = F.relu(linear(x)).float()
    return torch.stack([h[segment == i].sum(0) for i in range(count)])


def all_in_fp32(linear, x, segment, count):
    with torch.autocast("cpu", enabled=False):
        return broken(linear, x, segment, count)


def spelled_out(linear, x, segment, count):
    h = F.relu(linear(x)).bfloat16()
    return torch.zeros(count, h.shape[1]).index_add(0, segment, h.float())


def in_16_bits_always(linear, x, segment, count):
    with torch.autocast("cpu", BF16 if not torch.is_autocast_enabled("cpu") else None):
        return segment_sum_float(linear, x, segment, count)


def module_to_bf16(linear, x, segment, count):
    return broken(linear.to(BF16), x, segment, count)


def detached(linear, x, segment, count):
    return segment_sum_float(linear, x, segment, count).detach().requires_grad_()


def without_relu(linear, x, segment, count):
    h = linear(x).float()
    return torch.zeros(count, h.shape[1]).index_add(0, segment, h)


def router_with(linear, x):
    with torch.autocast(device_type=x.device.type, enabled=False):
        return linear(x.float()).softmax(dim=-1)


@torch.autocast("cpu", enabled=False)
@torch.autocast("cuda", enabled=False)
def router_decorated(linear, x):
    return F.softmax(F.linear(x.to(FP32), linear.weight, linear.bias), -1)


def router_in_fp64(linear, x):
    """Autocast leaves FP64 alone."""
    logits = x.double() @ linear.weight.double().T + linear.bias.double()
    return logits.softmax(-1).float()


def router_plain(linear, x):
    return linear(x).softmax(-1)


def router_float_after(linear, x):
    return linear(x).float().softmax(-1)


def router_float_before(linear, x):
    return linear(x.float()).softmax(-1)


def router_without_float(linear, x):
    with torch.autocast(x.device.type, enabled=False):
        return linear(x).softmax(-1)


def router_on_the_cpu(linear, x):
    with torch.autocast("cpu", enabled=False):
        return linear(x.float()).softmax(-1)


def router_on_cuda(linear, x):
    with torch.autocast("cuda", enabled=False):
        return linear(x.float()).softmax(-1)


def router_back_to_16(linear, x):
    return router_with(linear, x).to(x.dtype)


def router_logits(linear, x):
    with torch.autocast(x.device.type, enabled=False):
        return linear(x.float())


def router_over_rows(linear, x):
    with torch.autocast(x.device.type, enabled=False):
        return linear(x.float()).softmax(0)


def router_no_grad(linear, x):
    with torch.no_grad():
        return router_with(linear, x)


def router_switches_off(linear, x):
    torch.set_autocast_enabled(x.device.type, False)
    return linear(x.float()).softmax(-1)


def router_casts_the_module(linear, x):
    return router_with(linear.bfloat16(), x)


def make_product(forward=None, backward=None, right=True):
    """A product as an autograd.Function, with decorators for forward and backward."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            return (g @ b.T, a.T @ g) if right else (g @ b.T * 2, a.T @ g)

    if forward:
        Product.forward = staticmethod(forward(Product.forward))
    if backward:
        Product.backward = staticmethod(backward(Product.backward))
    return Product


class ByHand(torch.autograd.Function):
    """No decorators: casts what it saved to the dtype of the gradient."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g @ b.T.to(g.dtype), a.T.to(g.dtype) @ g


def fwd(device="cpu", **kwargs):
    return custom_fwd(device_type=device, **kwargs)


def bwd(device="cpu"):
    return custom_bwd(device_type=device)


@pytest.mark.parametrize(
    ("check", "attempt"),
    [
        ("ten_ops", answer(RIGHT)),
        ("ten_ops", answer({name: str(policy) for name, policy in RIGHT.items()})),
        ("count_casts", answer((6, 12, 12, 2))),
        ("count_casts", answer([2 + 4, 3 * 4, 4 * 3, 2.0])),
        ("segment_sum", segment_sum_float),
        ("segment_sum", segment_sum_to_total),
        ("segment_sum", segment_sum_scatter),
        ("segment_sum", segment_sum_loop),
        ("router", router_with),
        ("router", router_decorated),
        ("router", router_in_fp64),
        ("product_function", lambda: make_product(fwd(), bwd())),
        ("product_function", make_product(fwd(), bwd())),
        ("product_function", lambda: ByHand),
    ],
)
def test_right_answers_pass(check, attempt, capsys):
    getattr(lab.checks, check)(attempt)
    assert capsys.readouterr().out.startswith(f"PASSED   {check}:")


def ten(**changes):
    return answer(RIGHT | changes)


WRONG = [
    ("ten_ops", answer(list(RIGHT)), "return a dictionary"),
    ("ten_ops", answer({"gelu": P.AS_INPUT}), "lacks conv_transpose2d, log_softmax"),
    ("ten_ops", ten(gelu="FP16"), "'FP16' is no policy"),
    ("ten_ops", ten(gelu=P.FP32), "9 of 10 are right. gelu: not Policy.FP32"),
    (
        "ten_ops",
        ten(cumsum=P.AS_INPUT, mse_loss=P.WIDEST),
        "8 of 10 are right. cumsum: that is what",
    ),
    ("ten_ops", ten(bilinear=P.AS_INPUT), "bilinear: that is what CPU autocast does"),
    ("ten_ops", ten(mul=P.WIDEST), "ordinary type promotion deals"),
    ("ten_ops", ten(bmm=P.FP32), "product of matrices inside"),
    ("count_casts", answer(None), "four whole numbers"),
    ("count_casts", answer((1, 2)), "you returned 2"),
    ("count_casts", answer((6.5, 12, 12, 2)), "four whole numbers"),
    ("count_casts", answer((5, 12, 12, 2)), "the bias is a parameter, too"),
    ("count_casts", answer((12, 12, 12, 2)), "keeps the casts of weight and bias"),
    ("count_casts", answer((3, 12, 12, 2)), "the input is no parameter"),
    ("count_casts", answer((6, 6, 12, 2)), "only tensors that require gradients"),
    ("count_casts", answer((6, 12, 6, 2)), "emptied whenever the outermost"),
    ("count_casts", answer((6, 12, 12, 6)), "has 16 bits already. What is left"),
    ("count_casts", answer((6, 12, 12, 0)), "but weight and bias are FP32"),
    ("count_casts", answer((6, 12, 12, 99)), "situation 4: not 99"),
    ("segment_sum", broken, "does not cast for this operation"),
    ("segment_sum", sum_in_16_bits, "long sums need FP32's digits"),
    ("segment_sum", float_after_the_sum, "FP32 by name"),
    ("segment_sum", rounded_at_the_end, "FP32 by name"),
    ("segment_sum", all_in_fp32, "did not run in 16 bits"),
    ("segment_sum", spelled_out, "without autocast the sums are wrong"),
    ("segment_sum", in_16_bits_always, "without autocast something is cast to BF16"),
    ("segment_sum", module_to_bf16, "the weights are no longer FP32"),
    ("segment_sum", detached, "no gradient"),
    (
        "segment_sum",
        without_relu,
        "under CPU autocast in BF16 the sums are wrong: is the relu still there",
    ),
    ("segment_sum", answer(None), "return the sums"),
    ("router", router_plain, "still ran in BF16"),
    ("router", router_float_after, "one on its output comes too late"),
    ("router", router_float_before, "autocast casts it down again"),
    ("router", router_without_float, "with BF16 input.*nobody casts for you"),
    ("router", router_on_the_cpu, "the device type is spelled out"),
    ("router", router_on_cuda, "still ran in BF16"),
    ("router", router_back_to_16, "came out as BF16"),
    ("router", router_logits, "not the probabilities"),
    ("router", router_over_rows, "not the probabilities"),
    ("router", router_no_grad, "neither detach"),
    ("router", router_switches_off, "autocast is no longer as it was"),
    ("router", router_casts_the_module, "the weights are no longer FP32"),
    ("router", answer(0.5), "a tensor"),
    ("product_function", answer(None), "return the class itself"),
    ("product_function", make_product, "Decorate forward with custom_fwd"),
    ("product_function", lambda: make_product(fwd()), "backward needs custom_bwd"),
    ("product_function", lambda: make_product(None, bwd()), "only together with custom_fwd"),
    ("product_function", lambda: make_product(bwd(), fwd()), "custom_bwd stands on forward"),
    ("product_function", lambda: make_product(fwd("cuda"), bwd("cuda")), "another device type"),
    ("product_function", lambda: make_product(fwd(cast_inputs=FP32), bwd()), "FP32 island"),
    (
        "product_function",
        lambda: make_product(fwd(cast_inputs=BF16), bwd()),
        "a dtype is spelled out",
    ),
    ("product_function", lambda: make_product(fwd(), bwd(), right=False), "gradient of a is wrong"),
]


@pytest.mark.parametrize(("check", "attempt", "hint"), WRONG)
def test_wrong_answers_get_their_hint(check, attempt, hint, capsys):
    getattr(lab.checks, check)(attempt)
    out = capsys.readouterr().out
    assert out.startswith(f"NOT YET  {check}: ") and out.count("\n") == 1
    assert re.search(hint, out)
    assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("check", lab.checks.classification.__all__)
def test_stubs_are_to_do(check, capsys):
    getattr(lab.checks, check)(stub)
    assert capsys.readouterr().out.startswith(f"TO DO    {check}:")


@pytest.mark.parametrize("check", lab.checks.classification.__all__)
@pytest.mark.parametrize("junk", [None, 7, "text", [], torch.zeros(3), {}])
def test_junk_does_not_crash(check, junk, capsys):
    getattr(lab.checks, check)(answer(junk))
    assert capsys.readouterr().out.startswith("NOT YET")
