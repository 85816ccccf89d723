"""``LossScaler`` against ``torch.amp.GradScaler``: same outcome and state after every call."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp import GradScaler

from amp_lab.scaler import LossScaler

INF, NAN = math.inf, math.nan


def bits(tensor):
    """Every bit of a tensor, with all NaNs made alike."""
    tensor = torch.where(tensor.isnan(), NAN, tensor.detach())
    as_integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.dtype, tensor.shape, tensor.view(as_integers).tolist()


class Side:
    """A scaler with its own copy of the parameters and optimizers."""

    def __init__(self, scaler, optimizers=1):
        self.scaler = scaler
        self.parameters, self.optimizers = [], []
        for index in range(optimizers):
            generator = torch.Generator().manual_seed(index)
            shapes = [(3,), (2, 2)]
            parameters = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
            self.parameters.append(parameters)
            if index == 0:
                groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.3}]
                self.optimizers.append(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
            else:
                self.optimizers.append(torch.optim.AdamW(parameters, lr=0.1))

    def backward(self, coefficients):
        """Each parameter's gradient becomes its coefficient times the scale; None: no gradient."""
        loss = torch.zeros(())
        for parameters, row in zip(self.parameters, coefficients, strict=False):
            for parameter, coefficient in zip(parameters, row, strict=True):
                if coefficient is not None:
                    weights = torch.linspace(0.3, 1, parameter.numel()).view_as(parameter)
                    weights.view(-1)[-1] = coefficient
                    loss = loss + (parameter * weights).sum()
        scaled = self.scaler.scale(loss)
        if scaled.requires_grad:
            scaled.backward()

    def zero_gradients(self):
        """A backward pass that gives gradients of exactly zero."""
        everything = [p for group in self.parameters for p in group]
        self.scaler.scale(sum((p * 0).sum() for p in everything)).backward()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def unscale_(self, index):
        self.scaler.unscale_(self.optimizers[index % len(self.optimizers)])

    def clip(self):
        for parameters in self.parameters:
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)

    def step(self, index):
        return self.scaler.step(self.optimizers[index % len(self.optimizers)])

    def update(self, new_scale=None):
        self.scaler.update(new_scale)

    def snapshot(self):
        everything = [p for group in self.parameters for p in group]
        return {
            "scaler": repr(self.scaler.state_dict()),
            "get_scale": repr(self.scaler.get_scale()),
            "weights": [bits(p) for p in everything],
            "gradients": [None if p.grad is None else bits(p.grad) for p in everything],
            "optimizers": [
                [
                    {k: bits(v) if torch.is_tensor(v) else v for k, v in optimizer.state[p].items()}
                    for group in optimizer.param_groups
                    for p in group["params"]
                    if p in optimizer.state
                ]
                for optimizer in self.optimizers
            ],
        }


class Pair:
    """The same calls made on both scalers; after each, outcome and state must be the same."""

    def __init__(self, optimizers=1, **config):
        self.theirs = Side(GradScaler("cpu", **config), optimizers)
        self.ours = Side(LossScaler("cpu", **config), optimizers)
        self.compare()

    def compare(self):
        assert self.ours.snapshot() == self.theirs.snapshot()

    def call(self, name, *args):
        """Call a method of both sides; return the type of error that both raised, or None."""
        outcomes = []
        for side in (self.theirs, self.ours):
            try:
                getattr(side, name)(*args)
                outcomes.append(None)
            except (RuntimeError, AssertionError, ValueError) as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1], (name, args, outcomes)
        self.compare()
        return outcomes[0]

    def exchange_states(self, fresh):
        """Each scaler, or a new one in its place, continues from the state of the other."""
        states = self.ours.scaler.state_dict(), self.theirs.scaler.state_dict()
        if fresh:
            other = dict(
                init_scale=7.0, growth_factor=9.0, backoff_factor=0.125, growth_interval=77
            )
            self.theirs.scaler = GradScaler("cpu", **other)
            self.ours.scaler = LossScaler("cpu", **other)
        self.theirs.scaler.load_state_dict(states[0])
        self.ours.scaler.load_state_dict(states[1])
        self.compare()

    def iteration(self, coefficients, unscale=(), clip=False, new_scale=None):
        """One training step in the right order; return the errors, which both sides agree on."""
        self.call("zero_grad")
        errors = [self.call("backward", coefficients)]
        errors += [self.call("unscale_", index) for index in unscale]
        if clip:
            self.call("clip")
        errors += [self.call("step", i) for i in range(len(self.ours.optimizers))]
        errors.append(self.call("update", new_scale))
        return [error for error in errors if error]

    @property
    def scale(self):
        return self.ours.scaler.get_scale()

    @property
    def tracker(self):
        return self.ours.scaler.state_dict()["_growth_tracker"]


