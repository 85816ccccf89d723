"""Mixed precision on more than one process: small experiments, and the launcher that starts them.

In a terminal,

    torchrun --standalone --nproc-per-node 2 -m amp_lab.distributed overflow

starts two processes, which run the function `overflow` below together, and prints what each of them
saw. In a notebook, `launch("overflow")` does the same and returns it.

The processes talk over NCCL if there is a GPU for each of them, else over gloo on the CPU.

Source: docs.pytorch.org, "torchrun", "DistributedDataParallel" and "fully_shard".
"""

import argparse
import contextlib
import faulthandler
import hashlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .datasets import batches, fashion_mnist
from .emulation import tensor_core_emulation

# ---- what the experiments share ------------------------------------------------------------------


def network(device: torch.device) -> nn.Module:
    """Make a classifier of Fashion-MNIST pictures, with the same initial weights on each rank."""
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*layers).to(device)


def share(batch: torch.Tensor) -> torch.Tensor:
    """Take this rank's part of a batch: every second element, if there are two ranks."""
    return batch[dist.get_rank() :: dist.get_world_size()]


def checksum(model: nn.Module) -> str:
    """Fingerprint of all weights: equal only if they are equal bit by bit."""
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()[:12]


class Wire(TorchDispatchMode):
    """Context manager: notes each tensor that this process sends to the others.

    `sent` is a list of (operation, dtype, whether all its values were finite).
    """

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            if tensors:  # collectives list their output before their input
                name = func.overloadpacket.__name__.strip("_").removesuffix("_base")
                finite = bool(tensors[-1].isfinite().all())
                self.sent.append((name, str(tensors[-1].dtype), finite))
        return func(*args, **(kwargs or {}))


# ---- the experiments: each runs on all ranks at once and returns what this rank saw ---------------


