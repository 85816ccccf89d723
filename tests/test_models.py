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
