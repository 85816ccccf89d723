"""Each check of notebook 08 passes right answers and names the particular mistake in wrong ones."""

import pytest
import torch
import torch.nn.functional as F
from answers import verdict

# ---- search --------------------------------------------------------------------------------------


def scores_of(model, queries, documents):
    q, d = model.query(queries), model.document(documents)
    return q @ d.T / q.shape[-1] ** 0.5


def no_block(model, queries, documents):
    weights = scores_of(model, queries, documents).softmax(-1)
    return model.rerank(weights @ documents)


def small_block(model, queries, documents):
    scores = scores_of(model, queries, documents)
    with torch.autocast(scores.device.type, enabled=False):
        weights = torch.softmax(scores.float(), dim=-1)
    return model.rerank(weights @ documents)


def the_island(model, queries, documents):
    q, d = model.query(queries), model.document(documents)
    with torch.autocast("cuda", enabled=False):
        scores = q.float() @ d.float().T / q.shape[-1] ** 0.5
        found = scores.softmax(-1) @ documents
    return model.rerank(found)


def half_an_island(model, queries, documents):
    scores = scores_of(model, queries, documents)
    with torch.autocast("cuda", enabled=False):
        found = scores.float().softmax(-1) @ documents
    return model.rerank(found)


def no_float(model, queries, documents):
    q, d = model.query(queries), model.document(documents)
    with torch.autocast("cuda", enabled=False):
        found = (q @ d.T / q.shape[-1] ** 0.5).softmax(-1) @ documents
    return model.rerank(found)


def softmax_in_16_bits(model, queries, documents):
    scores = scores_of(model, queries, documents)
    with torch.autocast("cuda", enabled=False):
        weights = scores.softmax(-1)
    return model.rerank(weights @ documents)


def half_everywhere(model, queries, documents):
    return no_block(model.half(), queries.half(), documents.half())


def half_activations(model, queries, documents):
    return model.rerank(scores_of(model, queries, documents).softmax(-1).half() @ documents)


def half_result(model, queries, documents):
    return no_block(model, queries, documents).half()


def double(model, queries, documents):
    scores = model.query(queries).double() @ model.document(documents).double().T
    weights = (scores / queries.shape[-1] ** 0.5).softmax(-1).float()
    return model.rerank(weights @ documents)


def forgotten_scale(model, queries, documents):
    q, d = model.query(queries), model.document(documents)
    return model.rerank((q @ d.T).softmax(-1) @ documents)


# ---- rating_loss ---------------------------------------------------------------------------------


def with_logits(model, x, liked):
    return F.binary_cross_entropy_with_logits(model.score(x).squeeze(-1), liked)


def log_sigmoid(model, x, liked):
    logits = model.score(x).squeeze(-1).float()
    return -(liked * F.logsigmoid(logits) + (1 - liked) * F.logsigmoid(-logits)).mean()


def logits_cast_up(model, x, liked):
    logits = model.score(x).squeeze(-1)
    with torch.autocast(x.device.type, enabled=False):
        return F.binary_cross_entropy(logits.float().sigmoid(), liked)


def banned(model, x, liked):
    return F.binary_cross_entropy(model(x), liked)


def banned_with_float(model, x, liked):
    return F.binary_cross_entropy(model(x).float(), liked)


def off_for_the_cpu(model, x, liked):
    with torch.autocast("cpu", enabled=False):
        return F.binary_cross_entropy(model(x).float(), liked)


def all_off(model, x, liked):
    with torch.autocast(x.device.type, enabled=False):
        return F.binary_cross_entropy(model(x), liked)


def probability_cast_up(model, x, liked):
    p = model(x)
    with torch.autocast(x.device.type, enabled=False):
        return F.binary_cross_entropy(p.float(), liked)


def loss_in_half(model, x, liked):
    logits = model.score(x).squeeze(-1)
    return F.binary_cross_entropy_with_logits(logits.half(), liked.half())


def twice_a_sigmoid(model, x, liked):
    return F.binary_cross_entropy_with_logits(model(x), liked)


# ---- project -------------------------------------------------------------------------------------


def cast_if_autocast(model, x):
    x = model.norm(x)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return model.q(x), model.k(x), model.v(x)


def one_product(model, x):
    layers = (model.q, model.k, model.v)
    weight, bias = (torch.cat([getattr(m, n) for m in layers]) for n in ("weight", "bias"))
    return F.linear(model.norm(x), weight, bias).chunk(3, -1)


def three_casts(model, x):
    x = model.norm(x)
    return model.q(x), model.k(x), model.v(x)


def cast_always(model, x):
    x = model.norm(x)
    x = x.to(torch.get_autocast_dtype(x.device.type))
    return model.q(x), model.k(x), model.v(x)


def three_norms(model, x):
    return model.q(model.norm(x)), model.k(model.norm(x)), model.v(model.norm(x))


def one_more_product(model, x):
    x = model.norm(x)
    x = x @ torch.eye(x.shape[-1], device=x.device)
    return model.q(x), model.k(x), model.v(x)


def cast_before(model, x):
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return three_casts(model, x)


def to_half(model, x):
    x = model.norm(x).half()
    return model.q(x), model.k(x), model.v(x)


def to_half_if_autocast(model, x):
    x = model.norm(x)
    if torch.is_autocast_enabled(x.device.type):
        x = x.half()
    return model.q(x), model.k(x), model.v(x)


