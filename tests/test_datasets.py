import hashlib
import re
import shutil

import pytest
import torch

import amp_lab as lab
from amp_lab import datasets


@pytest.fixture(scope="module")
def fashion():
    return lab.fashion_mnist()


@pytest.fixture(scope="module")
def words():
    return lab.shakespeare("words", vocabulary_size=1000)


def test_fashion_mnist_is_stratified_and_normalized(fashion):
    for split, per_class in ((fashion.train, 1000), (fashion.test, 200)):
        images, labels = split.tensors
        assert images.shape == (10 * per_class, 1, 28, 28) and images.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert torch.equal(labels.bincount(), torch.full((10,), per_class))
    images = fashion.train.tensors[0]
    assert abs(images.mean()) < 1e-3 and abs(images.std() - 1) < 1e-3
    assert len(fashion.classes) == 10


def test_no_test_image_is_a_training_image(fashion):
    train, test = (
        {image.numpy().tobytes() for image in split.tensors[0]}
        for split in (fashion.train, fashion.test)
    )
    assert len(train) > 9_900 and len(test) > 1_990
    assert len(train & test) <= 2  # the original itself repeats a few pictures


def test_shakespeare_by_characters():
    corpus = lab.shakespeare()
    assert len(corpus.tokens) == 4_850_416
    assert corpus.vocabulary[:3] == [" ", "e", "t"]
    assert "To be, or not to be,--that is the question:" in corpus.decode(corpus.tokens)
    assert corpus.decode(corpus.encode("Out, damned spot!")) == "Out, damned spot!"
    with pytest.raises(ValueError, match="not in the vocabulary"):
        corpus.encode("\N{SNOWMAN}")


def test_shakespeare_by_words(words):
    assert len(words.vocabulary) == 1000 and words.vocabulary[0] == datasets.UNKNOWN
    assert words.tokens.max() < 1000 and words.tokens.min() == 0
    counts = words.tokens.bincount(minlength=1000)[1:]
    assert torch.all(counts[:-1] >= counts[1:]), "the vocabulary is sorted by falling frequency"
    assert words.encode("To be or not to snowman").tolist()[-1] == 0
    assert words.decode(words.encode("To be")) == "to be"


def test_words_keep_their_apostrophes():
    assert datasets._words("'Tis o'er, Brutus!\n") == ["'", "tis", "o'er", ",", "brutus", "!", "\n"]


@pytest.mark.parametrize("every_position", [False, True])
def test_the_target_is_the_next_token(words, every_position):
    batches = list(words.batches(context=3, size=5, steps=4, seed=1, every_position=every_position))
    again = list(words.batches(context=3, size=5, steps=4, seed=1, every_position=every_position))
    assert len(batches) == 4
    text = words.tokens.tolist()
    for (inputs, targets), (same_inputs, _) in zip(batches, again, strict=True):
        assert torch.equal(inputs, same_inputs)
        assert inputs.shape == (5, 3) and targets.shape == ((5, 3) if every_position else (5,))
        for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
            following = row[1:] + target[-1:] if every_position else row + [target]
            starts = [i for i in range(len(text)) if text[i] == row[0]]
            n = len(following)
            whole = row[:1] + following if every_position else following
            assert any(text[i : i + len(whole)] == whole for i in starts), (row, target, n)
            if every_position:
                assert row[1:] == target[:-1]


def test_batches_pass_once_over_the_data(fashion):
    size = 3000
    seen = torch.cat([images for images, _ in lab.batches(fashion.train, size)])
    assert len(seen) == 9000
    assert len({image.numpy().tobytes() for image in seen}) > 8_900


def test_batches_depend_on_the_seed_alone(fashion):
    first = next(iter(lab.batches(fashion.train, 128)))
    torch.manual_seed(99)
    same = next(iter(lab.batches(fashion.train, 128, steps=1, seed=0)))
    other = next(iter(lab.batches(fashion.train, 128, seed=1)))
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first[1], same[1]) and not torch.equal(first[1], other[1])
    assert torch.equal(first[1], fashion.train.tensors[1][order[:128]])


@pytest.mark.parametrize("steps", [0, 1, 5, 11])
def test_batches_gives_exactly_the_steps_asked_for(fashion, steps):
    assert [len(y) for _, y in lab.batches(fashion.test, 400, steps=steps)] == [400] * steps


@pytest.mark.parametrize("arguments", [{"size": 0}, {"size": 10_001}, {"steps": -1}])
def test_batches_refuses_nonsense(fashion, arguments):
    with pytest.raises(ValueError, match="expected"):
        next(lab.batches(fashion.train, **arguments))


@pytest.mark.parametrize(
    "arguments",
    [{"unit": "sentences"}, {"unit": "words", "vocabulary_size": 1}, {"vocabulary_size": 5}],
)
def test_shakespeare_refuses_nonsense(arguments):
    with pytest.raises(ValueError):
        lab.shakespeare(**arguments)


def test_corpus_batches_refuses_nonsense(words):
    with pytest.raises(ValueError, match="expected context"):
        next(words.batches(context=0, size=1, steps=1))


def test_the_readme_of_the_data_names_the_checksums():
    text = (datasets.DATA / "README.md").read_text()
    for name, checksum in datasets.SHA256.items():
        assert name in text and checksum in text
        assert hashlib.sha256((datasets.DATA / name).read_bytes()).hexdigest() == checksum


def test_a_missing_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "DATA", tmp_path)
    with pytest.raises(FileNotFoundError, match="pip install -e"):
        lab.fashion_mnist()


def test_a_damaged_file_is_named(tmp_path, monkeypatch):
    shutil.copytree(datasets.DATA, tmp_path / "data")
    path = tmp_path / "data" / "shakespeare.txt.xz"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr(datasets, "DATA", tmp_path / "data")
    with pytest.raises(ValueError, match=re.escape("git checkout -- data/shakespeare.txt.xz")):
        lab.shakespeare()
