import amp_lab as lab


def test_the_timeline_keeps_the_order_of_the_calls():
    (ax,) = lab.plots.amp_step_timeline().figure.axes
    place = {text.get_text(): text.get_position()[0] for text in ax.texts}
    calls = ["autocast", "backward", "unscale_", "clip", "scaler.step", "update", "scheduler"]
    found = [next(x for text, x in place.items() if call in text) for call in calls]
    assert found == sorted(found)
    assert found[1] < place["true gradients: clip, log, compare"]
    assert place["scaled: hands off"] == min(
        (x for text, x in place.items() if "gradients" in text or "hands off" in text),
        key=lambda x: abs(x - found[1]),
    )
