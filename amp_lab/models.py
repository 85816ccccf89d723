"""Real small models."""

import torch
import torch.nn.functional as F
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


class CharTransformer(nn.Module):
    """A small GPT: predicts the next character at each position from the characters so far.

    Input: int64 of shape (n, length), with length at most `context`. Output: logits of shape
    (n, length, vocabulary_size). A convolution over the last four characters stands before the blocks
    of attention: it finds syllables at once, which attention alone is slow to learn.

    Source: Radford, Wu, Child, Luan, Amodei, Sutskever, "Language Models are Unsupervised Multitask
    Learners", 2019.
    """

    def __init__(
        self,
        vocabulary_size: int,
        context: int = 64,
        width: int = 96,
        heads: int = 3,
        layers: int = 1,
    ):
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(context, width)
        self.syllables = nn.Conv1d(width, width, kernel_size=4)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary_size)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.characters(characters)
        past = F.pad(x.transpose(1, 2), (3, 0))  # so that no position sees what follows it
        x = x + self.syllables(past).transpose(1, 2)
        x = x + self.positions(torch.arange(characters.shape[1], device=characters.device))
        return self.output(self.norm(self.blocks(x)))

    @torch.inference_mode()
    def write(
        self, start: torch.Tensor, length: int = 300, temperature: float = 0.7
    ) -> torch.Tensor:
        """Continue `start`, int64 of shape (n,), by `length` characters drawn at random.

        Low temperatures make likely characters likelier still. Returns int64 of shape (n + length,).
        """
        text = start
        for _ in range(length):
            logits = self(text[None, -self.context :])[0, -1].float()
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1)
            text = torch.cat([text, drawn])
        return text


class _Block(nn.Module):
    """Causal self-attention, then two linear layers, each added to what came in."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        by_head = self.query_key_value(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = by_head.permute(2, 0, 3, 1, 4)  # each (n, heads, length, width / heads)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))
