"""The corpus: botocore's API documentation, as a real TFDS data set of word ids in array_record files."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import absl.logging
import numpy as np
import numpy.typing as npt

from shapebucket.demo.config import DemoConfig
from shapebucket.errors import MissingExtraError
from shapebucket.tables import track

try:
    import botocore
    import tensorflow_datasets as tfds
except ModuleNotFoundError as error:
    raise MissingExtraError(str(error.name), "demo") from error

_TAG = re.compile(r"<[^>]*>")
_WORD = re.compile(r"\w+|[^\w\s]")
_QUICK_DOCUMENTS = 20_000
_UNKNOWN = 1  # 0 is padding


def data_source(config: DemoConfig) -> Any:
    """Returns the corpus as a TFDS data source of `{"tokens": int32 [length]}`; prepares it if it is not there yet."""
    absl.logging.set_verbosity(absl.logging.ERROR)  # it warns of a data set that is not there yet
    builder = _Builder(config)
    if not builder.is_prepared():
        tfds.disable_progress_bar()
        with contextlib.redirect_stdout(io.StringIO()):  # it speaks of downloading
            builder.download_and_prepare()
    return cast(Any, builder).as_data_source(split="train")


def directory(config: DemoConfig) -> Path:
    """Returns where the data set's files are."""
    return Path(str(_Builder(config).data_path))


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # pyright: ignore[reportUntypedBaseClass]
    """Builds the data set. `store_as_tfds_dataset` would do, but needs TensorFlow (TFDS 4.9.10)."""

    VERSION = tfds.core.Version(botocore.__version__)

    def __init__(self, config: DemoConfig) -> None:
        self._config = config
        # TFDS builders that are not classes of their own set this on themselves, as its AdhocBuilder does
        self.name = f"botocore_docs_{'quick' if config.quick else 'full'}_{config.vocabulary}"  # pyright: ignore
        super().__init__(data_dir=config.data_dir, file_format="array_record")

    def _info(self) -> Any:
        tokens = tfds.features.Tensor(shape=(None,), dtype=np.int32)
        return tfds.core.DatasetInfo(
            builder=self,
            description="Documentation strings of the AWS service models in botocore (Apache-2.0), as word ids.",
            features=tfds.features.FeaturesDict({"tokens": tokens}),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager  # nothing to download: the documents are in the package
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Generator[tuple[int, dict[str, npt.NDArray[np.int32]]]]:
        texts = list(documents(_QUICK_DOCUMENTS if self._config.quick else None))
        encoded = _encode(texts, self._config.vocabulary)
        for key, ids in enumerate(track(encoded, "write the data set", total=len(texts))):
            yield key, {"tokens": ids}


def documents(limit: int | None = None) -> Iterator[str]:
    """Yields the distinct documentation strings, tags stripped, in the order of the files."""
    root = Path(botocore.__file__).parent / "data"
    files = sorted(root.glob("*/*/service-2.json*"))
    if not files:
        raise FileNotFoundError(f"botocore {botocore.__version__} has no service models in {root}")
    seen: set[str] = set()
    for file in track(files, "read the corpus"):
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as stream:
            model = json.load(stream)
        for raw in _strings(model):
            text = " ".join(_TAG.sub(" ", raw).split()).lower()
            if text and text not in seen:
                seen.add(text)
                yield text
                if len(seen) == limit:
                    return


def _strings(node: Any) -> Iterator[str]:
    """Yields the values of "documentation" keys."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "documentation" and isinstance(value, str):
                yield value
            else:
                yield from _strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value)


def words_of(text: str) -> list[str]:
    """Splits a document into words and punctuation marks."""
    return _WORD.findall(text)


def _encode(texts: Iterable[str], vocabulary: int) -> Iterator[npt.NDArray[np.int32]]:
    """Yields the word ids of each document: the most frequent words, 1 for every other, 0 for padding."""
    words = [words_of(text) for text in texts]
    frequency = Counter(word for document in words for word in document)
    id_of = {word: number for number, (word, _) in enumerate(frequency.most_common(vocabulary - 2), start=2)}
    for document in words:
        yield np.array([id_of.get(word, _UNKNOWN) for word in document], np.int32)
