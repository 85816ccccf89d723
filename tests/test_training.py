import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_lab as lab

RECIPES_OF_THE_COURSE = ["fp32", "fp16 (no scaling)", "fp16 + GradScaler", "bf16"]


@pytest.fixture(scope="module")
def fashion():
    return lab.fashion_mnist()


@pytest.fixture
def tiny():
    """A small classifier and its data: (model factory, list of batches)."""

    def model():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    generator = torch.Generator().manual_seed(4)
    batches = [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(12)
    ]
    return model, batches


def test_the_recipes():
    assert list(lab.RECIPES) == RECIPES_OF_THE_COURSE + ["pure fp16", "pure bf16"]
    assert all(recipe.name == name for name, recipe in lab.RECIPES.items())


@pytest.mark.parametrize("name", RECIPES_OF_THE_COURSE)
def test_every_recipe_learns(fashion, name):
    torch.manual_seed(0)
    model = lab.SmallCNN()
    for step in lab.train(model, lab.batches(fashion.train, steps=150), lab.RECIPES[name]):
        assert torch.isfinite(torch.tensor(step.loss))
    assert step.index == 149
    assert lab.accuracy(model, fashion.test, lab.RECIPES[name]) > 0.75


def test_small_cnn_reaches_87_percent_in_two_passes(fashion):
    torch.manual_seed(0)
    model = lab.SmallCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=156)
    batches = lab.batches(fashion.train, steps=156)
    for _ in lab.train(model, batches, lab.RECIPES["bf16"], optimizer, scheduler=scheduler):
        pass
    assert lab.accuracy(model, fashion.test) > 0.865