def overflow(device: torch.device) -> list[dict]:
    """DDP, FP16 and a scaler; in step 2 the gradients of rank 1 overflow, and only those."""
    model = DistributedDataParallel(network(device))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**14)
    history = []
    for step, (images, labels) in enumerate(batches(fashion_mnist(device).train, 128, steps=5)):
        images, labels = share(images), share(labels)
        if step == 2 and dist.get_rank() == 1:
            images = images * 100  # somebody forgot to normalize them
        before, scale = checksum(model), scaler.get_scale()
        optimizer.zero_grad()
        with tensor_core_emulation(), Wire() as wire:
            with torch.autocast(device.type, torch.float16):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
        gradients = [p.grad for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        history.append(
            {
                "loss is finite": bool(loss.isfinite()),
                "sent finite gradients": all(finite for _, _, finite in wire.sent),
                "got finite gradients": all(bool(g.isfinite().all()) for g in gradients),
                "scale": scale,
                "skipped": checksum(model) == before,
                "weights": checksum(model),
            }
        )
    return history


def accumulation(device: torch.device) -> dict[str, dict]:
    """DDP, FP16 and a scaler: one update from four micro-batches, made in four ways.

    The last one leaves the forward pass outside of `no_sync`, a common mistake.
    """
    images, labels = next(batches(fashion_mnist(device).train, 512))
    images, labels = share(images), share(labels)

    def update(parts: int, silent_forward: bool, silent_backward: bool) -> tuple:
        model = DistributedDataParallel(network(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12)
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        micro_batches = list(zip(images.chunk(parts), labels.chunk(parts), strict=True))
        with tensor_core_emulation(), Wire() as wire:
            for i, (x, y) in enumerate(micro_batches):
                last = i == len(micro_batches) - 1
                with _silent(model, silent_forward and not last):
                    with torch.autocast(device.type, torch.float16):
                        loss = F.cross_entropy(model(x), y) / parts
                with _silent(model, silent_backward and not last):
                    scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - start
        return moved, sum(name == "allreduce" for name, _, _ in wire.sent), checksum(model)

    ways = {
        "one big batch": (1, False, False),
        "four, synchronized": (4, False, False),
        "four, no_sync": (4, True, True),
        "four, no_sync around backward only": (4, False, True),
    }
    moved = {name: update(*way) for name, way in ways.items()}
    reference = moved["one big batch"][0]
    return {
        name: {
            "all-reduces": count,
            "relative difference": float((change - reference).norm() / reference.norm()),
            "weights": weights,
        }
        for name, (change, count, weights) in moved.items()
    }


def _silent(model, silent: bool):
    return model.no_sync() if silent else contextlib.nullcontext()


def same_loss(device: torch.device) -> dict[str, list[float]]:
    """Loss of each step, by one process on the whole batch and by all ranks on their shares."""
    data = fashion_mnist(device).train
    fp16, bf16 = torch.float16, torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)

    def replicated():
        return DistributedDataParallel(network(device))

    return {
        "one process, fp32": _losses(network(device), data),
        "DDP, fp32": _losses(replicated(), data, together=True),
        "FSDP2, fp32": _losses(sharded(device, MixedPrecisionPolicy()), data, together=True),
        "one process, fp16 + GradScaler": _losses(network(device), data, fp16),
        "DDP, fp16 + GradScaler": _losses(replicated(), data, fp16, together=True),
        "one process, bf16": _losses(network(device), data, bf16),
        "DDP, bf16": _losses(replicated(), data, bf16, together=True),
        "FSDP2, bf16": _losses(sharded(device, policy), data, together=True),
    }


def sharded(device: torch.device, policy: MixedPrecisionPolicy) -> nn.Module:
    """Split the weights of `network` between the ranks (FSDP2)."""
    model = network(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _losses(model, data, autocast=None, together=False, steps=20) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaling = autocast is torch.float16
    device_type = data.tensors[0].device.type
    scaler = torch.amp.GradScaler(device_type, init_scale=2.0**12, enabled=scaling)
    losses = []
    for images, labels in batches(data, 128, steps):
        if together:
            images, labels = share(images), share(labels)
        optimizer.zero_grad()
        with tensor_core_emulation():
            with torch.autocast(device_type, autocast, enabled=autocast is not None):
                loss = F.cross_entropy(model(images).float(), labels)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss = loss.detach()
        if together:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(float(loss))
    return losses


def policies(device: torch.device) -> dict[str, dict[str, str]]:
    """FSDP2: which dtype is where, under four mixed-precision policies."""
    fp32, bf16 = torch.float32, torch.bfloat16
    cases = {
        "no policy": MixedPrecisionPolicy(),
        "param": MixedPrecisionPolicy(param_dtype=bf16),
        "param, reduce": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32),
        "param, reduce, output": MixedPrecisionPolicy(
            param_dtype=bf16, reduce_dtype=fp32, output_dtype=fp32
        ),
    }
    images, labels = next(batches(fashion_mnist(device).train, 128))
    return {
        name: _dtypes(sharded(device, policy), images, labels) for name, policy in cases.items()
    }


def _dtypes(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> dict[str, str]:
    seen = {}
    layer = model[1]

    def look(layer, inputs):
        seen["input in the layer"] = str(inputs[0].dtype)
        seen["weight in the layer"] = str(layer.weight.dtype)

    layer.register_forward_pre_hook(look)
    with Wire() as wire:
        output = model(images)
        F.cross_entropy(output, labels).backward()
    sent = dict((name, dtype) for name, dtype, _ in wire.sent)
    return {
        "weight, stored": str(layer.weight.dtype),
        "share of the weight": f"{layer.weight.to_local().numel()} of {layer.weight.numel()}",
        "all-gather": sent["allgather"],
        **seen,
        "output of the model": str(output.dtype),
        "reduce-scatter": sent["reduce_scatter"],
        "gradient, stored": str(layer.weight.grad.dtype),
    }


def sharded_scaler(device: torch.device) -> dict[str, list[dict]]:
    """FP16 on weights cut in two; in step 0 the gradients of rank 0's piece overflow.

    One linear layer with eight outputs: a target far off overflows the gradients of the first row
    of the weight, which lies on rank 0. Step 1 is an ordinary one. The weight is cut by FSDP2, whose
    gradients are `DTensor`s, and by hand, with plain tensors.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 16, generator=generator).to(device)

    def by_fsdp2():
        layer = nn.Linear(16, 8, bias=False, device=device)
        layer.weight.data.copy_(weight)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        return fully_shard(layer, mesh=mesh, mp_policy=policy)

    return {
        "FSDP2, GradScaler": _two_steps(by_fsdp2(), torch.amp.GradScaler, device),
        "by hand, GradScaler": _two_steps(ShardedLinear(weight), torch.amp.GradScaler, device),
        "by hand, ShardedGradScaler": _two_steps(ShardedLinear(weight), ShardedGradScaler, device),
    }


class ShardedLinear(nn.Module):
    """What FSDP does, for one linear layer without bias and with FP16 inside.

    Each rank keeps some rows of the weight. Forward: gather all rows, cast. Backward: average the
    gradients of all ranks, keep the own rows.
    """

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        if len(weight) % dist.get_world_size():
            raise ValueError(
                f"ShardedLinear: {len(weight)} rows cannot be cut into {dist.get_world_size()} equal "
                "pieces; start a number of processes that divides them, such as 2"
            )
        self.rows = nn.Parameter(weight.chunk(dist.get_world_size())[dist.get_rank()].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = [torch.empty_like(self.rows) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, self.rows.detach())
        weight = torch.cat(pieces).half().requires_grad_()
        weight.register_post_accumulate_grad_hook(self._reduce)
        return F.linear(x.half(), weight)

    def _reduce(self, weight: torch.Tensor) -> None:
        gradient = weight.grad.float() / dist.get_world_size()
        dist.all_reduce(gradient)
        self.rows.grad = gradient.chunk(dist.get_world_size())[dist.get_rank()]


def _two_steps(layer: nn.Module, scaler_type, device: torch.device) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 16, generator=generator).to(device)
    target = torch.randn(32, 8, generator=generator).to(device)
    far_off = target + 1e5 * (torch.arange(8, device=device) == 0)
    parameters = list(layer.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = scaler_type(device.type, init_scale=1024.0)
    history = []
    for y in (far_off, target):
        before, scale = _piece(parameters[0]).clone().requires_grad_(), scaler.get_scale()
        optimizer.zero_grad()
        with tensor_core_emulation():
            loss = (layer(x).float() - y).square().mean()
            scaler.scale(loss).backward()
        finite = bool(_piece(parameters[0].grad).isfinite().all())
        scaler.step(optimizer)
        scaler.update()

        # The right update in FP32: the same loss, as far as the rows of this rank are concerned.
        own = y.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
        ((F.linear(x, before) - own).square().sum() / y.numel()).backward()
        update = before.detach() - _piece(parameters[0])
        history.append(
            {
                "own gradients are finite": finite,
                "scale": scale,
                "moved": bool(update.any()),
                "update / right update": float((update * before.grad).sum())
                / float(before.grad.square().sum()),
            }
        )
    return history


def _piece(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies on this rank."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def bad_data(device: torch.device) -> float:
    """An experiment that fails: rank 1 reads pictures of the wrong size."""
    side = 30 if dist.get_rank() == 1 else 28
    loss = DistributedDataParallel(network(device))(
        torch.zeros(8, side, side, device=device)
    ).mean()
    loss.backward()
    return float(loss)


EXPERIMENTS = ("overflow", "accumulation", "same_loss", "policies", "sharded_scaler", "bad_data")


# ---- starting them -------------------------------------------------------------------------------


def launch(experiment: str, processes: int = 2, seconds: float = 60) -> list:
    """Run an experiment on several processes by torchrun; return what each rank's function returned.

    `experiment` is one of `EXPERIMENTS`, or "module:function" for a function of your own in a file
    `module.py` beside the notebook: it takes the rank's `torch.device`, runs on every rank at once,
    and returns what JSON can hold. Item r of the result comes from rank r.

    After `seconds`, or when you interrupt, all processes are ended. If this process is gone, the
    others notice, and end themselves.

    Raises `RuntimeError` with the rank, the error and the end of its traceback if a rank fails, and
    `TimeoutError`, saying what each rank was doing, if time runs out.
    """
    if experiment not in EXPERIMENTS and not (isinstance(experiment, str) and ":" in experiment):
        raise ValueError(
            f"launch: there is no experiment {experiment!r}; choose from {', '.join(EXPERIMENTS)},"
            " or give your own as 'module:function'"
        )
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ValueError(f"launch: processes is {processes!r}, expected 1 or more, such as 2")
    if not seconds > 0:
        raise ValueError(f"launch: seconds is {seconds!r}, expected more than 0, such as 60")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(processes)]
        command += ["-m", "amp_lab.distributed", experiment]
        command += ["--results", name]
        with open(folder / "log", "w") as log:
            torchrun = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # see _end_with_the_launcher
                stdout=log,
                stderr=log,
                env=os.environ | _environment(),
                start_new_session=True,  # so that Ctrl-C reaches us alone, and we end it in order
            )
            try:
                torchrun.wait(seconds)
                timed_out = False
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                _end(torchrun)
        if timed_out:
            raise TimeoutError(_what_hangs(folder, experiment, processes, seconds))
        if torchrun.returncode != 0:
            raise RuntimeError(_what_failed(folder, experiment, processes))
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def _environment() -> dict[str, str]:
    """One thread a process, and no word to any other machine."""
    settings = {"OMP_NUM_THREADS": "1"}
    if "lo" in (name for _, name in socket.if_nameindex()):
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    return settings


def _end(torchrun: subprocess.Popen) -> None:
    """End torchrun, which ends its workers first: by SIGTERM, and after 30 s by SIGKILL."""
    try:
        if torchrun.poll() is None:
            torchrun.terminate()
            torchrun.wait(40)
    finally:
        torchrun.kill()
        torchrun.wait()
        torchrun.stdin.close()


def _what_failed(folder: Path, experiment: str, processes: int) -> str:
    """Name the error that came first: the others mostly report that a neighbor is gone."""
    errors = [json.loads(path.read_text()) for path in folder.glob("*.error")]
    silent = [rank for rank in range(processes) if _died_silently(folder, rank)]
    if errors and not silent:
        first = min(errors, key=lambda error: error["time"])
        return f"{experiment}, rank {first['rank']}: {first['error']}\n{first['traceback']}"
    who = f"rank {silent[0]}" if silent else "a process"
    log = (folder / "log").read_text().splitlines()
    return "\n".join(
        [f"{experiment}, {who} ended without an error of its own. The end of the log:", *log[-60:]]
    )


def _died_silently(folder: Path, rank: int) -> bool:
    """Killed or crashed: torchrun's own signal would have left a stack, an exception an error."""
    stack = folder / f"{rank}.stack"
    spoke = any((folder / f"{rank}{ending}").exists() for ending in (".json", ".error"))
    return stack.exists() and stack.stat().st_size == 0 and not spoke


def _what_hangs(folder: Path, experiment: str, processes: int, seconds: float) -> str:
    lines = [f"{experiment} took longer than {seconds:g} s; all its processes were ended"]
    for rank in range(processes):
        stack = folder / f"{rank}.stack"
        if (folder / f"{rank}.json").exists():
            lines.append(f"rank {rank} was done")
        elif stack.exists() and stack.stat().st_size:
            lines.append(f"rank {rank} was at, innermost first:")
            lines += stack.read_text().splitlines()[1:7]
        else:
            lines.append(f"rank {rank} had not started")
    return "\n".join(lines)


# ---- the script that torchrun starts, once a rank ------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun ... -m amp_lab.distributed")
    parser.add_argument("experiment", help=f"{', '.join(EXPERIMENTS)}, or module:function")
    parser.add_argument("--results", type=Path, help="folder for RANK.json; default: print")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])

    if options.results:
        threading.Thread(target=_end_with_the_launcher, daemon=True).start()
        if hasattr(faulthandler, "register"):
            stack = open(options.results / f"{rank}.stack", "w")
            faulthandler.register(signal.SIGTERM, file=stack, all_threads=False, chain=True)
    try:
        result = json.dumps(_run(options.experiment), indent=2)
    except Exception as error:
        if options.results:
            _write(options.results / f"{rank}.error", json.dumps(_report(rank, error)))
        raise
    if options.results:
        _write(options.results / f"{rank}.json", result)
    else:
        print(f"rank {rank}: {result}", flush=True)
    # A gloo thread may still hold a tensor when Python shuts down, and then abort the process.
    # Source: github.com/pytorch/pytorch/pull/179291.
    os._exit(0)


def _end_with_the_launcher() -> None:
    """Wait until the process that called `launch` closes our stdin, or dies, which closes it, too."""
    os.read(0, 1)
    os._exit(1)


def _run(experiment: str):
    """Find the experiment, join the other ranks, and run it."""
    module = "" if ":" in experiment else f"{__spec__.name}:"
    function = pkgutil.resolve_name(module + experiment)
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    result = function(device)
    dist.destroy_process_group()
    return result


def _report(rank: int, error: Exception) -> dict:
    """What went wrong, and where; frames inside PyTorch say little to a reader and are left out."""
    frames = traceback.extract_tb(error.__traceback__)[2:]  # without main and _run
    library = str(Path(torch.__file__).parent)
    frames = [frame for frame in frames if not frame.filename.startswith(library)][-3:]
    return {
        "rank": rank,
        "time": time.time(),
        "error": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": "".join(traceback.format_list(frames)).rstrip(),
    }


def _write(path: Path, text: str) -> None:
    """Write whole or not at all: a reader never sees half a file."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


if __name__ == "__main__":
    main()
