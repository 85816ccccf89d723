"""Exercises of notebook 10, beyond one GPU."""

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import nn

from ..formats import E4M3
from .exercise import Hint, exercise

__all__ = ["accumulate", "all_reduces", "block_scale", "choose_policy", "which_ranks_skip"]

# ---- which ranks skip -----------------------------------------------------------------------------

SETUPS = ("DDP", "FSDP2", "plain shards", "plain shards, ShardedGradScaler")


def ranks_that_skip(setup: str, overflowing: set[int], ranks: int) -> set[int]:
    """The answer. Tested against what `amp_lab.distributed` measures."""
    if setup == "plain shards":
        return set(overflowing)
    return set(range(ranks)) if overflowing else set()


@exercise
def which_ranks_skip(attempt):
    """Check `which_ranks_skip(setup, overflowing, ranks)`: the set of ranks that skip the step."""
    for setup in SETUPS:
        for overflowing, ranks in ((set(), 2), ({1}, 2), ({0, 2}, 4), ({0}, 8)):
            given = attempt(setup, set(overflowing), ranks)
            try:
                answer = set(given)
            except TypeError:
                raise Hint(
                    f"for {setup!r} it returned {given!r}. Return a set of rank numbers, such as "
                    "{0, 1}, or set() if nobody skips."
                ) from None
            if answer == ranks_that_skip(setup, overflowing, ranks):
                continue
            if not overflowing:
                raise Hint(f"{setup}: if nothing overflows, nobody skips: return set().")
            if not answer <= set(range(ranks)):
                raise Hint(f"{setup}: you named {answer}, but {ranks} ranks are numbered from 0.")
            if setup == "DDP":
                raise Hint(
                    "DDP averages the gradients of all ranks before the scaler looks at them. What "
                    "is the average of inf and 3, and who gets it?"
                )
            if setup == "FSDP2":
                raise Hint(
                    "FSDP2's gradients are DTensors: one tensor, spread over the ranks. Asking it "
                    "whether it holds an inf asks all ranks. Look at the first two rows of the table."
                )
            if setup == "plain shards":
                raise Hint(
                    "with plain shards each scaler sees its own piece of the gradients and asks "
                    "nobody: only the ranks whose piece overflows skip. That is the trouble."
                )
            raise Hint(
                "ShardedGradScaler sums found_inf over all ranks before anybody decides: one inf "
                "anywhere, and all skip."
            )
    return "DDP, FSDP2 and ShardedGradScaler skip together; plain shards do not."


# ---- counting all-reduces -------------------------------------------------------------------------


@exercise
def all_reduces(attempt):
    """Check `all_reduces(updates, micro_batches, buckets, no_sync)`: how many all-reduces DDP runs."""
    for updates, micro, buckets in ((1, 4, 1), (10, 8, 1), (3, 5, 7)):
        for no_sync in (False, True):
            answer = attempt(updates, micro, buckets, no_sync)
            right = updates * buckets * (1 if no_sync else micro)
            if answer == right:
                continue
            case = (
                f"{updates} update(s), {micro} micro-batches each, {buckets} bucket(s), "
                f"no_sync={no_sync}"
            )
            if answer == updates * buckets and not no_sync:
                raise Hint(
                    f"{case}: that is the number *with* no_sync. Without it every backward pass talks."
                )
            if answer == updates * micro * buckets and no_sync:
                raise Hint(
                    f"{case}: no_sync keeps all backward passes silent, except the last one."
                )
            if answer == 0 and no_sync:
                raise Hint(
                    f"{case}: no_sync postpones the exchange, it does not abolish it. The last "
                    "micro-batch runs outside of it, and sends the sum of all."
                )
            if answer == updates * buckets * (micro - 1):
                raise Hint(
                    f"{case}: you counted the micro-batches that are silent. Count those that talk."
                )
            if buckets > 1 and answer * buckets == right:
                raise Hint(f"{case}: DDP sends one all-reduce for each bucket of gradients.")
            if updates > 1 and answer * updates == right:
                raise Hint(f"{case}: that is the number for one update.")
            raise Hint(f"{case}: not {answer!r}. Which backward passes talk, and how often each?")
    return "with no_sync one exchange an update, whatever the number of micro-batches."


# ---- accumulation under DDP -----------------------------------------------------------------------