@pytest.mark.parametrize("name, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_model_runs_in_the_recipes_precision(tiny, name, dtype):
    model, batches = tiny[0](), tiny[1]
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    list(lab.train(model, batches[:2], lab.RECIPES[name]))
    assert seen == [dtype, dtype]
    assert model[0].weight.dtype is torch.float32


@pytest.mark.parametrize("name", ["pure fp16", "pure bf16"])
def test_pure_recipes_convert_the_weights(tiny, name):
    model, batches = tiny[0](), tiny[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    list(lab.train(model, batches, lab.RECIPES[name], optimizer))
    assert {p.dtype for p in model.parameters()} == {lab.RECIPES[name].parameters}


def one_step(model, batch, name, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (step,) = lab.train(model, [batch], lab.RECIPES[name], optimizer, **options)
    return step, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_one_fp32_step_is_the_ordinary_step(tiny):
    make, batches = tiny
    step, weights = one_step(make(), batches[0], "fp32")
    model = make()
    loss = F.cross_entropy(model(batches[0][0]), batches[0][1])
    loss.backward()
    expected = torch.cat([(p - p.grad).detach().flatten() for p in model.parameters()])
    assert step.loss == loss.item() and torch.equal(weights, expected)
    assert (step.index, step.scale, step.skipped) == (0, 1.0, False) and step.seconds > 0


@pytest.mark.parametrize("name", ["fp16 (no scaling)", "fp16 + GradScaler", "bf16"])
def test_one_step_in_16_bits_is_close_to_the_fp32_step(tiny, name):
    make, batches = tiny
    before = torch.cat([p.detach().flatten() for p in make().parameters()])
    expected = one_step(make(), batches[0], "fp32")[1] - before
    step, weights = one_step(make(), batches[0], name)
    assert not step.skipped
    assert torch.norm(weights - before - expected) < 0.02 * torch.norm(expected)
    assert not torch.equal(weights - before, expected), "nothing was computed in 16 bits"


def test_a_skipped_step_is_reported_and_the_scheduler_waits(tiny):
    make, batches = tiny
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2000)
    steps = list(
        lab.train(
            model,
            batches,
            lab.RECIPES["fp16 + GradScaler"],
            optimizer,
            scaler=scaler,
            scheduler=scheduler,
        )
    )
    skipped = [step.skipped for step in steps]
    assert skipped[0] and not all(skipped)
    assert steps[0].scale == 2.0**22 and steps[1].scale == 2.0**21
    assert scaler.get_scale() == 2.0 ** (22 - sum(skipped))
    assert optimizer.param_groups[0]["lr"] == 0.5 ** (len(steps) - sum(skipped))


def test_the_share_of_zero_gradients(tiny):
    make, batches = tiny
    model = make()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # every ReLU is off: only the last bias has a gradient
    (step,) = lab.train(model, batches[:1], lab.RECIPES["fp32"])
    total = sum(p.numel() for p in model.parameters())
    assert step.zero_share == pytest.approx(1 - 3 / total)


def test_emulation_can_be_switched_off(tiny):
    make, batches = tiny
    native = one_step(make(), batches[0], "fp16 (no scaling)", emulate=False)[1]
    emulated = one_step(make(), batches[0], "fp16 (no scaling)")[1]
    torch.testing.assert_close(native, emulated, rtol=0.02, atol=0.02)


def test_batches_may_be_any_iterable_and_the_loop_can_be_left(tiny):
    make, batches = tiny
    iterator = iter(batches)
    run = lab.train(make(), iterator, lab.RECIPES["fp32"])
    next(run)
    run.close()
    assert len(list(iterator)) == len(batches) - 1


def finish(model, optimizer, scaler, batches):
    recipe = lab.RECIPES["fp16 + GradScaler"]
    return list(lab.train(model, batches, recipe, optimizer, scaler=scaler))


@pytest.mark.parametrize("moment", ["in the forward pass", "in the backward pass", "in the update"])
def test_an_interrupted_run_can_go_on_as_if_nothing_had_happened(tiny, moment):
    make, batches = tiny

    def ingredients():
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
        return model, optimizer, scaler

    undisturbed = ingredients()
    expected = finish(*undisturbed, batches)

    model, optimizer, scaler = ingredients()
    calls = 0

    def press(*ignored):
        nonlocal calls
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)

    if moment == "in the forward pass":
        hook = model[0].register_forward_hook(press)
    elif moment == "in the backward pass":
        hook = model[0].weight.register_hook(press)
    else:
        hook = optimizer.register_step_post_hook(press)
    rest, seen = iter(batches), []
    with pytest.raises(KeyboardInterrupt):
        for step in lab.train(
            model, rest, lab.RECIPES["fp16 + GradScaler"], optimizer, scaler=scaler
        ):
            seen.append(step)
    hook.remove()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert calls >= 2 and len(seen) < len(batches)

    seen += finish(model, optimizer, scaler, rest)
    assert [s.loss for s in seen] == [s.loss for s in expected]
    assert scaler.state_dict() == undisturbed[2].state_dict()
    for parameter, other in zip(model.parameters(), undisturbed[0].parameters(), strict=True):
        assert torch.equal(parameter, other)
    for state, other in zip(
        optimizer.state_dict()["state"].values(),
        undisturbed[1].state_dict()["state"].values(),
        strict=True,
    ):
        assert all(torch.equal(state[key], other[key]) for key in state)


def test_train_refuses_what_makes_no_sense(tiny):
    make, batches = tiny
    with pytest.raises(TypeError, match="expected a Recipe such as"):
        lab.train(make(), batches, "fp16")
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        lab.train(make().requires_grad_(False), batches, lab.RECIPES["fp32"])
    with pytest.raises(ValueError, match="does not scale"):
        lab.train(make(), batches, lab.RECIPES["bf16"], scaler=torch.amp.GradScaler("cpu"))


def test_accuracy_counts_and_restores_the_mode(fashion):
    class Oracle(nn.Module):
        """Knows the labels of the test images by heart, but errs on every fourth."""

        def __init__(self):
            super().__init__()
            self.position = 0
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, images):
            assert not self.training
            labels = fashion.test.tensors[1][self.position : self.position + len(images)].clone()
            labels[::4] = (labels[::4] + 1) % 10
            self.position += len(images)
            return F.one_hot(labels, 10) + self.weight

    model = Oracle().train()
    assert lab.accuracy(model, fashion.test) == 0.75
    assert model.training
