"""dry_run: the real autocast on tensors without data, and nothing left behind."""

import gc
import logging
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_lab.dryrun import dry_run

DTYPES = [torch.float16, torch.bfloat16]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a GPU hides")


def square(device="cuda", dtype=torch.float32):
    return torch.empty(4, 4, device=device, dtype=dtype)


def nesting():
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def cuda_guard_missing():
    with FakeTensorMode():
        try:
            square()[0]
        except RuntimeError:
            return True
    return False


def state():
    """Everything that a dry run touches, or could."""
    return {
        "enabled": [torch.is_autocast_enabled(d) for d in ("cuda", "cpu")],
        "dtype": [torch.get_autocast_dtype(d) for d in ("cuda", "cpu")],
        "cache": torch.is_autocast_cache_enabled(),
        "nesting": nesting(),
        "modes": _get_current_dispatch_mode_stack(),
        "functions": [
            torch.cuda.amp.common.amp_definitely_not_available,
            torch.cuda.is_bf16_supported,
        ],
        "guard missing": cuda_guard_missing(),
        "cudnn": torch.backends.cudnn.enabled,
        "log filters": list(logging.getLogger("torch._subclasses.fake_tensor").filters),
        "warning filters": list(warnings.filters),
        "default dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
    }


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = state()
    yield
    assert state() == before


# --- what comes out ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_matmul_runs_in_the_autocast_dtype(device, dtype):
    with dry_run(device, dtype):
        x = square(device)
        assert isinstance(x, FakeTensor) and x.device.type == device
        assert (x @ x).dtype == dtype


def test_cuda_rules_are_not_cpu_rules():
    with dry_run("cuda"):
        assert torch.exp(square("cuda", torch.float16)).dtype == torch.float32
    with dry_run("cpu"):
        assert torch.exp(square("cpu", torch.float16)).dtype == torch.float16


def test_autocast_of_the_other_device_stays_off():
    with dry_run("cuda"):
        assert (square("cpu") @ square("cpu")).dtype == torch.float32
    with dry_run("cpu"):
        assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_disabled(device):
    with dry_run(device, enabled=False):
        x = square(device)
        assert isinstance(x, FakeTensor)
        assert (x @ x).dtype == torch.float32


def test_fp64_is_left_alone():
    with dry_run():
        x = square(dtype=torch.float64)
        assert (x @ x).dtype == torch.float64


def test_no_memory():
    with dry_run():
        x = torch.empty(2**20, 2**20, device="cuda")
        assert (x @ x).shape == x.shape


@pytest.mark.parametrize(
    "move",
    [
        lambda t: t.to("cuda"),
        lambda t: t.to("cuda:0"),
        lambda t: t.cuda(),
        lambda t: t.to(square()),
        lambda t: torch.as_tensor(t, device="cuda"),
        lambda t: square().copy_(t),
        lambda t: t.to(device="cuda", dtype=torch.float16),
    ],
)
def test_moving_to_the_gpu(move):
    with dry_run():
        assert str(move(square("cpu")).device) == "cuda:0"


def test_operations_that_need_a_device_guard():
    with dry_run():
        x = torch.empty(2, 3, 8, 8, device="cuda")
        assert x[0].shape == (3, 8, 8)
        assert x.cpu().device.type == "cpu"
        assert F.batch_norm(x, None, None, training=True).device.type == "cuda"


@pytest.mark.parametrize("rnn", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(rnn):
    with dry_run() as dry:
        out, _ = dry.to_device(rnn(8, 16, bidirectional=True))(torch.empty(5, 2, 8, device="cuda"))
        assert out.dtype == torch.float16
        assert out.shape == (5, 2, 32)


def test_fused_gru_cell_gives_state_and_workspace():
    """Shapes of `_thnn_fused_gru_cell` in aten/src/ATen/native/cuda/RNN.cu: five times the state."""
    with dry_run():
        gates, state = torch.empty(3, 24, device="cuda"), torch.empty(3, 8, device="cuda")
        new, workspace = torch.ops.aten._thnn_fused_gru_cell(gates, gates, state)
    assert new.shape == state.shape and workspace.shape == (3, 5 * 8)


# --- torch.autocast inside ---------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_fp32_island():
    with dry_run():
        x = square()
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype == torch.float32
            with torch.autocast("cuda"):
                assert (x @ x).dtype == torch.float16
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.float16
        with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16):
            assert (x @ x).dtype == torch.bfloat16
        assert (x @ x).dtype == torch.float16


