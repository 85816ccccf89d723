"""OpQuiz: what a learner can do to it, and what it then shows."""

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

import amp_lab as lab
from amp_lab.canvas import Canvas
from amp_lab.explorers.op_quiz import _explain, _table

P = lab.Policy


@pytest.fixture
def quiz():
    return lab.OpQuiz(["softmax", "mm", "add", "dot", "binary_cross_entropy"])


@pytest.fixture
def undrawn(monkeypatch):
    """For quizzes of many questions: all but the pictures."""
    monkeypatch.setattr(Canvas, "png", lambda canvas: b"")


def shown(quiz):
    return quiz.question.value, quiz.readout.value, quiz.picture.value


def texts(quiz):
    return [text.get_text() for text in quiz.canvas.figure.axes[0].texts]


def test_the_answer_is_hidden_until_there_is_one(quiz):
    assert quiz.op.name == "softmax" and (quiz.score, quiz.asked) == (0, 0)
    assert "softmax" in quiz.question.value and "CUDA autocast (dry run)" in quiz.question.value
    assert "Right" not in quiz.readout.value and "FP32 in" not in quiz.readout.value
    assert texts(quiz)[-3:] == ["?", "?", "?"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_verdicts_are_those_of_pytorchs_own_lists(device, undrawn):
    lists = AutocastTestLists("cpu") if device == "cuda" else AutocastCPUTestLists("cpu")
    known = {}
    for attribute, policy in (
        ("torch_fp16", P.LOWER_PRECISION),
        ("torch_16", P.LOWER_PRECISION),
        ("torch_fp32", P.FP32),
        ("nn_fp32", P.FP32),
        ("torch_need_autocast_promote", P.WIDEST),
    ):
        known |= {entry[0]: policy for entry in getattr(lists, attribute, [])}
    table = {op.name for op in _table(device)}
    names = sorted(table & set(known))
    assert len(names) > 8
    quiz = lab.OpQuiz(names, device_type=device)
    for name in names:
        quiz.buttons[known[name]].click()
        assert quiz.op.name == name and quiz.explanation.startswith("✓ Right")
        quiz.next.click()
    assert quiz.score == quiz.asked == len(names)
    assert quiz.op.name == names[0]  # and over again


def test_buttons_do_what_answer_does(quiz):
    quiz.buttons[P.FP32].click()
    by_button = shown(quiz)
    again = lab.OpQuiz(["softmax"])
    again.answer(P.FP32)
    assert shown(again) == by_button
    assert (quiz.score, quiz.asked) == (1, 1)
    assert "✓" in quiz.readout.value and "FP16 in, FP32 out" in quiz.readout.value
    assert quiz.buttons[P.WIDEST].description == "widest"
    assert quiz.buttons[P.WIDEST].tooltip == P.WIDEST.sentence
    assert not any(button.disabled for button in quiz.buttons.values())


def test_only_the_first_answer_counts(quiz):
    before = quiz.picture.value
    quiz.answer(P.AS_INPUT)
    assert (quiz.score, quiz.asked) == (0, 1)
    assert "✗" in quiz.readout.value and "Not as input, but FP32" in quiz.readout.value
    assert "FP32\n✗ you said: as input" in texts(quiz)
    assert quiz.picture.value != before
    quiz.answer(P.FP32)
    assert (quiz.score, quiz.asked) == (0, 1)
    assert "✓ Right" in quiz.explanation


def test_next_hides_the_answer_again(quiz):
    quiz.answer(P.FP32)
    quiz.next.click()
    assert quiz.op.name == "mm" and texts(quiz)[-3:] == ["?", "?", "?"]
    assert (quiz.score, quiz.asked) == (1, 1)
    quiz.answer(P.LOWER_PRECISION)
    assert texts(quiz)[-3:] == ["FP16", "FP16", "FP16"]
    assert (quiz.score, quiz.asked) == (2, 2)


def test_each_device_answers_for_itself(quiz):
    """The same operation: FP32 under CUDA autocast, as input under CPU autocast, in BF16."""
    quiz.answer(P.FP32)
    quiz.device.value = "cpu"
    assert quiz.op.name == "softmax" and texts(quiz)[-3:] == ["?", "?", "?"]
    assert "CPU autocast" in quiz.question.value and "CUDA" not in quiz.question.value
    assert "FP16" not in str(texts(quiz))
    quiz.answer(P.FP32)
    assert "Not FP32, but as input" in quiz.explanation and "BF16 in, BF16 out" in quiz.explanation
    assert "CUDA" not in quiz.explanation and (quiz.score, quiz.asked) == (1, 2)
    quiz.device.value = "cuda"
    quiz.answer(P.FP32)
    assert "✓" in quiz.explanation and "CPU" not in quiz.explanation


def test_the_picture_follows_the_device_type(quiz):
    on_cuda = quiz.picture.value
    quiz.device.value = "cpu"
    on_cpu = quiz.picture.value
    quiz.canvas.invalidate()
    assert quiz.canvas.png() == on_cpu != on_cuda
    quiz.device.value = "cuda"
    assert quiz.picture.value == on_cuda


def test_mixed_inputs(quiz):
    assert "(one float input)" in texts(quiz)
    for _ in range(3):
        quiz.next.click()
    assert quiz.op.name == "dot" and "FP32 and FP16" in texts(quiz)
    quiz.answer(P.WIDEST)
    assert "mixed in, FP32 out" in quiz.explanation
    assert texts(quiz)[-3:] == ["FP32", "FP16", "FP32"]
    assert "Mixed inputs raise without autocast" in quiz.explanation
    quiz.next.click()
    quiz.answer(P.FP32)
    assert "but banned" in quiz.explanation and "FP32 in, an error" in quiz.explanation


@pytest.mark.parametrize("policy", P)
def test_every_wrong_answer_says_what_would_have_been_seen(policy):
    table = _table("cuda")
    name = "mm" if policy is not P.LOWER_PRECISION else "softmax"
    verdict, facts = _explain(table[name], "CUDA autocast (dry run)", "FP16", policy)
    assert verdict == f"✗ Not {policy}, but {table[name].policy}."
    assert f"For “{policy}”, " in facts


def test_without_names_the_whole_table_is_asked_in_a_repeatable_order(undrawn):
    one, two, other = lab.OpQuiz(), lab.OpQuiz(), lab.OpQuiz(seed=1)
    assert one._order == two._order != other._order
    assert sorted(one._order) == sorted(other._order)
    assert len(one._order) > 100 and {"mean", "softmax", "mm"} <= set(one._order)
    assert not {"exp_", "mm(out=)", "equal"} & set(one._order)
    for _ in one._order:
        one.answer(one.op.policy)
        one.next.click()
    assert one.score == one.asked == len(one._order)


def test_the_static_picture_and_its_text(quiz):
    quiz.answer(P.FP32)
    bundle, metadata = quiz._repr_mimebundle_()
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert bundle["text/plain"] == repr(quiz) == lab.OpQuiz(["mm"]).canvas.alt
    assert metadata["image/png"]["alt"] == repr(quiz)


def test_autocast_is_left_as_it_was(quiz):
    quiz.device.value = "cpu"
    assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")


def test_quizzes_share_what_was_probed(quiz):
    assert lab.OpQuiz(["mm", "softmax"]).op is _table("cuda")["mm"]
    assert list(_table("cuda")) == list(lab.op_table("cuda"))


def test_bad_input(quiz):
    with pytest.raises(ValueError, match="'sofmax', expected names"):
        lab.OpQuiz(["sofmax"])
    with pytest.raises(ValueError, match="ops holds nothing"):
        lab.OpQuiz([])
    with pytest.raises(ValueError, match="'tpu'"):
        lab.OpQuiz(device_type="tpu")
    with pytest.raises(TypeError, match="'FP32', expected one of lab.Policy.LOWER_PRECISION"):
        quiz.answer("FP32")
    assert quiz.asked == 0
