import torch

import amp_lab as lab


def test_small_cnn():
    model = lab.SmallCNN()
    assert model(torch.randn(5, 1, 28, 28)).shape == (5, 10)
    assert sum(p.numel() for p in model.parameters()) == 421_834
    assert "421,834" in lab.SmallCNN.__doc__


def test_word_lm():
    model = lab.WordLM(vocabulary_size=50, context=3)
    assert model(torch.randint(50, (7, 3))).shape == (7, 50)


def test_char_transformer():
    model = lab.CharTransformer(vocabulary_size=50, context=16, width=24, heads=3, layers=2)
    assert model(torch.randint(50, (7, 16))).shape == (7, 16, 50)
    assert model(torch.randint(50, (7, 5))).shape == (7, 5, 50)


def test_char_transformer_does_not_look_ahead():
    torch.manual_seed(0)
    model = lab.CharTransformer(vocabulary_size=50, context=16, width=24, heads=3)
    text = torch.randint(50, (1, 16))
    changed = text.clone()
    changed[0, 10] = (text[0, 10] + 1) % 50
    before, after = model(text)[0], model(changed)[0]
    assert torch.allclose(before[:10], after[:10], atol=1e-6)
    assert not torch.allclose(before[10:], after[10:], atol=1e-3)


def test_char_transformer_sees_the_whole_context():
    torch.manual_seed(0)
    model = lab.CharTransformer(vocabulary_size=50, context=16, width=24, heads=3)
    text = torch.randint(50, (1, 16))
    changed = text.clone()
    changed[0, 0] = (text[0, 0] + 1) % 50
    assert not torch.equal(model(text)[0, -1], model(changed)[0, -1])


def test_char_transformer_learns_an_alphabet_and_writes_it():
    torch.manual_seed(0)
    model = lab.CharTransformer(vocabulary_size=7, context=8, width=24, heads=3)
    alphabet = torch.arange(200) % 7
    batch = alphabet[:160].view(20, 8), alphabet[1:161].view(20, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(logits, targets):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    for _ in lab.train(model, [batch] * 60, lab.RECIPES["bf16"], optimizer, loss_fn):
        pass
    text = model.write(alphabet[:3], length=30, temperature=0.1)
    assert text.shape == (33,) and torch.equal(text, alphabet[:33])