def cast_results(model, x):
    return tuple(t.half() for t in three_casts(model, x))


def projections_off(model, x):
    x = model.norm(x)
    with torch.autocast(x.device.type, enabled=False):
        return model.q(x), model.k(x), model.v(x)


# ---- to_blame ------------------------------------------------------------------------------------


def excess(row):
    return row.with_autocast - row.without / 2


def to_blame(report):
    return max(report.saved, key=excess).op


def to_blame_sorted(report):
    return sorted(report.saved, key=lambda r: 2 * r.with_autocast - r.without)[-1].op


def most(key):
    return lambda report: max(report.saved, key=key).op


RIGHT = [
    ("search", no_block),
    ("search", small_block),
    ("rating_loss", with_logits),
    ("rating_loss", log_sigmoid),
    ("rating_loss", logits_cast_up),
    ("project", cast_if_autocast),
    ("project", one_product),
    ("to_blame", to_blame),
    ("to_blame", to_blame_sorted),
]


@pytest.mark.parametrize("check, attempt", RIGHT)
def test_right_answers_pass(check, attempt, capsys):
    assert verdict(check, attempt, capsys).startswith(f"PASSED   {check}")


@pytest.mark.parametrize("check", sorted({check for check, _ in RIGHT}))
def test_stubs_are_not_attempted(check, capsys):
    def stub(*arguments):
        raise NotImplementedError

    assert verdict(check, stub, capsys).startswith(f"TO DO    {check}")


WRONG = [
    ("search", lambda m, q, d: None, "return what Search.forward returns"),
    ("search", the_island, "84% of the FLOPs still run in FP32: autocast is off"),
    ("search", half_an_island, "42% of the FLOPs still run in FP32: autocast is off"),
    ("search", no_float, "FP16 meets FP32"),
    ("search", softmax_in_16_bits, "the softmax runs in 16 bits now"),
    ("search", half_everywhere, "weights are no longer FP32"),
    ("search", half_activations, "in plain FP32, it fails"),
    ("search", half_result, "no longer FP32: it holds a cast"),
    ("search", double, "FP64 input"),
    ("search", lambda m, q, d: m(q, d), "84% of the FLOPs still run in FP32: autocast is off"),
    ("search", forgotten_scale, "differs from that of Search"),
    ("search", lambda m, q, d: m.nowhere(q), "your code raised AttributeError"),
    ("rating_loss", banned, "still raises on CUDA"),
    ("rating_loss", banned_with_float, "still raises on CUDA"),
    ("rating_loss", off_for_the_cpu, "for x.device.type"),
    ("rating_loss", all_off, "autocast is off around a matrix product"),
    ("rating_loss", probability_cast_up, "the sigmoid runs in FP16"),
    ("rating_loss", loss_in_half, "the loss is no longer FP32"),
    ("rating_loss", twice_a_sigmoid, "applies a sigmoid of its own"),
    ("rating_loss", lambda m, x, y: with_logits(m, x, y) * len(y), "sum over the batch"),
    ("rating_loss", lambda m, x, y: with_logits(m, x, y).detach(), "no gradient"),
    ("rating_loss", lambda m, x, y: with_logits(m, x, 1 - y), "the loss differs"),
    ("rating_loss", lambda m, x, y: m(x), "one number: the mean"),
    ("project", three_casts, "layer_norm in model.norm is still cast 3 times"),
    ("project", cast_before, "you cast before the norm"),
    ("project", to_half, "in plain FP32, it fails"),
    ("project", cast_always, "cast only where autocast is on"),
    ("project", three_norms, "but the norm is: compute and cast it once"),
    ("project", one_more_product, "more matrix products than q, k and v need"),
    ("project", to_half_if_autocast, "right for FP16, but under BF16"),
    ("project", cast_results, "results are no longer FP32"),
    ("project", projections_off, "autocast is off around a matrix product"),
    ("project", lambda m, x: m.norm(x), "return three tensors"),
    ("project", lambda m, x: (m.q(x), m.k(x), m.v(x)), "differ from those of Projections"),
    ("to_blame", lambda report: report.saved[0], "return its name, row.op"),
    ("to_blame", lambda report: 3, "return an operation's name"),
    ("to_blame", most(lambda r: r.with_autocast), "keeps the most, but it did halve"),
    ("to_blame", most(lambda r: r.without), "but it did halve"),
    ("to_blame", most(lambda r: r.with_autocast - r.without), "merely stays as it was"),
    ("to_blame", most(lambda r: r.with_autocast / max(r.without, 1)), "Subtract, do not divide"),
    ("to_blame", most(lambda r: r.weight_copies), "most weight copies"),
    ("to_blame", most(lambda r: excess(r) - r.weight_copies), "left the weight copies out"),
    ("to_blame", most(lambda r: r.without - r.with_autocast), "saved* the most"),
    ("to_blame", most(lambda r: -excess(r)), "smallest excess"),
    ("to_blame", lambda report: "softmax", "it should be layer_norm, you returned softmax"),
]


@pytest.mark.parametrize("check, attempt, hint", WRONG)
def test_each_typical_mistake_gets_its_own_hint(check, attempt, hint, capsys):
    line = verdict(check, attempt, capsys)
    assert line.startswith(f"NOT YET  {check}"), line
    assert hint.lower() in line.lower(), line