GOOD, OVERFLOW = [[1.0, -2.0]], [[1.0, INF]]

configs = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([2.0**16, 1.0, 3.0, 0.1, 1000.7, 2.0**125, 2.0**-147]),
        "growth_factor": st.sampled_from([2.0, 1.5]) | st.floats(1.001, 4),
        "backoff_factor": st.sampled_from([0.5, 0.25]) | st.floats(0.01, 0.99),
        "growth_interval": st.integers(1, 4),
    }
)
finite = st.floats(-1000, 1000, width=32) | st.sampled_from([0.0, -0.0, 1e-42, 1e-8])
anything = finite | st.sampled_from([INF, -INF, NAN, 1e38]) | st.none()
good_rows = st.lists(st.tuples(finite, finite), min_size=2, max_size=2)
any_rows = st.lists(st.tuples(anything, anything), min_size=2, max_size=2)
new_scales = st.sampled_from([2.0**10, 0.3, 5.0, 2.0**127, 3e38, 0.0])
reproducible = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@reproducible
@given(data=st.data(), config=configs, optimizers=st.integers(1, 2))
def test_training_loops_stay_equal(data, config, optimizers):
    pair = Pair(optimizers, **config)
    for _ in range(data.draw(st.integers(1, 10))):
        coefficients = data.draw(good_rows | good_rows | any_rows)
        unscale = data.draw(st.sampled_from([(), (0,), (1,), (0, 1)]))
        unscale = [index for index in unscale if index < optimizers]
        new_scale = data.draw(st.sampled_from([None] * 6) | new_scales)
        pair.iteration(coefficients, unscale, data.draw(st.booleans()), new_scale)
        if data.draw(st.integers(0, 4)) == 0:
            pair.exchange_states(fresh=data.draw(st.booleans()))


calls = st.one_of(
    st.tuples(st.just("backward"), any_rows),
    st.tuples(st.just("backward"), good_rows),
    st.tuples(st.just("zero_gradients")),
    st.tuples(st.just("zero_grad"), st.booleans()),
    st.tuples(st.just("unscale_"), st.integers(0, 1)),
    st.tuples(st.just("clip")),
    st.tuples(st.just("step"), st.integers(0, 1)),
    st.tuples(st.just("step"), st.integers(0, 1)),
    st.tuples(st.just("update")),
    st.tuples(st.just("update"), new_scales),
    st.tuples(st.just("exchange_states"), st.booleans()),
)


@reproducible
@given(
    config=configs, optimizers=st.integers(1, 2), order=st.lists(calls, min_size=12, max_size=40)
)
def test_any_order_of_calls_stays_equal_errors_included(config, optimizers, order):
    pair = Pair(optimizers, **config)
    if len(order) % 4:  # else most calls fail because no loss was scaled yet
        pair.call("backward", [[1.0, 1.0]] * optimizers)
    for name, *args in order:
        if name == "exchange_states":
            pair.exchange_states(*args)
        else:
            pair.call(name, *args)