@pytest.mark.filterwarnings("error")
def test_autocast_switches_on_in_a_disabled_dry_run():
    with dry_run(enabled=False):
        x = square()
        with torch.autocast("cuda"):
            assert (x @ x).dtype == torch.float16
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (x @ x).dtype == torch.bfloat16


@pytest.mark.filterwarnings("error")
def test_autocast_as_a_decorator():
    with dry_run(enabled=False):

        @torch.autocast("cuda")
        def forward(x):
            return x @ x

        assert forward(square()).dtype == torch.float16


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "cast_inputs, expected", [(torch.float32, torch.float32), (None, torch.float16)]
)
def test_custom_fwd(cast_inputs, expected):
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=cast_inputs)
        def forward(ctx, a, b):
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            return grad, grad

    with dry_run():
        x = square(dtype=torch.float16).requires_grad_()
        assert Product.apply(x, x).dtype == expected


def test_dry_runs_nest():
    with dry_run() as outer:
        x = square()
        with dry_run(dtype=torch.bfloat16) as inner:
            assert inner.mode is outer.mode
            assert (x @ x).dtype == torch.bfloat16
            with dry_run(enabled=False):
                assert (x @ x).dtype == torch.float32
            assert x.cpu().to("cuda").device.type == "cuda"
        with dry_run("cpu", torch.bfloat16):
            assert (square("cpu") @ square("cpu")).dtype == torch.bfloat16
            assert (x @ x).dtype == torch.float16
        assert (x @ x).dtype == torch.float16
        with torch.autocast("cuda", torch.bfloat16):
            assert (x @ x).dtype == torch.bfloat16


def test_dry_run_in_a_fake_mode_of_your_own():
    with FakeTensorMode() as mode:
        with dry_run() as dry:
            assert dry.mode is mode
            assert (square() @ square()).dtype == torch.float16
        assert isinstance(square("cpu"), FakeTensor)


# --- to_device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_to_device_keeps_what_a_tensor_looks_like(device):
    originals = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(3, 1).expand(3, 5),
        torch.arange(4),
        torch.randn(3, dtype=torch.float64, requires_grad=True),
        torch.empty(2**20, 2**20, device="meta"),
        nn.Parameter(torch.randn(3), requires_grad=False),
    ]
    with dry_run(device) as dry:
        for real in originals:
            fake = dry.to_device(real)
            assert isinstance(fake, FakeTensor) and fake.device.type == device
            assert not isinstance(real, FakeTensor)
            for what in ("shape", "dtype", "requires_grad", "is_leaf"):
                assert getattr(fake, what) == getattr(real, what)
            assert fake.stride() == real.stride()
            assert isinstance(fake, nn.Parameter) == isinstance(real, nn.Parameter)


def test_to_device_goes_through_containers():
    x = torch.ones(2)
    with dry_run() as dry:
        out = dry.to_device({"x": x, "rest": [(x, 3), None, "text"]})
        assert out["x"].device.type == out["rest"][0][0].device.type == "cuda"
        assert out["rest"][0][1] == 3 and out["rest"][1:] == [None, "text"]


def test_to_device_dtype_casts_what_autocast_would():
    with dry_run() as dry:
        for before, after in [
            (torch.float32, torch.bfloat16),
            (torch.float16, torch.bfloat16),
            (torch.float64, torch.float64),
            (torch.int64, torch.int64),
        ]:
            assert dry.to_device(torch.ones(2, dtype=before), torch.bfloat16).dtype == after


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.norm(self.decode(self.encode(x)))


def test_to_device_leaves_a_module_untouched():
    model = Tied()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with dry_run() as dry:
        copy = dry.to_device(model)
        assert copy.encode.weight is copy.decode.weight
        assert copy(square()).dtype == torch.float16
        assert copy.norm.running_mean.device.type == "cuda"
    assert model.calls == 0 and copy.calls == 1
    for name, tensor in model.state_dict().items():
        assert not isinstance(tensor, FakeTensor)
        assert torch.equal(tensor, before[name])
    assert model(torch.randn(8, 4)).dtype == torch.float32


def test_to_device_takes_a_model_larger_than_memory():
    model = nn.Linear(2**20, 2**20, device="meta")
    with dry_run() as dry:
        assert dry.to_device(model)(torch.empty(1, 2**20, device="cuda")).dtype == torch.float16


def test_real_tensors_mix_in():
    model = nn.Linear(4, 4)
    with dry_run("cpu"):
        assert model(torch.empty(2, 4)).dtype == torch.float16
    assert not isinstance(model.weight, FakeTensor)
    with dry_run(), pytest.raises(RuntimeError, match="device"):
        model(square())


