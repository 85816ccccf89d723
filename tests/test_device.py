import json
import random

import pytest
import torch

import amp_lab as lab
from amp_lab.device import summary


def test_setup_chooses_an_existing_device_and_says_so_in_one_line(capsys):
    device = lab.setup()
    line = capsys.readouterr().out
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert line.startswith(device.type) and line.count("\n") == 1


@pytest.mark.parametrize("seed", [0, 7])
def test_setup_seeds_both_generators(seed, capsys):
    lab.setup(seed)
    drawn = torch.rand(3), random.random()
    assert torch.equal(drawn[0], torch.rand(3, generator=torch.Generator().manual_seed(seed)))
    assert drawn[1] == random.Random(seed).random()


def test_setup_seeds_with_zero_by_default(capsys):
    lab.setup()
    assert torch.initial_seed() == 0
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("seed", ["0", 1.5, None, True])
def test_setup_refuses_what_is_no_seed(seed):
    with pytest.raises(TypeError, match="expected an integer"):
        lab.setup(seed)


def test_capabilities_can_be_stored():
    facts = lab.capabilities()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"] == torch.__version__
    assert facts["cores"] >= 1


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"cpu_bf16": "AMX"}, ["BF16 in hardware (AMX)", "FP16 emulated"]),
        ({"cpu_bf16": None}, ["no BF16 instructions"]),
        ({"cpu_fp16": "AVX512-FP16"}, ["FP16 in hardware"]),
        (
            {"device": "cuda", "gpu": "V", "gpu_memory_gib": 16.0, "gpu_fp16": True},
            ["cuda: V, 16.0 GiB", "Tensor Cores for FP16,"],
        ),
        (
            {"device": "cuda", "gpu": "H", "gpu_fp16": True, "gpu_bf16": True},
            ["Tensor Cores for FP16 and BF16"],
        ),
        ({"device": "cuda", "gpu": "P"}, ["Tensor Cores for no 16-bit format"]),
    ],
)
def test_summary_names_what_is_accelerated(changes, words):
    facts = lab.capabilities() | {
        "device": "cpu",
        "cpu_bf16": None,
        "cpu_fp16": None,
        "gpu_fp16": False,
        "gpu_bf16": False,
    }
    line = summary(facts | changes)
    for word in words:
        assert word in line
