"""The embeddings of several encoders, joined residue by residue, whatever each is stored in and encodes as one."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.encoder.embedding_recipe import EmbeddingRecipe, Variant
from pipeline.errors import RecordMissing
from pipeline.records import Kind
from pipeline.store.cache_folder import CacheFolder
from pipeline.training.items.residue_embeddings import Embeddings
from tests.training.items.content import ALONE, graph_of, made

FP32 = EmbeddingRecipe(weights="x", layer=1, context="chain", precision="fp32", storage="fp32")
FP16 = replace(FP32, weights="y", precision="fp16", storage="fp16")
BF16 = replace(FP32, weights="z", precision="bf16", storage="bf16", context="partner")
WIDTHS = {FP32: 3, FP16: 4, BF16: 5}
HELD_AS = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}


def embeddings_of(data, *recipes):
    return Embeddings(data.embed_store, *((of, WIDTHS[replace(of, cls=False)]) for of in recipes))


def texts_of(part, recipe):
    sequences = [chain.sequence for chain in part.chains if chain.kind is Kind.PROTEIN]
    return ["".join(sequences)] if recipe.context == "partner" else sequences


def in_full(rows, recipe):
    """The numbers of rows, whatever they are stored in."""
    return (rows.astype(np.uint32) << 16).view(np.float32) if recipe.storage == "bf16" else rows.astype(np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Items of all sorts, each of whose texts has embeddings of every encoder."""
    graphs = [graph_of(0), graph_of(1, ALONE), graph_of(2, rna=True), graph_of(3, atoms=True, rna=True), graph_of(4)]
    data = made(CacheFolder(tmp_path_factory.mktemp("joined") / "cache"), graphs)
    rng, data.rows = np.random.default_rng(7), {}
    with data.embed_store.writer() as writer:
        for recipe, width in WIDTHS.items():
            for text in {text for graph in graphs for part in graph.parts for text in texts_of(part, recipe)}:
                whole = rng.normal(size=(len(text), width)).astype(np.float32)
                rows = (whole.view(np.uint32) >> 16).astype(np.uint16)
                rows = rows if recipe.storage == "bf16" else whole.astype(HELD_AS[recipe.storage])
                data.rows[recipe, text] = rows
                bfloat16 = ("rows",) if recipe.storage == "bf16" else ()
                key = recipe.key(text, Variant(recipe.precision))
                writer.put(key, {"rows": rows}, {"text": text}, bfloat16=bfloat16)
                marked = {"rows": rows, "cls": rows[0]}
                key = replace(recipe, cls=True).key(text, Variant(recipe.precision))
                writer.put(key, marked, {"text": text}, bfloat16=tuple(marked) if bfloat16 else ())
    return data


def wanted(data, part, recipes):
    """What the residues of a partner must have, worked out one by one."""
    rows = [np.concatenate([in_full(data.rows[of, text], of) for text in texts_of(part, of)]) for of in recipes]
    joined = np.concatenate(rows, axis=1)
    return np.stack([joined[row] if row >= 0 else np.zeros(joined.shape[1], np.float32) for row in part.row_R])


@pytest.mark.parametrize("several", [(FP32,), (FP16,), (BF16,), (FP16, BF16), (BF16, FP32, FP16)])
def test_every_residue_has_the_numbers_of_each_encoder_in_the_order_in_which_they_are_named(data, several):
    recipes = list(several)
    for options in ({}, {"collate": lambda items, _rng: items}):
        loader = data.loader([[0, 1], [2, 4], [3]], embeddings=embeddings_of(data, *recipes), **options)
        items = [item for batch in loader for item in (batch if options else batch.items)]
        assert len(items) == 5
        for item in items:
            for part in data.graphs[item.number].parts:
                side = item.sides[part.role.value]
                np.testing.assert_array_equal(side.embedding.float(), wanted(data, part, recipes))
                np.testing.assert_array_equal(side.encoded, part.row_R >= 0)


@pytest.mark.parametrize("several", [(FP32,), (BF16,), (FP16, FP32)])
def test_rows_with_that_of_their_mark_beside_them_are_read_as_others_are(data, several):
    def sides(recipes):
        for batch in data.loader([[0, 1], [2, 4], [3]], embeddings=embeddings_of(data, *recipes)):
            for item in batch.items:
                yield from item.sides.values()

    for plain, marked in zip(sides(several), sides([replace(of, cls=True) for of in several]), strict=True):
        assert marked.embedding.dtype == plain.embedding.dtype
        assert torch.equal(marked.embedding, plain.embedding)


def test_numbers_are_joined_in_a_type_that_holds_them_all(data):
    def dtype(*recipes):
        (batch,) = data.loader([[0]], embeddings=embeddings_of(data, *recipes))
        return batch.items[0].sides["receptor"].embedding.dtype

    assert dtype(FP16, replace(FP16)) is torch.float16
    assert dtype(BF16) is torch.bfloat16
    assert dtype(FP16, BF16) is torch.float32
    assert dtype(FP16, FP32) is torch.float32


def test_a_partner_without_a_protein_has_the_width_of_all_encoders(data):
    graph = graph_of(9, ALONE)
    none = replace(graph.parts[0], chains=())
    none.nodes["row"][:] = -1
    alone = made(CacheFolder(data.root.parent / "alone"), [replace(graph, parts=(none,))])
    (batch,) = alone.loader([[0]], embeddings=embeddings_of(data, FP16, FP32))
    (side,) = batch.items[0].sides.values()
    assert side.embedding.shape == (none.size, 7)
    assert not side.embedding.any()
    assert not side.encoded.any()


def test_what_one_encoder_lacks_is_named_with_its_own_record(data):
    lacking = replace(FP32, weights="never")
    text = texts_of(data.graphs[0].parts[0], lacking)[0]
    key = lacking.key(text, Variant("fp32")).hex()
    with pytest.raises(RecordMissing, match=re.escape(key)):
        list(data.loader([[0]], embeddings=Embeddings(data.embed_store, (FP16, 4), (lacking, 3))))
