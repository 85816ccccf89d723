import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_lab as lab


def test_median_ms_measures_milliseconds():
    assert 4.5 < lab.median_ms(lambda: time.sleep(0.005), repeats=5, warmup=0) < 50


def test_median_ms_stops_in_time_but_measures_once():
    calls = []
    lab.median_ms(lambda: calls.append(time.sleep(0.02)), repeats=1000, warmup=2, seconds=0.0)
    assert len(calls) == 3


def test_median_ms_is_not_moved_by_an_outlier():
    durations = iter([0.001, 0.001, 0.2, 0.001, 0.001])
    assert lab.median_ms(lambda: time.sleep(next(durations)), repeats=5, warmup=0) < 50


@pytest.mark.parametrize("arguments", [{"repeats": 0}, {"warmup": -1}])
def test_median_ms_refuses_nonsense(arguments):
    with pytest.raises(ValueError, match="expected repeats >= 1"):
        lab.median_ms(lambda: None, **arguments)


def test_matmul_tflops_counts_two_operations_a_product(monkeypatch):
    from amp_lab import measure

    monkeypatch.setattr(measure, "median_ms", lambda fn, repeats: (fn(), 2.0)[1])
    assert lab.matmul_tflops(100) == pytest.approx(2 * 100**3 / 2e-3 / 1e12)
    assert lab.matmul_tflops(64, torch.bfloat16) == pytest.approx(2 * 64**3 / 2e-3 / 1e12)
    with pytest.raises(ValueError, match="at least 1"):
        lab.matmul_tflops(0)


# ---- bytes ---------------------------------------------------------------------------------------


def two_layers(width=32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, 10))


def test_saved_bytes_by_hand():
    x = torch.randn(16, 32, requires_grad=True)
    saved = lab.saved_bytes(two_layers(), x)
    # the input of each linear layer; ReLU's result is the second one's input: one storage
    assert [(row.layer, row.shape, row.bytes) for row in saved.rows] == [
        ("0", (16, 32), 16 * 32 * 4),
        ("1", (16, 48), 16 * 48 * 4),
    ]
    assert saved.total == 16 * (32 + 48) * 4
    assert saved.by_dtype == {torch.float32: saved.total}
    assert saved.by_layer == {"0": 16 * 32 * 4, "1": 16 * 48 * 4}
    assert saved.weight_copies == 0


def test_saved_bytes_counts_the_16_bit_copies_of_weights():
    saved = lab.saved_bytes(two_layers(), torch.randn(16, 32), dtype=torch.bfloat16)
    # the first layer's weight is needed only for the gradient of the input, which nobody asked for
    assert saved.weight_copies == 48 * 10 * 2
    assert saved.total == 16 * (32 + 48) * 2 + 48 * 10 * 2
    assert set(saved.by_dtype) == {torch.bfloat16}
    both = lab.saved_bytes(
        two_layers(), torch.randn(16, 32, requires_grad=True), dtype=torch.bfloat16
    )
    assert both.weight_copies == (32 * 48 + 48 * 10) * 2


def test_saved_bytes_includes_the_loss():
    labels = torch.randint(10, (16,))
    model, x = two_layers(), torch.randn(16, 32)
    with_loss = lab.saved_bytes(model, x, loss=F.cross_entropy, targets=labels)
    rows = [row for row in with_loss.rows if row.layer == "(loss)"]
    assert sum(row.bytes for row in rows) == 16 * 10 * 4 + 16 * 8 + 4
    assert with_loss.total == lab.saved_bytes(model, x).total + sum(row.bytes for row in rows)


def test_saved_bytes_counts_a_slice_as_a_slice():
    data = torch.randn(1000, 32)
    whole = lab.saved_bytes(two_layers(), data[:16].clone())
    assert lab.saved_bytes(two_layers(), data[:16]).total == whole.total


def test_saved_bytes_counts_a_shared_storage_once():
    class Twice(nn.Module):
        def forward(self, x):
            y = x.exp()  # keeps its result
            return y * y.view(-1).view(x.shape)  # keeps both factors: the same storage

    x = torch.randn(8, 4, requires_grad=True)
    assert lab.saved_bytes(Twice(), x).total == 8 * 4 * 4


def test_saved_bytes_agrees_with_a_count_by_autograd_itself():
    """Without hooks of ours: walk the graph, and add up what its nodes keep."""
    model, x = lab.SmallCNN(), torch.randn(8, 1, 28, 28)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    sizes, nodes, seen = {}, [model(x).grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            tensor = getattr(node, name, None) if name.startswith("_saved_") else None
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    sizes[storage.data_ptr()] = storage.nbytes()
        nodes += [next_node for next_node, _ in node.next_functions]
    assert lab.saved_bytes(model, x).total == sum(sizes.values())


def test_saved_bytes_of_emulated_fp16_equals_bf16():
    model, x = two_layers(), torch.randn(16, 32)
    with lab.tensor_core_emulation():
        half = lab.saved_bytes(model, x, dtype=torch.float16)
    assert half.total == lab.saved_bytes(model, x, dtype=torch.bfloat16).total
    assert set(half.by_dtype) == {torch.float16}


def test_saved_bytes_leaves_no_hook_behind():
    model = two_layers()
    lab.saved_bytes(model, torch.randn(4, 32))
    with pytest.raises(RuntimeError):
        lab.saved_bytes(model, torch.randn(4, 33))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_saved_bytes_prints_a_table():
    text = repr(lab.saved_bytes(two_layers(), torch.randn(16, 32), dtype=torch.bfloat16))
    assert "48 x 10  16-bit copy of a weight" in text
    assert text.splitlines()[-1].split() == ["total", "3,520"]


def test_saved_bytes_refuses_nonsense():
    with pytest.raises(TypeError, match="expected an nn.Module"):
        lab.saved_bytes(torch.relu, torch.randn(3))
    with pytest.raises(ValueError, match="nothing can be kept"):
        lab.saved_bytes(nn.ReLU())


def test_peak_memory_by_hand():
    def work():
        a = torch.zeros(1000, 1000)
        b = torch.zeros(500, 1000)  # the highest point: a and b
        del a
        c = torch.zeros(250, 1000)
        return b, c

    assert lab.peak_memory(work) == 1500 * 1000 * 4


def test_peak_memory_counts_views_and_in_place_operations_once():
    def work():
        a = torch.zeros(1000)
        a.view(10, 100).add_(1)
        return a[:5]

    assert lab.peak_memory(work) == 4000


def test_peak_memory_agrees_with_the_profiler():
    model, x = two_layers(256), torch.randn(512, 256)
    peak = lab.peak_memory(lambda: model(x).sum().backward())
    model.zero_grad()
    with torch.profiler.profile(profile_memory=True) as profile:
        model(x).sum().backward()
    changes, events = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        if event.tag.name == "Allocation":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
        events += event.children
    now = highest = 0
    for _, size in sorted(changes):
        now += size
        highest = max(highest, now)
    assert peak == highest > 0


def test_peak_memory_refuses_other_devices():
    with pytest.raises(ValueError, match="expected a cpu or cuda device"):
        lab.peak_memory(lambda: None, "meta")
