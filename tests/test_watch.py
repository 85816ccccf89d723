"""`watch` against loops with a known fault, and against healthy loops."""

import copy
import gc
import pickle
import re
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, SequentialLR, StepLR

import amp_lab as lab
from amp_lab.dryrun import dry_run
from amp_lab.findings import ADVICE, MESSAGES
from amp_lab.nonfinite import OriginFinder, nonfinite_shares
from amp_lab.scaler import LossScaler
from amp_lab.watch import watch

FAULTY, HEALTHY = [], []
SCALERS = (torch.amp.GradScaler, LossScaler)


def faulty(*codes, scalers=SCALERS):
    """Register a loop that must give exactly these findings, with each kind of scaler."""

    def register(loop):
        FAULTY.extend(
            pytest.param(loop, kind, set(codes), id=f"{loop.__name__}-{kind.__name__}")
            for kind in scalers
        )
        return loop

    return register


def healthy(loop):
    HEALTHY.extend(
        pytest.param(loop, kind, id=f"{loop.__name__}-{kind.__name__}") for kind in SCALERS
    )
    return loop


# --- small believable pieces -----------------------------------------------------------------


class TinyCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 4)

    def forward(self, x):
        return self.head(F.max_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(1))


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def cnn(seed=0):
    torch.manual_seed(seed)
    return TinyCNN()


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def vectors(steps, size=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield (
            torch.randn(size, 8, generator=generator),
            torch.randint(4, (size,), generator=generator),
        )


def pictures(steps, size=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield (
            torch.randn(size, 1, 8, 8, generator=generator),
            torch.randint(4, (size,), generator=generator),
        )


STEEP = 2  # makes the initial scale of 65536 too high for TinyCNN, as is usual


def fp16():
    return torch.autocast("cpu", torch.float16)


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


def forward(model, x, y, precision=fp16):
    with precision():
        return F.cross_entropy(model(x), y)


def quiet(*args):
    return watch(*args, report=False)


def codes(log):
    return {finding.code for finding in log.findings}


@pytest.fixture(autouse=True)
def emulation():
    with lab.tensor_core_emulation():
        yield


# --- healthy loops -----------------------------------------------------------------------------


@healthy
def fp32(Scaler):
    model = cnn()
    optimizer = sgd(model)
    with quiet(model, optimizer) as log:
        for x, y in pictures(12):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return log


@healthy
def fp32_clipped_with_norm_logged(Scaler):
    model = mlp()
    optimizer = sgd(model)
    with quiet(model, optimizer) as log:
        for x, y in vectors(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
    return log


@healthy
def bf16_autocast(Scaler):
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = Scaler("cpu", enabled=False)
    with quiet(model, optimizer, scaler) as log:
        for x, y in pictures(12):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y, bf16)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return log


@healthy
def fp16_with_early_skips(Scaler):
    """The initial scale is too high for this loss, as usual: a few steps are skipped."""
    model = cnn()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in pictures(25):
            optimizer.zero_grad()
            scaler.scale(STEEP * forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert 1 <= sum(step.skipped for step in log.steps) <= 5
    return log


@healthy
def fp16_accumulation(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for i, (x, y) in enumerate(vectors(16)):
            scaler.scale(forward(model, x, y) / 4).backward()
            if i % 4 == 3:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return log


@healthy
def fp16_accumulation_with_gradients_removed_by_hand(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu", init_scale=2.0**18)
    with quiet(model, optimizer, scaler) as log:
        for i, (x, y) in enumerate(vectors(24)):
            scaler.scale(forward(model, x, y) / 4).backward()
            if i % 4 == 0:
                scaler.step(optimizer)
                scaler.update()
                for p in model.parameters():
                    p.grad = None
    return log


@healthy
def fp16_gradients_of_the_other_network_removed_by_hand(Scaler):
    """The generator's backward leaves gradients, of another scale, in the critic."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizers = sgd(generator), sgd(critic)
    scaler = Scaler("cpu", growth_interval=3)
    with quiet((generator, critic), optimizers, scaler) as log:
        for _ in range(8):
            for network, optimizer in zip((critic, generator), optimizers[::-1], strict=True):
                for p in network.parameters():
                    p.grad = None
                with fp16():
                    loss = critic(generator(torch.randn(16, 4))).mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    return log


@healthy
def scaler_of_a_subclass(Scaler):
    class Own(Scaler):
        def step(self, optimizer):
            return super().step(optimizer)

        def update(self, new_scale=None):
            return super().update(new_scale)

    model = mlp()
    optimizer = sgd(model)
    scaler = Own("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert len(log.steps) == 3 and not any(step.skipped for step in log.steps)
    return log


@healthy
def fp16_unscale_then_clip_with_zeros_kept(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(8):
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(forward(model, x, y)).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
    return log


@healthy
def fp16_two_optimizers_several_losses(Scaler):
    body, head = mlp(), nn.Linear(4, 4)
    optimizers = [sgd(body), torch.optim.AdamW(head.parameters(), lr=1e-3)]
    scaler = Scaler("cpu")
    with quiet([body, head], optimizers, scaler) as log:
        for x, y in vectors(8):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with fp16():
                features = body(x)
                first = F.cross_entropy(features, y)
                second = F.cross_entropy(head(features.relu()), y)
            scaled = scaler.scale([first, second])
            scaled[0].backward(retain_graph=True)
            scaled[1].backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert len(log.steps) == 16 and {step.optimizer for step in log.steps} == {0, 1}
    return log


@healthy
def fp16_two_optimizers_with_early_skips_of_one(Scaler):
    """The gradients of the body are larger, so it is skipped more often in the beginning."""
    torch.manual_seed(0)
    body, head = nn.Linear(8, 8), nn.Linear(8, 4)
    head.weight.data.mul_(20)
    optimizers = [sgd(body, lr=1e-3), sgd(head, lr=1e-3)]
    scaler = Scaler("cpu", init_scale=2.0**18)
    with quiet([body, head], optimizers, scaler) as log:
        for x, y in vectors(8):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with fp16():
                loss = F.cross_entropy(head(body(x).tanh()), y)
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    skips = [sum(s.skipped for s in log.steps if s.optimizer == i) for i in (0, 1)]
    assert skips[0] >= skips[1] + 2
    return log


@healthy
def fp32_evaluated_in_fp16(Scaler):
    model = mlp()
    optimizer = sgd(model)
    with quiet(model, optimizer) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", enabled=False):  # a region that is switched off
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                forward(model, x, y)
    return log


@healthy
def fp16_alternating_like_a_gan(Scaler):
    """Both losses are scaled first; each network has its own backward, step and update."""
    torch.manual_seed(0)
    generator, critic = (
        nn.Linear(4, 8),
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
    )
    optimizers = sgd(generator), sgd(critic)
    scaler = Scaler("cpu")
    with quiet((generator, critic), optimizers, scaler) as log:
        for x, _ in vectors(6):
            noise = torch.randn(16, 4)
            optimizers[1].zero_grad()
            with fp16():
                fake = generator(noise)
                wrong = critic(x).mean() - critic(fake.detach()).mean()
            scaler.scale(wrong).backward()
            scaler.step(optimizers[1])
            scaler.update()
            optimizers[0].zero_grad()
            with fp16():
                fooled = critic(fake).mean()
            scaler.scale(fooled).backward()
            scaler.step(optimizers[0])
            scaler.update()
    return log


@healthy
def fp16_all_losses_scaled_first(Scaler):
    """A forward and a scale() for both networks, and only then the two backward passes."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizers = sgd(generator), sgd(critic)
    scaler = Scaler("cpu")
    with quiet((generator, critic), optimizers, scaler) as log:
        for _ in range(5):
            optimizers[0].zero_grad(set_to_none=False)
            optimizers[1].zero_grad(set_to_none=False)
            with fp16():
                fake = generator(torch.randn(16, 4))
                fooled, wrong = fake.square().mean(), critic(fake.detach()).mean()
            fooled, wrong = scaler.scale(fooled), scaler.scale(wrong)
            wrong.backward()
            scaler.step(optimizers[1])
            fooled.backward()
            scaler.step(optimizers[0])
            scaler.update()
    return log


@healthy
def fp16_module_zero_grad_between_networks(Scaler):
    """Scaled gradients left in the critic by the generator's backward are zeroed before its own."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizers = sgd(generator), sgd(critic)
    scaler = Scaler("cpu", growth_interval=3)
    with quiet((generator, critic), optimizers, scaler) as log:
        for _ in range(8):
            for network, optimizer in zip((critic, generator), optimizers[::-1], strict=True):
                network.zero_grad(set_to_none=False)
                with fp16():
                    loss = critic(generator(torch.randn(16, 4))).mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    return log


@healthy
def fp16_fused_adamw_with_onecycle(Scaler):
    """The scheduler moves only when the scale did not drop."""
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = OneCycleLR(optimizer, 1e-2, total_steps=20)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in pictures(12):
            optimizer.zero_grad()
            scaler.scale(STEEP * forward(model, x, y)).backward()
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() >= scale:
                scheduler.step()
    assert 1 <= sum(step.skipped for step in log.steps) <= 5
    return log


@healthy
def fp16_scheduler_once_an_epoch_after_a_skip(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 1)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for _ in range(2):
            for i, (x, y) in enumerate(vectors(6)):
                optimizer.zero_grad()
                loss = forward(model, x, y) * (1e6 if i == 5 else 1)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            scheduler.step()
    assert log.steps[5].skipped and log.steps[11].skipped
    return log


@healthy
def fp16_resumed_with_the_scaler(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu", init_scale=2.0**20)
    for x, y in vectors(3):
        optimizer.zero_grad()
        scaler.scale(forward(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
    restored = Scaler("cpu")
    restored.load_state_dict(scaler.state_dict())
    with quiet(model, optimizer, restored) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            restored.scale(forward(model, x, y)).backward()
            restored.step(optimizer)
            restored.update()
    return log


@healthy
def fp16_same_scaler_in_a_second_block(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    for _ in range(2):
        with quiet(model, optimizer, scaler) as log:
            for x, y in vectors(3):
                optimizer.zero_grad()
                scaler.scale(forward(model, x, y)).backward()
                scaler.step(optimizer)
                scaler.update()
    return log


@healthy
def frozen_fp16_base_with_fp32_adapter(Scaler):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8).half().requires_grad_(False), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(4):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    return log


@healthy
def mask_buffer_with_minus_infinity(Scaler):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)
            mask = torch.full((4, 4), float("-inf")).triu(1)
            self.register_buffer("mask", mask)

        def forward(self, x):
            return (self.mask.softmax(-1) @ self.linear(x).T).T

    torch.manual_seed(0)
    model = Masked()
    optimizer = sgd(model)
    with quiet(model, optimizer) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            forward(model, x, y, bf16).backward()
            optimizer.step()
    return log


@healthy
def closure_of_lbfgs(Scaler):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x, y = next(vectors(1))

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with quiet(model, optimizer) as log:
        for _ in range(2):
            optimizer.step(closure)
    assert len(log.steps) == 2
    return log


@healthy
def sparse_embedding(Scaler):
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    words = torch.randint(10, (16,))
    with quiet(model, optimizer) as log:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(words), words % 4).backward()
            optimizer.step()
    return log


@healthy
def sharded_in_one_process(Scaler):
    """FSDP2: parameters and gradients are DTensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = mlp()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        with quiet(model, optimizer) as log:
            for x, y in vectors(3):
                optimizer.zero_grad()
                F.cross_entropy(model(x).float(), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    finally:
        dist.destroy_process_group()
    assert log.steps[0].zero_share.keys() == dict(mlp().named_parameters()).keys()
    return log


@healthy
def compiled_model(Scaler):
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    optimizer = sgd(model)
    with quiet(compiled, optimizer) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            forward(compiled, x, y, bf16).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert len(log.steps) == 3
    return log


@healthy
def recipes_of_the_course(Scaler):
    for name in ("fp32", "bf16", "fp16 + GradScaler"):
        model = cnn()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        recipe = lab.RECIPES[name]
        scaler = Scaler("cpu") if recipe.scaling else None
        with quiet(model, optimizer, scaler) as log:
            for _ in lab.train(model, pictures(12), recipe, optimizer, scaler=scaler):
                pass
        assert not log.findings, f"{name}\n{log}"
    return log


@pytest.mark.parametrize("loop, Scaler", HEALTHY)
def test_silent_on_a_healthy_loop(loop, Scaler):
    log = loop(Scaler)
    assert not log.findings, str(log)
    assert "Nothing to report" in str(log)
    assert log.steps


def test_enough_healthy_loops():
    assert len({param.values[0] for param in HEALTHY}) >= 10


# --- faulty loops: the order of the calls ------------------------------------------------------


@faulty("clip-before-unscale")
def clipped_while_scaled(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(6):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return log


@faulty("clip-before-unscale")
def clipped_then_unscaled_with_fused_adamw(Scaler):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(6):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return log


@faulty("clip-before-unscale")
def clipped_by_value_while_scaled(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return log


@faulty("changed-before-unscale")
def noise_added_while_scaled(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            for p in model.parameters():
                p.grad.add_(torch.randn_like(p) * 1e-3)
            scaler.step(optimizer)
            scaler.update()
    return log


@faulty("norm-before-unscale")
def norm_logged_while_scaled(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    curve = []
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            curve.append(torch.norm(input=model[0].weight.grad.detach().flatten()).item())
            scaler.step(optimizer)
            scaler.update()
    return log


@faulty("norm-before-unscale")
def total_norm_logged_while_scaled(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            nn.utils.get_total_norm([p.grad for p in model.parameters()])
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return log


@faulty("optimizer-without-scaler")
def scaled_loss_but_plain_step(Scaler):
    model = mlp()
    optimizer = sgd(model, lr=1e-6)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            optimizer.step()
    return log


@faulty("step-outside-scaler")
def unscaled_but_plain_step(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.unscale_(optimizer)
            optimizer.step()
            scaler.update()
    return log


@faulty("loss-not-scaled")
def loss_scaled_in_the_first_iteration_only(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for i, (x, y) in enumerate(vectors(4)):
            optimizer.zero_grad()
            loss = forward(model, x, y)
            (scaler.scale(loss) if i == 0 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return log


@faulty("loss-not-scaled")
def loss_never_scaled(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with pytest.raises(AssertionError), quiet(model, optimizer, scaler) as log:
        x, y = next(vectors(1))
        forward(model, x, y).backward()
        scaler.step(optimizer)
    return log


@faulty("scaler-recreated")
def scaler_made_inside_the_loop(Scaler):
    model = mlp()
    optimizer = sgd(model)
    with quiet(model, optimizer) as log:
        for x, y in vectors(8):
            scaler = Scaler("cpu", init_scale=2.0**24)
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert all(step.skipped for step in log.steps)
    return log


@faulty("update-missing")
def update_forgotten(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with pytest.raises(RuntimeError), quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
    return log


@faulty("unscale-twice")
def unscaled_in_every_micro_batch(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with pytest.raises(RuntimeError), quiet(model, optimizer, scaler) as log:
        for i, (x, y) in enumerate(vectors(8)):
            scaler.scale(forward(model, x, y) / 4).backward()
            scaler.unscale_(optimizer)
            if i % 4 == 3:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    assert "before the accumulation was complete" in str(log)
    return log


@faulty("unscale-twice")
def left_by_continue_without_update(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with pytest.raises(RuntimeError), quiet(model, optimizer, scaler) as log:
        for i, (x, y) in enumerate(vectors(4)):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.unscale_(optimizer)
            if i == 1:  # this batch is not wanted
                continue
            scaler.step(optimizer)
            scaler.update()
    assert "without update()" in str(log)
    return log


@faulty("update-without-step")
def update_in_every_micro_batch(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with pytest.raises(AssertionError), quiet(model, optimizer, scaler) as log:
        for i, (x, y) in enumerate(vectors(8)):
            scaler.scale(forward(model, x, y) / 4).backward()
            if i % 4 == 3:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    return log


@faulty("optimizer-without-scaler")
def plain_step_and_then_update(Scaler):
    model = mlp()
    optimizer = sgd(model, lr=1e-6)
    scaler = Scaler("cpu")
    with pytest.raises(AssertionError), quiet(model, optimizer, scaler) as log:
        x, y = next(vectors(1))
        scaler.scale(forward(model, x, y)).backward()
        optimizer.step()
        scaler.update()
    return log


@faulty("gradients-kept")
def unscaled_before_the_last_micro_batch(Scaler):
    model = mlp()
    optimizer = sgd(model, lr=1e-7)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for first, second in zip(vectors(3), vectors(3, seed=2), strict=True):
            optimizer.zero_grad()
            scaler.scale(forward(model, *first) / 2).backward()
            scaler.unscale_(optimizer)
            scaler.scale(forward(model, *second) / 2).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "last backward of the accumulation" in str(log)
    return log


@faulty("gradients-kept")
def zero_grad_forgotten(Scaler):
    model = mlp()
    optimizer = sgd(model, lr=1e-3)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "zero_grad() is missing" in str(log)
    return log


def two_parts(Scaler, loss_scale):
    torch.manual_seed(0)
    body, head = nn.Linear(8, 8), nn.Linear(8, 4)
    optimizers = [sgd(body), sgd(head)]
    scaler = Scaler("cpu")
    with quiet([body, head], optimizers, scaler) as log:
        for x, y in vectors(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with fp16():
                loss = F.cross_entropy(head(body(x)), y) * loss_scale
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                scaler.update()
    return log


@faulty("update-between-steps")
def update_after_each_optimizer(Scaler):
    log = two_parts(Scaler, loss_scale=1)
    assert log.findings[0].certainty == "likely"
    return log


@faulty("update-between-steps")
def update_after_each_optimizer_and_an_overflow(Scaler):
    log = two_parts(Scaler, loss_scale=30)
    assert log.findings[0].certainty == "certain"
    return log


@faulty("scaler-not-restored")
def resumed_with_a_new_scaler(Scaler):
    model = cnn()
    optimizer = sgd(model)
    with quiet(model, optimizer) as log:
        for x, y in pictures(3):
            optimizer.zero_grad()
            (STEEP * F.cross_entropy(model(x), y)).backward()
            optimizer.step()
    assert not log.findings
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in pictures(6, seed=2):
            optimizer.zero_grad()
            scaler.scale(STEEP * forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert any(step.skipped for step in log.steps)
    return log


# --- faulty loops: precision -------------------------------------------------------------------


def word_model():
    """Many words, tiny gradients: what FP16 cannot hold without scaling."""
    torch.manual_seed(0)
    model = lab.WordLM(4096, embedding=4, hidden=8)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def words(steps):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield (
            torch.randint(4096, (256, 2), generator=generator),
            torch.randint(4096, (256,), generator=generator),
        )


def accumulate_words(model, optimizer, scaler=None):
    """One step of an accumulation over 64 micro-batches, of which the others are left out."""
    for x, y in words(3):
        optimizer.zero_grad()
        loss = forward(model, x, y) / 64
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@faulty("fp16-without-scaler")
def fp16_gradients_flush_to_zero(Scaler):
    model, optimizer = word_model()
    with quiet(model, optimizer) as log:
        accumulate_words(model, optimizer)
    (finding,) = log.findings
    share = log.steps[-1].zero_share["output.weight"]
    assert finding.certainty == "certain"
    assert "In output.weight" in finding.sentence and share > 0.5
    return log


@healthy
def fp16_tiny_gradients_with_the_scaler(Scaler):
    model, optimizer = word_model()
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        accumulate_words(model, optimizer, scaler)
    assert log.steps[-1].zero_share["output.weight"] < 0.01
    return log


@faulty("fp16-without-scaler")
def scaler_switched_off_by_mistake(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu", enabled=False)
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "switched off" in log.findings[0].sentence
    return log


@faulty("scaler-without-autocast")
def autocast_forgotten(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    return log


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.skipif(torch.cuda.is_available(), reason="only wrong where there is no CUDA")
def test_autocast_for_another_device():
    model = mlp()
    optimizer = sgd(model)
    with quiet(model, optimizer) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    assert codes(log) == {"autocast-wrong-device"}


@faulty("backward-in-autocast")
def backward_inside_autocast(Scaler):
    model = mlp()
    optimizer = sgd(model)
    with quiet(model, optimizer) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            with bf16():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return log


@faulty("scaler-with-bf16")
def scaler_over_bf16_autocast(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y, bf16)).backward()
            scaler.step(optimizer)
            scaler.update()
    return log


@faulty("parameters-16-bit")
def one_layer_halved(Scaler):
    model = mlp()
    model[2].half()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with pytest.raises(ValueError), quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
    assert "2.weight" in log.findings[0].sentence and "0.weight" not in log.findings[0].sentence
    return log


@faulty("parameters-16-bit", "updates-lost")
def bf16_weights_stop_moving(Scaler):
    model = mlp().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with quiet(model, optimizer) as log:
        for x, y in vectors(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x.bfloat16()).float(), y).backward()
            optimizer.step()
    return log


@faulty("parameters-16-bit")
def bf16_weights_that_still_move(Scaler):
    """Not lost yet, so only possibly a fault; a learning rate of 0 in the warmup is no loss."""
    model = mlp().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    with quiet(model, optimizer) as log:
        for i, (x, y) in enumerate(vectors(4)):
            optimizer.param_groups[0]["lr"] = 0.0 if i < 3 else 0.05
            optimizer.zero_grad()
            F.cross_entropy(model(x.bfloat16()).float(), y).backward()
            optimizer.step()
    assert log.findings[0].certainty == "possible"
    return log


# --- faulty loops: gradients that do not arrive ------------------------------------------------


@faulty("no-gradients")
def optimizer_of_another_model(Scaler):
    model = mlp()
    optimizer = sgd(copy.deepcopy(model))
    scaler = Scaler("cpu")
    with pytest.raises(AssertionError), quiet(model, optimizer, scaler) as log:
        x, y = next(vectors(1))
        scaler.scale(forward(model, x, y)).backward()
        scaler.step(optimizer)
    assert "another one" in str(log)
    return log


@faulty("no-gradients")
def zero_grad_after_backward(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with pytest.raises(AssertionError), quiet(model, optimizer, scaler) as log:
        x, y = next(vectors(1))
        scaler.scale(forward(model, x, y)).backward()
        optimizer.zero_grad()
        scaler.step(optimizer)
    assert "before the step" in str(log)
    return log


@faulty("no-gradients")
def zero_grad_after_backward_without_scaler(Scaler):
    model = mlp()
    optimizer = sgd(model)
    with quiet(model, optimizer) as log:
        for x, y in vectors(3):
            forward(model, x, y, bf16).backward()
            optimizer.zero_grad()
            optimizer.step()
    return log


@faulty("no-gradients")
def everything_frozen(Scaler):
    model = mlp()
    optimizer = sgd(model)
    model[0].requires_grad_(False)
    optimizer = sgd(model[0])
    scaler = Scaler("cpu")
    with pytest.raises(AssertionError), quiet(model, optimizer, scaler) as log:
        x, y = next(vectors(1))
        scaler.scale(forward(model, x, y)).backward()
        scaler.step(optimizer)
    assert "frozen" in str(log)
    return log


@faulty("parameters-without-gradient")
def a_layer_that_the_loss_does_not_reach(Scaler):
    model = mlp()
    model.register_module("unused", nn.Linear(3, 3))
    model.forward = lambda x: model[2](model[1](model[0](x)))
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "unused.weight, unused.bias" in str(log)
    return log


@faulty("all-gradients-zero")
def loss_multiplied_by_zero(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y) * 0.0).backward()
            scaler.step(optimizer)
            scaler.update()
    return log


@faulty("no-steps")
def another_optimizer_is_watched(Scaler):
    model = mlp()
    stepped, watched = sgd(model), sgd(model)
    with quiet(model, watched) as log:
        for x, y in vectors(3):
            stepped.zero_grad()
            forward(model, x, y, bf16).backward()
            stepped.step()
    return log


# --- faulty loops: numbers ---------------------------------------------------------------------


class Attention(nn.Module):
    """One head, written by hand, as people write it."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.gain = gain

    def forward(self, x):
        q, k = self.q(x) * self.gain, self.k(x) * self.gain
        scores = q @ k.transpose(-1, -2)
        return self.out(scores.softmax(-1) @ self.v(x)).mean(1)


def attention_loop(Scaler, model, precision, steps=4):
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(steps):
            optimizer.zero_grad()
            scaler.scale(forward(model, x.reshape(4, 4, 8), y[:4], precision)).backward()
            scaler.step(optimizer)
            scaler.update()
    return log


@faulty("activation-overflow")
def scores_beyond_65504(Scaler):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Attention(gain=1e4))
    log = attention_loop(Scaler, model, fp16)
    assert "1 (Attention): the operation bmm made inf in FP16 from finite numbers" in str(log)
    return log


@faulty("activation-overflow")
def linear_output_beyond_65504(Scaler):
    model = mlp()
    model[0].weight.data.mul_(1e5)
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(4):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "0 (Linear): the operation addmm made inf in FP16" in str(log)
    return log


@faulty("loss-nonfinite")
def normalize_a_zero_vector(Scaler):
    """In FP16 the eps of 1e-12 is 0, and 0/0 is NaN: no overflow."""
    torch.manual_seed(0)

    class Cosine(nn.Linear):
        def forward(self, x):
            return F.normalize(super().forward(x), dim=-1)

    model = nn.Sequential(Cosine(8, 8, bias=False), nn.Linear(8, 4))
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            x[0] = 0.0
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "0 (Cosine): the operation div made NaN in FP16 from finite numbers" in str(log)
    return log


@faulty("loss-nonfinite")
def row_masked_completely(Scaler):
    """The mask of -inf is well; softmax over a row of nothing else is not."""
    torch.manual_seed(0)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x):
            scores = self.linear(x)
            hidden = torch.zeros_like(scores, dtype=torch.bool)
            hidden[0] = True
            return scores.masked_fill(hidden, float("-inf")).softmax(-1)

    model = Masked()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(3):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "the operation _softmax made NaN in FP16 from finite numbers" in str(log)
    return log


@faulty("loss-nonfinite")
def log_of_a_probability_that_is_zero(Scaler):
    """The model is fine; the hand-written loss is not."""
    model = nn.Sequential(nn.Linear(8, 1))
    model[0].weight.data.fill_(50.0)
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(4):
            optimizer.zero_grad()
            with fp16():
                p = model(x).sigmoid().squeeze(1)
                y = (y > 1).half()
                loss = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "loss function" in str(log)
    return log


@faulty("loss-nonfinite")
def a_batch_with_nan(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for i, (x, y) in enumerate(vectors(4)):
            optimizer.zero_grad()
            x[0] = float("nan") if i > 1 else 0.0
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert log.findings[0].step == 2 and "inputs of the model" in str(log)
    return log


@faulty("loss-nonfinite", "gradients-nonfinite", "weights-nonfinite")
def nan_reaches_the_weights(Scaler):
    model = mlp()
    optimizer = sgd(model)
    with quiet(model, optimizer) as log:
        for i, (x, y) in enumerate(vectors(14)):
            optimizer.zero_grad()
            loss = forward(model, x, y, bf16)
            (loss * float("inf") if i == 12 else loss).backward()
            optimizer.step()
    assert [finding.step for finding in log.findings] == [12, 12, None]
    assert "Its own weights are inf or NaN already: 0.weight" in str(log)
    return log


@faulty("buffers-nonfinite")
def overflow_poisons_running_statistics(Scaler):
    """The step is skipped, the weights are well, and evaluation is NaN."""
    model = cnn()
    optimizer = sgd(model)
    scaler = Scaler("cpu", growth_interval=4)
    with quiet(model, optimizer, scaler) as log:
        for i, (x, y) in enumerate(pictures(15)):
            optimizer.zero_grad()
            if i == 13:
                x[0, 0, 0, 0] = 1e30
                model.head.weight.data.clamp_(-1, 1)
            with fp16():
                out = model(x)
                loss = F.cross_entropy(out[1:] if i == 13 else out, y[1:] if i == 13 else y)
            scaler.scale(loss.nan_to_num(0.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    (finding,) = log.findings
    assert finding.step == 13 and "norm.running_mean" in finding.sentence
    assert "norm.running_mean" in log.steps[-1].nonfinite_buffers
    assert not log.steps[12].nonfinite_buffers
    return log


# --- faulty loops: scale and schedule ----------------------------------------------------------


@faulty("init-scale-too-high")
def sum_in_place_of_mean(Scaler):
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in pictures(25):
            optimizer.zero_grad()
            with fp16():
                loss = F.cross_entropy(model(x), y, reduction="sum") * 60
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert 6 <= sum(step.skipped for step in log.steps) < 20
    return log


@faulty("no-real-step")
def init_scale_out_of_reach(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu", init_scale=2.0**60)
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(8):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    return log


def nan_gradient(model):
    """A backward that always gives NaN while the loss is finite: sqrt at 0."""
    return (model[0].weight * 0).sum().sqrt() * 0 + 0


@faulty("scale-collapse")
def scale_falls_below_one(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for i, (x, y) in enumerate(vectors(25)):
            optimizer.zero_grad()
            loss = forward(model, x, y)
            loss = loss + nan_gradient(model) if i > 3 else loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "0.weight" in log.findings[0].sentence and "2.bias" not in log.findings[0].sentence
    return log


@faulty("many-skips")
def every_third_step_skipped(Scaler):
    model = mlp()
    optimizer = sgd(model)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for i, (x, y) in enumerate(vectors(18)):
            optimizer.zero_grad()
            loss = forward(model, x, y)
            loss = loss + nan_gradient(model) if i % 3 == 2 else loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert log.findings[0].step == 2
    return log


@faulty("scheduler-on-skip")
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def scheduler_moves_although_skipped(Scaler):
    model = cnn()
    optimizer = sgd(model)
    scheduler = SequentialLR(
        optimizer,
        [StepLR(optimizer, 1), StepLR(optimizer, 1)],
        milestones=[2],
    )
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in pictures(6):
            optimizer.zero_grad()
            scaler.scale(STEEP * forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    return log


@faulty("scheduler-on-skip")
def scheduler_moves_although_the_fused_kernel_skipped(Scaler):
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = OneCycleLR(optimizer, 1e-2, total_steps=10)
    scaler = Scaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in pictures(6):
            optimizer.zero_grad()
            scaler.scale(STEEP * forward(model, x, y)).backward()
            before = model.conv.weight.detach().clone()
            scaler.step(optimizer)
            assert log.steps[-1].skipped == torch.equal(before, model.conv.weight)
            scaler.update()
            scheduler.step()
    return log


@faulty("optimizers-out-of-step", "many-skips")
def one_optimizer_is_skipped_again_and_again(Scaler):
    torch.manual_seed(0)
    body, head = mlp(), nn.Linear(4, 4)
    optimizers = [sgd(body), sgd(head)]
    scaler = Scaler("cpu")
    with quiet([body, head], optimizers, scaler) as log:
        for i, (x, y) in enumerate(vectors(12)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with fp16():
                loss = F.cross_entropy(head(body(x)), y)
            loss = loss + nan_gradient(body) if i % 2 else loss
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    return log


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("loop, Scaler, expected", FAULTY)
def test_names_the_fault(loop, Scaler, expected):
    log = loop(Scaler)
    assert codes(log) == expected, str(log)
    for finding in log.findings:
        assert finding.advice == ADVICE[finding.code]
        assert finding.code in str(log) and finding.advice in str(log)


# --- PyTorch's error messages ------------------------------------------------------------------


def half(*shape):
    return torch.ones(*shape, dtype=torch.float16)


class MatmulByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


def custom_function():
    x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    with bf16():
        y = MatmulByHand.apply(x, w)
    y.sum().backward()


def refused_by_cuda_autocast():
    with dry_run():
        p, y = torch.rand(4, device="cuda"), torch.rand(4, device="cuda")
        F.binary_cross_entropy(p, y)


ERRORS = {
    "linear": ("dtype-mismatch", lambda: nn.Linear(2, 2)(half(1, 2))),
    "conv": ("dtype-mismatch", lambda: nn.Conv2d(1, 1, 1)(half(1, 1, 2, 2))),
    "bmm": ("dtype-mismatch", lambda: torch.ones(1, 2, 2) @ half(1, 2, 2)),
    "attention": (
        "dtype-mismatch",
        lambda: F.scaled_dot_product_attention(half(1, 2, 2), torch.ones(1, 2, 2), half(1, 2, 2)),
    ),
    "custom function": ("dtype-mismatch", custom_function),
    "index put": (
        "buffer-dtype",
        lambda: torch.zeros(2).index_put_((torch.tensor([0]),), half(1)),
    ),
    "index add": ("buffer-dtype", lambda: torch.zeros(2).index_add_(0, torch.tensor([0]), half(1))),
    "scatter": ("buffer-dtype", lambda: torch.zeros(2).scatter_add_(0, torch.tensor([0]), half(1))),
    "index copy": (
        "buffer-dtype",
        lambda: torch.zeros(2).index_copy_(0, torch.tensor([0]), half(1)),
    ),
    "masked scatter": (
        "buffer-dtype",
        lambda: torch.zeros(2).masked_scatter_(torch.tensor([True, False]), half(1)),
    ),
    "mask": ("value-beyond-fp16", lambda: half(2).masked_fill(torch.tensor([True, False]), -1e9)),
    "svd": ("no-16-bit-kernel", lambda: torch.linalg.svd(half(2, 2))),
    "binary cross entropy": ("bce-unsafe", refused_by_cuda_autocast),
    "numpy": ("numpy-bfloat16", lambda: torch.ones(2).bfloat16().numpy()),
}


@pytest.mark.parametrize("name", ERRORS)
def test_explains_an_exception_and_lets_it_pass(name):
    code, mistake = ERRORS[name]
    with pytest.raises((RuntimeError, TypeError)) as plain:
        mistake()
    model = mlp()
    with pytest.raises(type(plain.value)) as seen, quiet(model, sgd(model)) as log:
        mistake()
    assert str(seen.value) == str(plain.value)
    assert codes(log) == {code}
    assert log.findings[0].sentence.endswith(str(plain.value).splitlines()[0])


def test_an_unknown_exception_passes_as_the_same_object():
    error = KeyError("not ours")
    model = mlp()
    with pytest.raises(KeyError) as seen, quiet(model, sgd(model)) as log:
        raise error
    assert seen.value is error and not log.findings


def test_ctrl_c_passes_and_the_steps_are_kept():
    model = mlp()
    optimizer = sgd(model)
    with pytest.raises(KeyboardInterrupt), quiet(model, optimizer) as log:
        for x, y in vectors(3):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            raise KeyboardInterrupt
    assert len(log.steps) == 1 and not log.findings


def test_every_advice_can_be_reached():
    """Each code is in a table of this file, but for the one with its own test."""
    tested = set().union(
        *(param.values[2] for param in FAULTY), {code for code, _ in ERRORS.values()}
    )
    assert set(ADVICE) - tested <= {"autocast-wrong-device"}
    assert {code for _, code in MESSAGES} <= set(ADVICE)


# --- nothing is left, nothing is changed -------------------------------------------------------


def state_of_the_world(model, optimizer):
    kinds = [torch.amp.GradScaler, LossScaler, torch.autocast]
    kinds += [LRScheduler, StepLR, SequentialLR, torch.optim.lr_scheduler.ReduceLROnPlateau]
    return (
        [dict(vars(kind)) for kind in kinds],
        [dict(vars(module)) for module in (torch.autograd, torch.linalg)],
        [torch._foreach_norm, torch._foreach_clamp_min_, torch.norm],
        [torch.Tensor.norm, torch.Tensor.clamp_],
        [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        [len(p._backward_hooks or ()) for p in model.parameters()],
        [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)],
        [sorted(vars(optimizer)), sorted(vars(model))],
    )


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_everything_is_put_back(error):
    model = cnn()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    before = state_of_the_world(model, optimizer)
    try:
        with quiet(model, optimizer, scaler) as log:
            assert state_of_the_world(model, optimizer) != before
            for x, y in pictures(3):
                x[0] = float("nan")  # so that the probes are set up too
                optimizer.zero_grad()
                scaler.scale(forward(model, x, y)).backward()
                scaler.step(optimizer)
                scaler.update()
            if error:
                raise error
    except (ValueError, KeyboardInterrupt) as caught:
        assert type(caught) is error
    assert state_of_the_world(model, optimizer) == before
    assert "clamp_" not in vars(torch.Tensor)  # it is inherited
    assert "loss-nonfinite" in codes(log) or "activation-overflow" in codes(log)


def test_everything_is_put_back_where_listening_fails(monkeypatch):
    model = cnn()
    optimizer = sgd(model)
    before = state_of_the_world(model, optimizer)
    log = quiet(model, optimizer)
    monkeypatch.setattr(log._listener, "_module_zero_grad", None)  # the last thing replaced
    with pytest.raises(AttributeError):
        log.__enter__()
    assert state_of_the_world(model, optimizer) == before


def trained(Scaler, watched, fused):
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scheduler = OneCycleLR(optimizer, 1e-2, total_steps=20)
    scaler = Scaler("cpu", growth_interval=5)
    torch.manual_seed(3)
    losses = []

    def loop():
        for x, y in pictures(14):
            optimizer.zero_grad()
            loss = STEEP * forward(model, F.dropout(x, 0.1), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            losses.append(loss.item())

    if watched:
        with quiet(model, optimizer, scaler) as log:
            loop()
        assert any(step.skipped for step in log.steps)
        for step, loss in zip(log.steps, losses, strict=True):
            assert step.loss == pytest.approx(loss, rel=1e-6)
    else:
        loop()
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    for entry in optimizer.state.values():
        tensors += entry.values()
    return tensors, losses, scaler.state_dict(), scheduler.get_last_lr(), torch.get_rng_state()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("Scaler", SCALERS)
def test_training_is_bit_equal_with_and_without_watch(Scaler, fused):
    plain, seen = trained(Scaler, False, fused), trained(Scaler, True, fused)
    assert seen[1:4] == plain[1:4]
    assert torch.equal(seen[4], plain[4])
    assert all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(plain[0], seen[0], strict=True)
    )


def test_the_scaler_can_be_saved_inside_the_block():
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(2):
            optimizer.zero_grad()
            scaler.scale(forward(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
        restored = pickle.loads(pickle.dumps(scaler))
    assert restored.get_scale() == scaler.get_scale()
    assert not log.findings


def test_a_search_ends_where_the_forward_pass_raises():
    """The loop goes on after an error; what watch had set up for that pass is gone."""
    model = mlp()
    optimizer = sgd(model)
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack
    outside = len(modes())
    with quiet(model, optimizer) as log:
        for x, y in vectors(1):
            x[0] = float("nan")
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with pytest.raises(RuntimeError):
                model(torch.ones(2, 3))
            assert len(modes()) == outside
    assert "loss-nonfinite" in codes(log)


def test_nonfinite_shares_counts_what_the_norm_suspects():
    huge = torch.full((4,), 1e30)  # finite, although its squares are not
    mixed = torch.tensor([1.0, float("inf"), float("nan"), float("-inf")])
    named = [("huge", huge), ("mixed", mixed), ("none", torch.empty(0)), ("half", half(2) * 6e4)]
    assert nonfinite_shares(named) == {"mixed": 0.75}
    assert nonfinite_shares([]) == {}


def test_memory_that_was_never_written_is_no_origin():
    class Buffered(nn.Linear):
        def forward(self, x):
            out = torch.empty(len(x), 4)  # deterministic mode fills it with NaN
            out.copy_(super().forward(x))
            return out.log()

    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        model = Buffered(8, 4)
        with OriginFinder(model) as finder:
            model(-model.weight.sign())  # every output is negative
    finally:
        torch.use_deterministic_algorithms(False)
    assert "the operation log made NaN in float32" in finder.origin.sentence
    assert not finder.origin.overflow


def test_blocks_can_be_nested():
    model, other = mlp(), mlp(1)
    optimizers = sgd(model), sgd(other)
    with quiet(model, optimizers[0]) as outer, quiet(other, optimizers[1]) as inner:
        for x, y in vectors(3):
            for network, optimizer in zip((model, other), optimizers, strict=True):
                optimizer.zero_grad()
                forward(network, x, y, bf16).backward()
                optimizer.step()
    assert len(outer.steps) == len(inner.steps) == 3
    assert not outer.findings and not inner.findings


def test_gradients_are_not_kept_alive():
    """zero_grad frees gradients; watch must not hold them."""
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    with quiet(model, optimizer, scaler):
        x, y = next(vectors(1))
        loss = scaler.scale(forward(model, x, y))
        loss.backward()
        kept = weakref.ref(model[0].weight.grad)
        graph = weakref.ref(loss)
        scaler.step(optimizer)
        optimizer.zero_grad()
        del loss
        gc.collect()
        assert kept() is None and graph() is None


def test_losses_are_not_collected_for_ever():
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    with quiet(model, optimizer, scaler) as log:
        for x, y in vectors(5):
            optimizer.zero_grad()
            loss = forward(model, x, y)
            (scaler.scale(loss) + scaler.scale(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not log.findings
    assert len(log._listener._outputs) <= 2


# --- the record --------------------------------------------------------------------------------


def test_records_what_happened():
    model = cnn()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
    expected = []
    with quiet(model, optimizer, scaler) as log:
        for x, y in pictures(13):
            optimizer.zero_grad()
            loss = forward(model, x, y)
            scale = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            grads = {n: p.grad.clone() for n, p in model.named_parameters()}
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # makes NaN of all, if one is inf
            scaler.step(optimizer)
            scaler.update()
            expected.append((loss.item(), scale, scaler.get_scale() < scale, grads))
    assert {step.skipped for step in log.steps} == {True, False}
    for i, (step, (loss, scale, skipped, grads)) in enumerate(
        zip(log.steps, expected, strict=True)
    ):
        assert (step.index, step.optimizer, step.scale, step.skipped) == (i, 0, scale, skipped)
        assert step.loss == pytest.approx(loss)
        bad = {n: 1 - g.isfinite().double().mean().item() for n, g in grads.items()}
        assert step.nonfinite_share == pytest.approx({n: s for n, s in bad.items() if s})
        if i in (11, 12):
            assert step.zero_share is None
        else:
            zero = {n: (g == 0).double().mean().item() for n, g in grads.items()}
            assert step.zero_share == pytest.approx(zero)
    assert any(0 < share < 1 for step in log.steps for share in step.nonfinite_share.values())


def test_loss_is_the_mean_over_an_accumulation():
    model = mlp()
    optimizer = sgd(model)
    losses = []
    with quiet(model, optimizer) as log:
        for x, y in vectors(4):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    assert log.steps[0].loss == pytest.approx(sum(losses) / 4)


def test_report_is_printed_only_for_findings(capsys):
    model = mlp()
    optimizer = sgd(model)
    with lab.watch(model, optimizer) as log:
        pass
    assert capsys.readouterr().out == ""
    with lab.watch(model, optimizer) as log:
        x, y = next(vectors(1))
        forward(model, x, y).backward()
        optimizer.step()
    assert capsys.readouterr().out == f"{log}\n"
    with lab.watch(model, optimizer, report=False) as silent:
        optimizer.zero_grad()
        optimizer.step()
    assert codes(silent) == {"no-gradients"} and capsys.readouterr().out == ""
    assert str(log).startswith("watch: 1 step, 0 skipped, autocast FP16")
    assert "fp16-without-scaler (possible)" in str(log)
    with pytest.raises(ZeroDivisionError), lab.watch(model, optimizer):
        optimizer.zero_grad()
        optimizer.step()
        raise ZeroDivisionError
    assert "no-gradients" in capsys.readouterr().out


def test_report_as_html_is_escaped():
    model = mlp()
    with pytest.raises(RuntimeError), quiet(model, sgd(model)) as log:
        raise RuntimeError("mat1 and mat2 must have the same dtype <b>")
    page = log._repr_html_()
    assert "dtype-mismatch" in page and "&lt;b&gt;" in page and "<b>" not in page
    assert not re.search(r"<table", quiet(model, sgd(model))._repr_html_())


# --- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (lambda m, o, s: (o, m), r"model is a SGD, expected an nn.Module"),
        (lambda m, o, s: (m, s), r"optimizer is a GradScaler"),
        (lambda m, o, s: (m, [o, None]), r"optimizer is a NoneType"),
        (lambda m, o, s: (m, []), r"optimizer is empty"),
        (lambda m, o, s: (m, o, o), r"scaler is a SGD without scale\(\)"),
    ],
)
def test_wrong_arguments(arguments, message):
    model = mlp()
    optimizer = sgd(model)
    with pytest.raises(TypeError, match=message):
        watch(*arguments(model, optimizer, torch.amp.GradScaler("cpu")))


def test_a_log_records_once():
    model = mlp()
    log = quiet(model, sgd(model))
    with log:
        pass
    with pytest.raises(RuntimeError, match="call lab.watch"), log:
        pass


def test_lab_watch_is_the_function():
    code = (
        "import sys, amp_lab as lab\n"
        "assert callable(lab.watch), lab.watch\n"
        "import amp_lab.watch\n"
        "from amp_lab.watch import Finding\n"
        "assert callable(lab.watch), lab.watch\n"
        "assert not {'matplotlib', 'ipywidgets', 'numpy.testing'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