class _Replica(nn.Module):
    """Keeps DDP's rule without a second process: a forward pass arms the exchange.

    `exchanges` counts the backward passes that would have sent gradients, `unsent` those since the
    last exchange. `outputs` holds (examples, dtype) of each forward pass.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.exchanges, self.unsent, self.outputs = 0, 0, []
        self._silent = self._armed = False
        self.linear.bias.register_post_accumulate_grad_hook(self._backward_pass)

    @contextlib.contextmanager
    def no_sync(self):
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def forward(self, x):
        out = self.linear(x)
        self.outputs.append((len(x), out.dtype))
        self._armed = self._armed or not self._silent
        return out

    def _backward_pass(self, bias):
        self.unsent += 1
        if self._armed:
            self.exchanges, self.unsent, self._armed = self.exchanges + 1, 0, False


class _CountingScaler(torch.amp.GradScaler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scaled, self.steps, self.updates = 0, 0, 0

    def scale(self, outputs):
        self.scaled += 1
        return super().scale(outputs)

    def step(self, optimizer, *args, **kwargs):
        self.steps += 1
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None):
        self.updates += 1
        return super().update(new_scale)


@exercise
def accumulate(attempt):
    """Check `accumulate(model, optimizer, scaler, micro_batches)`: one update of a DDP model.

    It is run on a stand-in that keeps DDP's rules, in FP16 on the CPU, whatever this machine has.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x, y = _Replica(), torch.randn(16, 8), torch.randint(3, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = _CountingScaler("cpu", init_scale=1024.0)
    start = model.linear.weight.detach().clone()
    F.cross_entropy(model.linear(x), y).backward()
    right = model.linear.weight.grad.clone()
    optimizer.zero_grad()
    model.unsent = 0
    micro_batches = list(zip(x.chunk(4), y.chunk(4), strict=True))

    error = None
    try:
        attempt(model, optimizer, scaler, micro_batches)
    except AssertionError as caught:  # GradScaler saw no gradients; why, the hints below know
        error = caught

    if not model.outputs:
        raise Hint("the model was not called. Call model(x) for each (x, y) of micro_batches.")
    if {dtype for _, dtype in model.outputs} != {torch.float16}:
        raise Hint("the forward pass did not run in FP16: put it under torch.autocast.")
    if max(examples for examples, _ in model.outputs) > 4:
        raise Hint(
            "you glued the micro-batches together. They are there because one big batch does not "
            "fit into memory: one forward and one backward pass for each."
        )
    if not scaler.scaled:
        raise Hint("the loss was not scaled: scaler.scale(loss).backward().")
    if model.exchanges + model.unsent == 0:
        raise Hint(
            "no gradients at all: scaler.scale(loss) returns a loss, call .backward() on it."
        )
    if not scaler.steps:
        raise Hint(
            "scaler.step(optimizer) is missing after the loop. (optimizer.step() would take the "
            "scaled gradients.)"
        )
    if error:
        raise error
    if scaler.steps > 1 or scaler.updates > 1:
        raise Hint(
            "the optimizer or the scaler moved on within the micro-batches. scaler.step and "
            "scaler.update come once, after the loop: all gradients of a sum need the same scale."
        )
    if not scaler.updates:
        raise Hint("scaler.update() is missing at the end.")
    if model.exchanges == 0:
        raise Hint(
            "no gradients were exchanged: the last micro-batch must run outside of no_sync, or each "
            "rank trains on its own share alone and the replicas drift apart."
        )
    if model.exchanges == 4 and len(model.outputs) == 4:
        raise Hint(
            "all four backward passes exchanged gradients. Put the first three into "
            "model.no_sync(): forward *and* backward, because DDP decides in the forward pass."
        )
    if model.unsent:
        raise Hint(
            "gradients were exchanged, and then more were added that never left the rank. The one "
            "micro-batch outside of no_sync must be the *last*: it sends the sum of all."
        )
    if model.exchanges > 1:
        raise Hint(
            f"{model.exchanges} micro-batches exchanged gradients; only the last one should."
        )
    moved = start - model.linear.weight.detach()
    for wrong, hint in (
        (4 * right, "the update is four times too large: divide each loss by len(micro_batches)."),
        (right / 4, "the update is too small: divide by the number of micro-batches once only."),
    ):
        if torch.allclose(moved, wrong, rtol=0.02, atol=0.002):
            raise Hint(hint)
    if not torch.allclose(moved, right, rtol=0.02, atol=0.002):
        raise Hint(
            "the update differs from that of one big batch. Sum the gradients of all four "
            "micro-batches (zero_grad once, before the loop), each loss divided by four."
        )

    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.any():
            parameter.grad.fill_(math.nan)  # as a skipped step leaves them behind
    before = model.linear.weight.detach().clone()
    attempt(model, optimizer, scaler, micro_batches)
    if torch.equal(model.linear.weight, before):
        raise Hint(
            "in a second call, old gradients were still there; after a skipped step they are inf or "
            "NaN, and every step from then on is skipped. Start with optimizer.zero_grad()."
        )
    return "one exchange, one update, the same as one big batch."


# ---- a policy for FSDP2 ---------------------------------------------------------------------------