# --- nothing left behind (see the fixture, too) --------------------------------------------------


def test_all_is_restored_after_an_exception():
    before = state()
    with pytest.raises(KeyError), dry_run(), torch.autocast("cuda", enabled=False), dry_run("cpu"):
        torch.set_autocast_cache_enabled(False)
        raise KeyError
    assert state() == before


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_state_inside_an_outer_autocast_comes_back(device):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        before = state()
        with dry_run(device):
            torch.set_autocast_dtype(device, torch.bfloat16)
        assert state() == before


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(device_type="tpu"), "'tpu'.*'cuda' and 'cpu'"),
        (dict(dtype=torch.float32), "float32.*float16 or torch.bfloat16"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message), dry_run(**arguments):
        pass


def test_cached_casts_do_not_cross_the_border():
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)  # the BF16 copy of the weight is cached now
        with dry_run("cpu", torch.float16):
            assert layer(torch.empty(2, 4)).dtype == torch.float16
        after = layer(x)
        assert after.dtype == torch.bfloat16 and not isinstance(after, FakeTensor)


def test_nothing_is_kept_alive():
    with dry_run() as dry:
        layer = dry.to_device(nn.Linear(4, 4))
        out = layer(square())
        watched = [weakref.ref(thing) for thing in (dry.mode, layer.weight, out)]
    del dry, layer, out
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


def test_random_state_is_not_used():
    before = torch.get_rng_state()
    with dry_run() as dry:
        dry.to_device(nn.Linear(4, 4, device="meta"))
        F.dropout(torch.randn(8, device="cuda")), torch.rand(8)
        nn.Linear(4, 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_errors_are_raised_and_not_logged_twice(caplog):
    with dry_run(enabled=False), pytest.raises(RuntimeError):
        torch.bmm(torch.empty(1, 2, 2, device="cuda"), torch.empty(1, 3, 3, device="cuda"))
    assert not caplog.records


@pytest.mark.parametrize("needs_values", [lambda x: x.sum().item(), lambda x: x[x > 0], bool])
def test_what_needs_values_raises(needs_values):
    with dry_run(), pytest.raises(RuntimeError):
        needs_values(square())


def test_no_kernel_is_run_in_place_of_a_missing_fake_one():
    with dry_run(), pytest.raises(RuntimeError, match="cudnn_convolution"):
        w = torch.empty(4, 4, 3, 3, device="cuda")
        torch.cudnn_convolution(w, w, (1, 1), (1, 1), (1, 1), 1, False, True, True)


# --- threads -----------------------------------------------------------------------------------


def in_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def test_another_thread_is_not_in_the_dry_run():
    supported = torch.cuda.is_bf16_supported()
    with dry_run():
        assert torch.cuda.is_bf16_supported()
        assert in_thread(torch.cuda.is_bf16_supported) == supported
        assert not in_thread(lambda: torch.is_autocast_enabled("cuda"))
        assert not isinstance(in_thread(lambda: torch.empty(2)), FakeTensor)


@without_gpu
def test_autocast_still_warns_in_another_thread():
    def warns():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.autocast("cuda")
        return [str(w.message) for w in caught]

    with dry_run():
        assert "CUDA is not available" in in_thread(warns)[0]
    assert "CUDA is not available" in warns()[0]


def test_dry_runs_in_two_threads_overlap():
    first_is_out, second_is_in = threading.Event(), threading.Event()

    def second():
        with dry_run(dtype=torch.bfloat16):
            second_is_in.set()
            assert first_is_out.wait(30)
            return (square()[0:2] @ square()).dtype

    results = []
    thread = threading.Thread(target=lambda: results.append(second()))
    with dry_run():
        thread.start()
        assert second_is_in.wait(30)
        assert (square() @ square()).dtype == torch.float16
    first_is_out.set()
    thread.join()
    assert results == [torch.bfloat16]


# --- the device guard --------------------------------------------------------------------------


@pytest.mark.skipif(torch.version.cuda is not None, reason="only a CPU build needs the guard")
def test_a_build_without_the_symbols_gets_advice(monkeypatch):
    monkeypatch.setattr("amp_lab.dryrun._GUARDS", "no_such_symbol")
    before = state()
    with pytest.raises(RuntimeError, match="install a CUDA build of PyTorch; it needs no GPU"):
        with dry_run():
            pass
    assert state() == before
    with dry_run("cpu"):
        assert (square("cpu") @ square("cpu")).dtype == torch.float16
