"""Exercises of notebook 00, start here."""

import torch
import torch.nn.functional as F
from torch import nn

from .exercise import Hint, exercise

__all__ = ["amp_step"]


class _Witness(nn.Module):
    """A tiny classifier that notes in which precision it is run."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.outputs, self.autocast_in_backward, self.went_backward = [], False, False
        self.linear.register_forward_hook(self._after_forward)

    def _after_forward(self, module, inputs, output):
        self.outputs.append(output.dtype)
        if output.requires_grad:
            output.register_hook(self._in_backward)

    def _in_backward(self, gradient):
        self.went_backward = True
        self.autocast_in_backward |= torch.is_autocast_enabled("cpu")

    def forward(self, x):
        return self.linear(x)


@exercise
def amp_step(attempt):
    """Check `amp_step(model, optimizer, images, labels)`: one training step under BF16 autocast.

    It must return the loss. It is run on a tiny model on the CPU, whatever this machine has.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _Witness()
        images, labels = torch.randn(16, 8), torch.randint(3, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.linear.weight.detach().clone()

    loss = attempt(model, optimizer, images, labels)

    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise Hint("return the loss, a tensor with one number, as the FP32 step does.")
    if model.linear.weight.dtype is not torch.float32:
        raise Hint(
            "the weights are no longer FP32. Autocast needs no .half() and no .bfloat16(): it casts "
            "copies for each operation and leaves the weights alone."
        )
    if not model.outputs:
        raise Hint("the model was not called.")
    if torch.float16 in model.outputs:
        raise Hint(
            "the forward pass ran in FP16, which needs a GradScaler (notebook 05). Ask for BF16: "
            "dtype=torch.bfloat16."
        )
    if model.outputs[0] is torch.float32:
        raise Hint(
            "the forward pass still ran in FP32. Put it under torch.autocast(...). If you did, look at "
            "the device: on a CPU autocast('cuda') does nothing; images.device.type is always right."
        )
    if loss.dtype is not torch.float32:
        raise Hint(
            "the logits left autocast as BF16, and the loss was computed from them in BF16. Move the "
            "loss into the autocast block, too."
        )
    if not model.went_backward:
        raise Hint("no gradient was computed in your step: is loss.backward() there?")
    if model.autocast_in_backward:
        raise Hint(
            "backward ran inside the autocast block. It needs no autocast: each operation's backward "
            "uses the dtype that its forward pass chose. End the block before loss.backward()."
        )
    if torch.equal(model.linear.weight, before):
        raise Hint("the weights did not change: is optimizer.step() there?")

    weights = model.linear.weight.detach().clone()
    attempt(model, optimizer, torch.zeros_like(images), labels)
    if not torch.equal(model.linear.weight, weights):
        raise Hint(
            "images of zeros moved the weight matrix: gradients of the step before were still there. "
            "Keep optimizer.zero_grad()."
        )
    reference = F.cross_entropy(model(images).float(), labels)
    if not reference < loss:
        raise Hint(
            "the loss did not fall after one step: is the sign or the order of steps changed?"
        )
    return "forward and loss under autocast, backward outside, weights still FP32."