@exercise
def choose_policy(attempt):
    """Check `choose_policy()`: a `MixedPrecisionPolicy` for the model described in the notebook."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = attempt()
    if not isinstance(policy, MixedPrecisionPolicy):
        raise Hint(f"return a MixedPrecisionPolicy(...), not {type(policy).__name__}.")
    if policy.param_dtype in (None, torch.float32):
        raise Hint(
            "the layers would compute in FP32: param_dtype is the dtype of the layers' work."
        )
    if policy.param_dtype is torch.float16:
        raise Hint(
            "param_dtype FP16 has a narrow range and would need a gradient scaler; this loop has none."
        )
    if policy.param_dtype is not torch.bfloat16:
        raise Hint(f"param_dtype {policy.param_dtype!r}: layers are to compute in torch.bfloat16.")
    if policy.reduce_dtype is None:
        raise Hint(
            "reduce_dtype left out means param_dtype: the gradients of 512 ranks would be added in "
            "BF16, where small terms vanish beside a large sum."
        )
    if policy.reduce_dtype in (torch.bfloat16, torch.float16):
        raise Hint(
            f"512 gradients added in {policy.reduce_dtype}: the sum loses small terms. Which dtype "
            "has room for them?"
        )
    if policy.reduce_dtype is not torch.float32:
        raise Hint(f"reduce_dtype {policy.reduce_dtype!r}: torch.float32 has room enough.")
    if policy.output_dtype is None:
        raise Hint(
            "output_dtype left out means that the logits leave the model in BF16, and this loop "
            "computes the loss outside of any autocast."
        )
    if policy.output_dtype is not torch.float32:
        raise Hint(
            f"the loss is to be computed in FP32, but the logits leave in {policy.output_dtype!r}."
        )
    if not policy.cast_forward_inputs:
        raise Hint(
            "with cast_forward_inputs=False the FP32 input meets BF16 weights, and the first layer "
            "raises. Leave that one at its default."
        )
    return "layers in BF16, sums over ranks in FP32, logits in FP32."


# ---- the scale of a block -------------------------------------------------------------------------


@exercise
def block_scale(attempt):
    """Check `block_scale(block)`: the shared scale of an MX block of E4M3 numbers, a power of two.

    The smallest with which nothing saturates. Source: Mishra et al., "Recipes for Pre-training LLMs
    with MXFP8", 2025. The other rule, which a hint names: Open Compute Project, "OCP Microscaling
    Formats (MX) Specification", version 1.0, 2023, section 6.3.
    """
    for largest in (1.0, 448.0, 500.0, 3.0, 1e-6, 0.3):
        block = torch.linspace(-largest, largest / 2, 32)
        answer = attempt(block.clone())
        try:
            scale = float(answer)
        except (TypeError, ValueError, RuntimeError):
            raise Hint(f"return one number, not {type(answer).__name__}.") from None
        magnitude = block.abs().max().item()
        exponent = math.floor(math.log2(magnitude))
        right = 2.0 ** math.ceil(math.log2(magnitude / E4M3.max))
        if scale == right:
            continue
        case = f"largest magnitude {largest:g}"
        if not scale > 0 or math.isinf(scale):
            raise Hint(
                f"{case}: a scale of {scale:g} cannot divide. Return the power of two itself, not "
                "its exponent."
            )
        if scale == 1 / right:
            raise Hint(f"{case}: upside down. The block is divided by the scale before rounding.")
        if scale == 2.0**exponent:
            raise Hint(
                f"{case}: that brings the largest element to between 1 and 2. E4M3 reaches to 448: "
                "use its whole range."
            )
        if math.frexp(scale)[0] != 0.5:
            raise Hint(f"{case}: {scale:g} is no power of two, and MX stores only an exponent.")
        if scale == 2.0 ** math.ceil(math.log2(magnitude / 2 / E4M3.max)):
            raise Hint(
                f"{case}: {magnitude:g} / {scale:g} = {magnitude / scale:g} saturates. Is it the "
                "largest *magnitude*, and is the logarithm rounded up?"
            )
        if scale < right:
            raise Hint(
                f"{case}: {magnitude:g} / {scale:g} = {magnitude / scale:g}, and E4M3 ends at 448."
            )
        raise Hint(
            f"{case}: {scale:g} is too large by a factor of {scale / right:g}: with {right:g} the "
            f"largest becomes {magnitude / right:g}, and still fits."
        )
    try:
        zeros = float(attempt(torch.zeros(32)))
    except (ValueError, OverflowError):  # math.log2(0.0)
        zeros = math.nan
    if not math.isfinite(zeros) or zeros <= 0:
        raise Hint(
            "a block of zeros has no logarithm. Any power of two will do as its scale, 1.0 say."
        )
    return "one shared power of two a block, and nothing saturates."
