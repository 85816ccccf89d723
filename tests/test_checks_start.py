import pytest
import torch
import torch.nn.functional as F

import amp_lab as lab


def autocast(images, dtype=torch.bfloat16):
    return torch.autocast(device_type=images.device.type, dtype=dtype)


def solution(model, optimizer, images, labels):
    optimizer.zero_grad()
    with autocast(images):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss


def another_solution(model, optimizer, images, labels):
    with torch.amp.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return loss.detach()


def a_third_solution(model, optimizer, images, labels):
    optimizer.zero_grad(set_to_none=True)
    with autocast(images):
        logits = model(images)
    loss = F.cross_entropy(logits.float(), labels)
    loss.backward()
    optimizer.step()
    return loss


def stub(model, optimizer, images, labels):
    raise NotImplementedError


def fp32(model, optimizer, images, labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def fp16(model, optimizer, images, labels):
    optimizer.zero_grad()
    with autocast(images, torch.float16):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def loss_outside(model, optimizer, images, labels):
    optimizer.zero_grad()
    with autocast(images):
        logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss


def all_inside(model, optimizer, images, labels):
    with autocast(images):
        return fp32(model, optimizer, images, labels)


def no_return(model, optimizer, images, labels):
    solution(model, optimizer, images, labels)


def a_number(model, optimizer, images, labels):
    return solution(model, optimizer, images, labels).item()


def converted(model, optimizer, images, labels):
    model.bfloat16()
    return fp32(model, optimizer, images.bfloat16(), labels)


def no_backward(model, optimizer, images, labels):
    with autocast(images):
        return F.cross_entropy(model(images), labels)


def no_step(model, optimizer, images, labels):
    optimizer.zero_grad()
    with autocast(images):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return loss


def no_zero_grad(model, optimizer, images, labels):
    with autocast(images):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def wrong_sign(model, optimizer, images, labels):
    optimizer.zero_grad()
    with autocast(images):
        loss = F.cross_entropy(model(images), labels)
    (-loss).backward()
    optimizer.step()
    return loss


def no_model(model, optimizer, images, labels):
    return torch.tensor(1.0)


def broken(model, optimizer, images, labels):
    return undefined_name  # noqa: F821


def broken_at_length(model, optimizer, images, labels):
    raise RuntimeError("CUDA error\n\nto learn more, read\n  two more lines\n")


def verdict(attempt, capsys):
    lab.checks.amp_step(attempt)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize("attempt", [solution, another_solution, a_third_solution])
def test_right_answers_pass(attempt, capsys):
    assert verdict(attempt, capsys).startswith("PASSED   amp_step")


def test_the_stub_is_not_attempted(capsys):
    assert verdict(stub, capsys).startswith("TO DO    amp_step: not attempted yet")


@pytest.mark.parametrize(
    "attempt, hint",
    [
        (fp32, "still ran in FP32"),
        (fp16, "needs a GradScaler"),
        (loss_outside, "Move the loss into the autocast block"),
        (all_inside, "backward ran inside the autocast block"),
        (no_return, "return the loss"),
        (a_number, "return the loss"),
        (converted, "the weights are no longer FP32"),
        (no_backward, "is loss.backward() there"),
        (no_step, "is optimizer.step() there"),
        (no_zero_grad, "Keep optimizer.zero_grad()"),
        (wrong_sign, "the loss did not fall"),
        (no_model, "the model was not called"),
        (broken_at_length, "RuntimeError: CUDA error to learn more, read two more lines\n"),
        (broken, "your code raised NameError: name 'undefined_name' is not defined"),
    ],
)
def test_each_mistake_has_its_own_hint(attempt, hint, capsys):
    line = verdict(attempt, capsys)
    assert line.startswith("NOT YET  amp_step") and hint in line


def test_the_check_wants_the_function_itself():
    with pytest.raises(TypeError, match=r"checks.amp_step\(my_function\)"):
        lab.checks.amp_step(3)


def test_the_random_state_is_left_alone(capsys):
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    lab.checks.amp_step(solution)
    assert torch.equal(torch.rand(2), expected)
