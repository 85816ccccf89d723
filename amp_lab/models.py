"""Real small models."""

import torch
from torch import nn


class SmallCNN(nn.Module):
    """Two convolutions and two linear layers for 28 x 28 gray pictures, 421,834 parameters.

    Input: float of shape (n, 1, 28, 28). Output: logits of shape (n, 10).
    """

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


class WordLM(nn.Module):
    """Predict the next word from the words before it: embedding, one hidden layer, logits.

    Input: int64 of shape (n, context). Output: logits of shape (n, vocabulary_size).

    Source: Bengio, Ducharme, Vincent, Jauvin, "A Neural Probabilistic Language Model", JMLR 3, 2003.
    """

    def __init__(
        self, vocabulary_size: int, context: int = 2, embedding: int = 32, hidden: int = 64
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding)
        self.hidden = nn.Linear(context * embedding, hidden)
        self.output = nn.Linear(hidden, vocabulary_size)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.output(self.hidden(self.embedding(words).flatten(1)).relu())