def test_disabled_scalers_stay_equal():
    pair = Pair(2, enabled=False)
    for rows in ([[1.0, 2.0], [3.0, 0.0]], [[INF, 1.0], [1.0, 1.0]]):
        assert pair.iteration(rows, unscale=[0, 0, 1]) == []
    assert pair.call("step", 0) is None and pair.call("step", 0) is None
    scaler = pair.ours.scaler
    assert scaler.state_dict() == {} and scaler.get_scale() == 1.0 and not scaler.is_enabled()
    scaler.load_state_dict({})
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    # a closure is passed on, too
    optimizer = pair.ours.optimizers[0]
    assert scaler.step(optimizer, closure=lambda: 5.0) == 5.0
    assert scaler.step(optimizer, lambda: 6.0) == 6.0


def test_mixed_precision_training_of_a_model_stays_equal():
    def train(scaler):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        inputs, targets = torch.randn(32, 8), torch.arange(32) % 4
        for _ in range(30):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            yield scaler.state_dict(), [bits(p) for p in model.parameters()]

    config = dict(init_scale=2.0**22, growth_interval=4)
    theirs = list(train(GradScaler("cpu", **config)))
    assert list(train(LossScaler("cpu", **config))) == theirs
    scales = [state["scale"] for state, _ in theirs]
    changes = [after / before for before, after in zip(scales, scales[1:], strict=False)]
    assert {0.5, 1.0, 2.0} <= set(changes)  # real overflow, good steps and growth


# what happens when


def test_growth_comes_with_the_last_iteration_of_the_interval():
    pair = Pair(init_scale=8.0, growth_interval=3)
    seen = []
    for rows in (GOOD, GOOD, OVERFLOW, GOOD, GOOD, GOOD, GOOD):
        pair.iteration(rows)
        seen.append((pair.scale, pair.tracker))
    assert seen == [(8, 1), (8, 2), (4, 0), (4, 1), (4, 2), (8, 0), (8, 1)]


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("unscale", [(), (0,)])
def test_one_bad_value_skips_the_step_and_backs_off(bad, unscale):
    pair = Pair(init_scale=8.0)
    before = pair.ours.snapshot()
    pair.iteration([[1.0, bad]], unscale)
    after = pair.ours.snapshot()
    assert (after["weights"], after["optimizers"]) == (before["weights"], before["optimizers"])
    assert pair.scale == 4
    # the gradients were unscaled all the same
    assert pair.ours.parameters[0][0].grad[-1] == 1.0


def test_gradients_of_zero_are_good():
    pair = Pair(init_scale=8.0, growth_interval=2)
    for _ in range(2):
        pair.call("zero_grad")
        pair.call("zero_gradients")
        assert pair.call("step", 0) is None
        assert pair.call("update") is None
    assert pair.scale == 16
    assert all(p.grad.count_nonzero() == 0 for p in pair.ours.parameters[0])


@pytest.mark.parametrize("bad", [0, 1])
def test_each_optimizer_skips_for_itself_and_update_looks_at_all(bad):
    pair = Pair(optimizers=2, init_scale=8.0)
    before = pair.ours.snapshot()["weights"]
    rows = [[1.0, 1.0], [1.0, 1.0]]
    rows[bad][0] = INF
    pair.iteration(rows)
    after = pair.ours.snapshot()["weights"]
    stepped = [before[:2] != after[:2], before[2:] != after[2:]]
    assert stepped == [bad != 0, bad != 1]
    assert (pair.scale, pair.tracker) == (4, 0)
    pair.iteration([[1.0, 1.0], [1.0, 1.0]])
    assert (pair.scale, pair.tracker) == (4, 1)


def test_an_optimizer_that_was_only_unscaled_counts_in_update():
    pair = Pair(optimizers=2, init_scale=8.0)
    pair.call("backward", [[1.0, 1.0], [1.0, INF]])
    pair.call("step", 0)
    pair.call("unscale_", 1)
    assert pair.call("update") is None
    assert pair.scale == 4


