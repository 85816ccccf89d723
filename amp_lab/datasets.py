"""Real data, small enough to ship with the course.

Every file is checked against its SHA-256 before it is read. Nothing is downloaded, nothing is
unpickled. `data/README.md` tells where the data come from.
"""

import hashlib
import io
import lzma
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

DATA = Path(__file__).resolve().parent.parent / "data"

SHA256 = {
    "fashion_mnist.npz": "4b57e2a0653ebdb00b1c63bb9e774879a564910b8a8c89e0a62ac4901c4b93de",
    "shakespeare.txt.xz": "249bde109eb8e3f02fbafc9f371b9da98b1d477495f2236353c40bb7bbaea96e",
}

CLASSES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)

UNKNOWN = "<rare>"


class FashionMNIST(NamedTuple):
    """10,000 training and 2,000 test pictures of clothes, ten classes in equal shares."""

    train: TensorDataset
    test: TensorDataset
    classes: tuple[str, ...] = CLASSES


def fashion_mnist(device: torch.device | str = "cpu") -> FashionMNIST:
    """Load the Fashion-MNIST subset onto `device`.

    Each split is a `TensorDataset` of images, float32 of shape (n, 1, 28, 28), shifted and scaled to
    mean 0 and standard deviation 1 over the training images, and of labels, int64 of shape (n,).

    Raises `FileNotFoundError` or `ValueError` if the file is missing or damaged.

    Source: Xiao, Rasul, Vollgraf, "Fashion-MNIST", arXiv 1708.07747, 2017.
    """
    with np.load(io.BytesIO(read_verified("fashion_mnist.npz")), allow_pickle=False) as arrays:
        pixels = {split: torch.from_numpy(arrays[f"{split}_images"]) for split in ("train", "test")}
        labels = {split: torch.from_numpy(arrays[f"{split}_labels"]) for split in ("train", "test")}
    mean = pixels["train"].float().mean()
    std = pixels["train"].float().std()

    def dataset(split):
        images = ((pixels[split].float() - mean) / std).unsqueeze(1)
        return TensorDataset(images.to(device), labels[split].long().to(device))

    return FashionMNIST(dataset("train"), dataset("test"))


class Corpus(NamedTuple):
    """A text as numbers: `tokens`, int64 of shape (n,), index into `vocabulary`."""

    tokens: torch.Tensor
    vocabulary: list[str]
    separator: str

    def encode(self, text: str) -> torch.Tensor:
        """Turn text into token numbers, int64 of shape (n,). Rare words become number 0."""
        number = {token: i for i, token in enumerate(self.vocabulary)}
        parts = _words(text) if self.separator else list(text)
        unknown = [part for part in parts if part not in number]
        if unknown and UNKNOWN not in number:
            raise ValueError(f"encode: {unknown[0]!r} is not in the vocabulary of this corpus")
        return torch.tensor([number.get(part, 0) for part in parts], dtype=torch.int64)

    def decode(self, tokens: torch.Tensor) -> str:
        """Turn token numbers back into text."""
        return self.separator.join(self.vocabulary[i] for i in tokens.tolist())

    def batches(
        self, context: int, size: int, steps: int, seed: int = 0, every_position: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield `steps` random batches (input, target) for predicting the next token.

        The input is int64 of shape (size, context). The target is the token that follows, shape
        (size,), or with `every_position` the token after each position, shape (size, context).
        """
        if context < 1 or size < 1 or steps < 0:
            raise ValueError(
                f"batches: context={context}, size={size}, steps={steps}; "
                "expected context and size of at least 1 and steps of at least 0"
            )
        generator = torch.Generator().manual_seed(seed)
        tokens = self.tokens.cpu()
        offsets = torch.arange(context)
        for _ in range(steps):
            starts = torch.randint(len(tokens) - context, (size, 1), generator=generator)
            inputs = tokens[starts + offsets]
            targets = (
                tokens[starts + offsets + 1]
                if every_position
                else tokens[starts + context].squeeze(1)
            )
            yield inputs.to(self.tokens.device), targets.to(self.tokens.device)


def shakespeare(
    unit: str = "characters",
    vocabulary_size: int | None = None,
    device: torch.device | str = "cpu",
) -> Corpus:
    """Load Shakespeare's 37 plays, cut into "characters" or "words".

    Words are lower case; punctuation marks and line ends are words of their own. The vocabulary is
    sorted by falling frequency; with `vocabulary_size` all but the most frequent words become the
    token "<rare>", number 0.

    Raises `FileNotFoundError` or `ValueError` if the file is missing or damaged.
    """
    text = lzma.decompress(read_verified("shakespeare.txt.xz")).decode("ascii")
    if unit == "characters":
        if vocabulary_size is not None:
            raise ValueError("shakespeare: vocabulary_size goes with unit='words' only")
        parts, separator, first = list(text), "", []
    elif unit == "words":
        parts, separator, first = _words(text), " ", [UNKNOWN]
    else:
        raise ValueError(f"shakespeare: unit is {unit!r}, expected 'characters' or 'words'")
    if vocabulary_size is not None and vocabulary_size < 2:
        raise ValueError(f"shakespeare: vocabulary_size is {vocabulary_size}, expected 2 or more")

    count = Counter(parts)
    kept = sorted(count, key=lambda part: (-count[part], part))
    vocabulary = (first + kept)[:vocabulary_size]
    number = {part: i for i, part in enumerate(vocabulary)}
    tokens = torch.tensor([number.get(part, 0) for part in parts], dtype=torch.int64)
    return Corpus(tokens.to(device), vocabulary, separator)


def batches(
    dataset: TensorDataset, size: int = 128, steps: int | None = None, seed: int = 0
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield random batches of `size` examples: one pass over `dataset`, or exactly `steps` batches.

    The order depends on `seed` alone, so two models can be shown the same batches. A remainder
    smaller than `size` is left for the next pass.
    """
    if not 1 <= size <= len(dataset):
        raise ValueError(
            f"batches: size is {size}, expected 1 to {len(dataset)}, the examples there are"
        )
    if steps is not None and steps < 0:
        raise ValueError(f"batches: steps is {steps}, expected 0 or more")
    generator = torch.Generator().manual_seed(seed)
    left = len(dataset) // size if steps is None else steps
    while left > 0:
        order = torch.randperm(len(dataset), generator=generator).split(size)
        for chosen in order[: min(left, len(dataset) // size)]:
            yield dataset[chosen]
        left -= len(dataset) // size


def read_verified(name: str) -> bytes:
    """Read a file of the data folder and check it against its SHA-256."""
    path = DATA / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{name} is not in the course's data folder ({DATA}). Install the package from a complete "
            "copy of the repository with: pip install -e ."
        )
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256[name]:
        raise ValueError(
            f"{path} is damaged: its SHA-256 is not the one recorded in data/README.md. "
            f"Restore it with: git checkout -- data/{name}"
        )
    return content


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+(?:'[a-z]+)*|\n|[^\sa-z]", text.lower())