@pytest.mark.parametrize("scale", [2.0**127, 2.0**126 * 1.5, 3e38])
def test_the_scale_does_not_grow_to_inf(scale):
    pair = Pair(init_scale=scale, growth_interval=2)
    for _ in range(4):
        pair.call("zero_grad")
        pair.call("zero_gradients")
        pair.call("step", 0)
        pair.call("update")
    assert math.isfinite(pair.scale) and 2 * pair.scale >= 2.0**128
    assert pair.tracker == 0


def test_the_scale_can_fall_to_zero_and_stays_there():
    pair = Pair(init_scale=2.0**-148, growth_interval=1)
    pair.iteration(OVERFLOW)
    assert pair.scale == 2.0**-149
    pair.iteration(OVERFLOW)
    assert pair.scale == 0
    pair.call("zero_grad")
    pair.call("zero_gradients")
    pair.call("step", 0)
    pair.call("update")
    assert pair.scale == 0
    # no overflow was seen in 0, but 0 / 0 is NaN and it was applied
    assert all(p.isnan().all() for p in pair.ours.parameters[0])


def test_overflow_in_the_division_is_not_seen():
    pair = Pair(init_scale=2.0**-128, growth_interval=1)  # 1 / scale is inf in FP32
    pair.iteration(GOOD)
    assert pair.scale == 2.0**-127
    assert all(p.isinf().all() for p in pair.ours.parameters[0])


def test_an_interval_at_or_below_the_count_is_never_met():
    pair = Pair(init_scale=8.0, growth_interval=5)
    for _ in range(3):
        pair.iteration(GOOD)
    for side in (pair.theirs, pair.ours):
        side.scaler.set_growth_interval(3)
    for _ in range(4):
        pair.iteration(GOOD)
    assert (pair.scale, pair.tracker) == (8, 7)
    pair.iteration(OVERFLOW)
    for _ in range(3):
        pair.iteration(GOOD)
    assert (pair.scale, pair.tracker) == (8, 0)


def test_a_new_scale_leaves_the_count_alone_and_forgets_the_overflow():
    pair = Pair(init_scale=8.0)
    pair.iteration(GOOD)
    pair.iteration(OVERFLOW, new_scale=32.0)
    assert (pair.scale, pair.tracker) == (32, 1)
    pair.iteration(GOOD, new_scale=torch.tensor(0.1, dtype=torch.float64))
    assert pair.scale == torch.tensor(0.1).item() and pair.tracker == 1
    for new_scale in (4, torch.tensor([4.0]), torch.tensor(4.0, requires_grad=True)):
        pair.ours.scaler.update(new_scale)  # GradScaler refuses these three
        assert repr(pair.scale) == "4.0"
    with pytest.raises(RuntimeError, match="2 elements"):
        pair.ours.scaler.update(torch.ones(2))


@pytest.mark.parametrize("fresh", [True, False])
def test_states_are_exchanged_in_the_middle_of_a_run(fresh):
    pair = Pair(init_scale=1000.7, growth_factor=1.3, backoff_factor=0.7, growth_interval=4)
    pair.exchange_states(fresh)  # before the first loss
    for rows in (GOOD, GOOD, OVERFLOW, GOOD, GOOD):
        pair.iteration(rows)
    assert pair.tracker == 2
    pair.exchange_states(fresh)
    for _ in range(2):
        pair.iteration(GOOD)
    assert pair.tracker == 0  # grew in the fourth good iteration


def test_a_state_is_rounded_to_fp32_when_it_is_first_used():
    state = {**LossScaler("cpu").state_dict(), "scale": 0.1}
    for started in (False, True):
        pair = Pair()
        if started:
            pair.iteration(GOOD)
        for side in (pair.theirs, pair.ours):
            side.scaler.load_state_dict(state)
        pair.compare()
        pair.iteration(GOOD)
        assert pair.scale == torch.tensor(0.1).item() != 0.1


def test_a_failing_optimizer_step_can_be_repeated_without_unscaling_twice():
    def run(scaler):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scaler.scale(parameter.sum()).backward()
        with pytest.raises(TypeError):
            scaler.step(optimizer, no_such_argument=1)
        assert parameter.tolist() == [1, 1]
        scaler.step(optimizer)
        return bits(parameter)

    assert run(LossScaler("cpu")) == run(GradScaler("cpu")) == bits(torch.full((2,), 0.5))


# unscaling, bit by bit


@pytest.mark.parametrize("scale", [2.0**16, 3.0, 0.0077, 1e30, 1e-30, 2.0**127])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["dense", "sparse", "coalesced", "empty"])
def test_unscaled_gradients_have_the_same_bits(scale, dtype, kind):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3000, generator=generator).mul(100).to(dtype)
    if kind == "empty":
        values = values[:0]
    indices = torch.arange(len(values)).div(2, rounding_mode="floor")[None]
    results = []
    for scaler in (GradScaler("cpu", init_scale=scale), LossScaler("cpu", init_scale=scale)):
        gradient = values.clone()
        if kind in ("sparse", "coalesced"):
            gradient = torch.sparse_coo_tensor(indices, gradient, check_invariants=True)
            gradient = gradient.coalesce() if kind == "coalesced" else gradient
        parameter = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=dtype))
        parameter.grad = gradient
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        gradient = parameter.grad
        scaler.step(optimizer)
        scaler.update()
        results.append((gradient.to_dense() if gradient.is_sparse else gradient, parameter, scaler))
    (gradient, weights, theirs), (our_gradient, our_weights, ours) = results
    assert bits(our_gradient) == bits(gradient)
    assert bits(our_weights) == bits(weights)
    assert ours.state_dict() == theirs.state_dict()


def test_sparse_gradients_of_a_real_embedding():
    def run(scaler):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(10, 4, sparse=True)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        for factor in (1.0, INF, 1.0):
            optimizer.zero_grad()
            loss = (embedding(torch.tensor([1, 1, 7])) * factor).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            yield bits(embedding.weight), scaler.state_dict()

    config = dict(init_scale=3.0, growth_interval=1)
    theirs = list(run(GradScaler("cpu", **config)))
    assert list(run(LossScaler("cpu", **config))) == theirs
    assert [state["scale"] for _, state in theirs] == [6, 3, 6]


def test_gradients_with_a_graph_are_unscaled():
    def run(scaler):
        parameter = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        scaler.scale(parameter.pow(3).sum()).backward(create_graph=True)
        scaler.step(optimizer)
        gradient, parameter.grad = parameter.grad, None
        operation = type(gradient.grad_fn).__name__  # unscaling leaves no trace in the graph
        parameter.grad = torch.ones(2, requires_grad=True)
        scaler.update()
        scaler.step(optimizer)
        return bits(gradient), bits(parameter), bits(parameter.grad), operation

    with pytest.warns(UserWarning, match="create_graph"):
        assert run(LossScaler("cpu")) == run(GradScaler("cpu"))


# scale()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 2)])
@pytest.mark.parametrize("scale", [65536.0, 0.1])
def test_scaled_outputs_are_equal(dtype, shape, scale):
    outputs = torch.full(shape, 1.25, dtype=dtype)
    scaled = LossScaler("cpu", init_scale=scale).scale(outputs)
    assert bits(scaled) == bits(GradScaler("cpu", init_scale=scale).scale(outputs))


def test_a_scalar_fp16_loss_becomes_fp32_and_a_vector_does_not():
    scaler = LossScaler("cpu")
    assert scaler.scale(torch.tensor(1.0, dtype=torch.half)).item() == 65536
    assert scaler.scale(torch.ones(1, dtype=torch.half)).item() == INF


def test_nested_outputs_keep_their_containers():
    one, two = torch.tensor(1.0), torch.tensor([2.0])
    ours, theirs = LossScaler("cpu", init_scale=8.0), GradScaler("cpu", init_scale=8.0)
    for nested in ([one, two], (one, [two, (one,)]), [], ()):
        assert ours.scale(nested) == theirs.scale(nested)
        assert type(ours.scale(nested)) is type(theirs.scale(nested))
    assert list(ours.scale(t for t in (one, two))) == list(theirs.scale(t for t in (one, two)))
    for scaler in (ours, theirs):
        with pytest.raises(ValueError, match="Tensor"):
            scaler.scale(3.0)
        with pytest.raises(ValueError, match="Tensor"):
            scaler.scale([one, None])


def test_an_empty_list_is_not_a_scaled_loss():
    for scaler in (GradScaler("cpu"), LossScaler("cpu")):
        scaler.scale([])
        with pytest.raises(AssertionError):
            scaler.update()


# wrong order and other errors: GradScaler raises at the same call


@pytest.mark.parametrize(
    ("good_calls", "wrong_call", "error", "message"),
    [
        ([], ("unscale_", 0), AssertionError, r"^unscale_\(\) before scale\(\)"),
        ([], ("step", 0), AssertionError, r"^step\(\) before scale\(\)"),
        ([], ("update",), AssertionError, r"^update\(\) before scale\(\)"),
        ([], ("update", 2.0), AssertionError, r"^update\(\) before scale\(\)"),
        (["backward"], ("update",), AssertionError, "No inf checks since"),
        (["backward", "step", "update"], ("update",), AssertionError, "No inf checks since"),
        (["backward", "step"], ("step", 0), RuntimeError, r"step\(\) was already called"),
        (["backward", "unscale_"], ("unscale_", 0), RuntimeError, r"unscale_\(\) was already"),
        (["backward", "step"], ("unscale_", 0), RuntimeError, r"unscale_\(\) after step"),
        (["loss"], ("step", 0), AssertionError, "No inf checks: no parameter"),
        (["loss", "unscale_"], ("step", 0), AssertionError, "No inf checks: no parameter"),
        (["loss", "unscale_"], ("unscale_", 0), RuntimeError, r"unscale_\(\) was already"),
        (["loss", "unscale_"], ("update",), AssertionError, "No inf checks since"),
    ],
)
def test_wrong_order(good_calls, wrong_call, error, message):
    arguments = {"backward": [GOOD], "loss": [[[None, None]]], "step": [0], "unscale_": [0]}
    pair = Pair()
    for name in good_calls:
        method = "backward" if name == "loss" else name
        assert pair.call(method, *arguments.get(name, [])) is None
    assert pair.call(*wrong_call) is error
    with pytest.raises(error, match=message):
        getattr(pair.ours, wrong_call[0])(*wrong_call[1:])
    # and after the mistake both go on alike
    pair.iteration(GOOD)
    pair.iteration(OVERFLOW)


def test_fp16_gradients_are_refused_before_any_gradient_is_touched():
    for scaler in (GradScaler("cpu"), LossScaler("cpu")):
        full = torch.nn.Parameter(torch.ones(2))
        half = torch.nn.Parameter(torch.ones(2, dtype=torch.half))
        optimizer = torch.optim.SGD([full, half], lr=0.1)
        scaler.scale(torch.ones(()))
        full.grad, half.grad = torch.full_like(full, 3.0), torch.ones_like(half)
        for method in (scaler.unscale_, scaler.step, scaler.unscale_):
            with pytest.raises(ValueError, match="FP16 gradients"):
                method(optimizer)
        assert full.grad.tolist() == [3, 3] and full.tolist() == [1, 1]
        with pytest.raises(AssertionError):
            scaler.update()


def test_closures_are_refused():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for scaler in (GradScaler("cpu"), LossScaler("cpu")):
        for closure in (lambda: 1.0, None):
            with pytest.raises(RuntimeError, match="losure"):
                scaler.step(optimizer, closure=closure)
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, lambda: 1.0)  # GradScaler lets this one through
    assert parameter.tolist() == [1, 1]
    scaler.step(optimizer, None)
    assert parameter.tolist() != [1, 1]


def test_step_passes_arguments_and_the_result_on():
    class Recording(torch.optim.SGD):
        def step(self, *args, **kwargs):
            return args, kwargs

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Recording([parameter], lr=0.1)
    for scaler in (GradScaler("cpu"), LossScaler("cpu")):
        scaler.scale(parameter.sum()).backward()
        assert scaler.step(optimizer, 1, word=2) == ((1,), {"word": 2})
        scaler.update()
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * INF).backward()
        assert scaler.step(optimizer, 1, word=2) is None
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "config", [{"growth_factor": 1.0}, {"growth_factor": 0.5}, {"backoff_factor": 1.0}]
)
def test_impossible_factors(config):
    with pytest.raises(AssertionError):
        GradScaler("cpu", **config)
    with pytest.raises(ValueError, match=next(iter(config))):
        LossScaler("cpu", **config)
    assert not LossScaler("cpu", enabled=False, **config).is_enabled()


def test_the_empty_state_of_a_disabled_scaler_is_refused():
    for scaler in (GradScaler("cpu"), LossScaler("cpu")):
        with pytest.raises(RuntimeError, match="empty"):
            scaler.load_state_dict(LossScaler("cpu", enabled=False).state_dict())


# the interface


def test_same_arguments_defaults_and_methods():
    ours, theirs = (inspect.signature(cls).parameters for cls in (LossScaler, GradScaler))
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in theirs.values()
    ]
    methods = [name for name in dir(GradScaler) if not name.startswith("_")]
    assert set(methods) <= set(dir(LossScaler))
    for name in methods:
        ours, theirs = (
            inspect.signature(getattr(cls, name)).parameters for cls in (LossScaler, GradScaler)
        )
        assert list(ours) == list(theirs), name
    assert LossScaler("cpu").state_dict() == GradScaler("cpu").state_dict()


def test_without_cuda_the_default_warns_and_is_disabled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for make in (GradScaler, LossScaler):
        with pytest.warns(UserWarning, match="CUDA is not available"):
            assert not make().is_enabled()
        assert make("cpu").is_enabled()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert LossScaler().is_enabled()


def test_getters_and_setters():
    for scaler in (GradScaler("cpu", 8.0, 3.0, 0.25, 7), LossScaler("cpu", 8.0, 3.0, 0.25, 7)):
        assert scaler.get_scale() == 8
        assert scaler.get_growth_factor() == 3
        assert scaler.get_backoff_factor() == 0.25
        assert scaler.get_growth_interval() == 7
        scaler.set_growth_factor(5.0)
        scaler.set_backoff_factor(0.125)
        scaler.set_growth_interval(1)
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        scales = []
        for factor in (1.0, INF):
            optimizer.zero_grad()
            scaler.scale((parameter * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [40, 5]


# fused optimizers


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers_end_with_the_same_weights(name, unscale):
    def run(scaler):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(8))
        optimizer = getattr(torch.optim, name)([parameter], lr=0.1, fused=True)
        for factor in (INF, 1.0, 2.0, NAN, 3.0, 0.0):
            optimizer.zero_grad()
            scaler.scale((parameter * parameter * factor).sum()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            yield bits(parameter), scaler.state_dict()
        yield [bits(v) for v in optimizer.state[parameter].values()]

    config = dict(init_scale=1024.0, growth_interval=2)
    theirs = list(run(GradScaler("cpu", **config)))
    assert list(run(LossScaler("cpu", **config))) == theirs
    assert len({str(weights) for weights, _ in theirs[:-1]}) > 3


def test_fused_sgd_with_momentum_survives_an_overflow_in_its_first_step():
    """As without ``fused=True``; the momentum must not start from a step that was skipped."""

    def run(scaler, fused):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(8))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=fused)
        for factor in (INF, 1.0, 2.0):
            optimizer.zero_grad()
            scaler.scale((parameter * parameter * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            yield parameter.detach().clone(), scaler.state_dict()

    ours = run(LossScaler("cpu"), fused=True)
    for (weights, state), (expected, expected_state) in zip(
        ours, run(GradScaler("cpu"), fused=False), strict=True
    ):
        torch.testing.assert_close(weights, expected)
        assert state == expected_state
