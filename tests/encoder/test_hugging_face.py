"""Models of Hugging Face's library, made small and random here, through our protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.load import read_config
from pipeline.encoder.engine import hugging_face
from pipeline.encoder.engine.encoder_source import OwnSource, as_letters
from pipeline.encoder.engine.hugging_face import HuggingFace, StructureTable
from pipeline.errors import ConfigError, DataError, JobFailed
from pipeline.project.user_code import encoder_code
from pipeline.protocol import has_cls
from tests.encoder.own import drawn, write_project
from tests.testkit.project import settle

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
LETTERS = "ACDEFGHIKLMNPQRSTVWYX"
CPU = torch.device("cpu")
TEXTS = drawn(40, 7, 23)


def prot_t5(folder: Path, **sizes: int) -> Path:
    """Write a model as ProtT5 is: residues are words, and only the end has a mark."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "</s>", "<unk>", *LETTERS]
    plain = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    marks = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **marks).save_pretrained(folder)
    sizes = {"d_model": 24, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 3, **sizes}
    config = transformers.T5Config(vocab_size=len(words), pad_token_id=0, **sizes)
    torch.manual_seed(0)
    transformers.T5EncoderModel(config).save_pretrained(folder)
    return folder


def saprot(folder: Path, **sizes: int) -> Path:
    """Write a model as SaProt is: ESM-2 with a token for each pair of a residue and its structure."""
    folder.mkdir(exist_ok=True)
    pairs = [f"{letter}{structure}" for letter in LETTERS for structure in "acd#"]
    (folder / "vocab.txt").write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", *pairs, "<mask>"]))
    transformers.EsmTokenizer(folder / "vocab.txt").save_pretrained(folder)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes = dict(zip(names, (32, 2, 4, 64), strict=True)) | sizes
    marks = {"pad_token_id": 1, "mask_token_id": len(pairs) + 4, "vocab_size": len(pairs) + 5}
    config = transformers.EsmConfig(**marks, **sizes, position_embedding_type="rotary", token_dropout=True)
    torch.manual_seed(0)
    transformers.EsmModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


KINDS = {"prot_t5": (prot_t5, "{} ", 24, slice(0, -1)), "saprot": (saprot, "{}#", 32, slice(1, -1))}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_their_library_and_pass_the_gate(tmp_path, kind):
    make, residue, width, residues = KINDS[kind]
    encoder = HuggingFace(make(tmp_path / kind), residue=residue)
    assert (encoder.width, encoder.layers) == (width, 2)
    source = OwnSource(kind, encoder, lambda: "")
    verdict = source.compared("fp32", 2, "cpu")[0]
    assert verdict.passed, verdict
    first, last = (source.build(layer=layer, precision="fp32", device=CPU) for layer in (1, 2))
    earlier, later = (forward([forward.tokenize(TEXTS[0])]) for forward in (first, last))
    assert earlier.shape == later.shape == (40, width)
    assert not torch.allclose(earlier, later)
    forward = source.build(layer=2, precision="fp32", device=CPU)
    tokens = [forward.tokenize(text) for text in TEXTS]
    parts = forward(tokens).split([len(text) for text in TEXTS])
    assert has_cls(encoder) == (residues.start == 1)  # ProtT5 has a mark only at the end
    marked = forward(tokens, cls=True).split([len(text) + 1 for text in TEXTS]) if has_cls(encoder) else ()
    assert not marked or source.compared("fp32", 2, "cpu", cls=True)[0].passed

    model: Any = transformers.AutoModel if kind == "saprot" else transformers.T5EncoderModel
    model = model.from_pretrained(tmp_path / kind).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / kind)
    for number, (text, rows_LD) in enumerate(zip(TEXTS, parts, strict=True)):
        coded = tokenizer("".join(residue.format(letter) for letter in text), return_tensors="pt")
        with torch.inference_mode():
            wanted = model(**coded).last_hidden_state[0]
        torch.testing.assert_close(rows_LD, wanted[residues], rtol=0, atol=1e-5)
        if marked:
            torch.testing.assert_close(marked[number][0], wanted[0], rtol=0, atol=1e-5)


def test_a_mark_that_the_tokenizer_does_not_write_is_refused_before_anything_is_submitted(
    tmp_path, pipeline, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    prot_t5(tmp_path / "t5")
    write_project(tmp_path, TEXTS, encoder="pipeline.encoder.engine.hugging_face:HuggingFace", options='residue: "{} "')
    typed = ("plan", "--stage", "embed", "--set", "embed.weights=t5")
    assert pipeline(*typed).code == 0
    refused = pipeline(*typed, "--set", "embed.cls=true")
    assert refused.code == 2
    assert "embed.cls" in refused.err
    (tmp_path / "t5" / "tokenizer.json").write_text("{")
    assert "tokenizer" in pipeline(*typed, "--set", "embed.cls=true").err


def test_residues_without_a_place_or_written_otherwise_than_the_tokenizer_knows_are_refused(tmp_path):
    prot_t5(tmp_path / "t5")
    for residue, text in (("{} ", "ACDB"), ("{} ", "ACDO"), ("{}", "ACD")):
        with pytest.raises(JobFailed):
            HuggingFace(tmp_path / "t5", residue=residue).tokenize(text)
    structures = {"structures": "/data/3di.tsv"}
    for wrong in ({"residue": "#"}, {"residue": "{}", **structures}, {"residue": "{}#", "structures": "3di.tsv"}):
        with pytest.raises(ConfigError):
            HuggingFace(tmp_path, **wrong)


ROWS = ("KVA\tMKVAC\tdacca\t1.0,2.0", "two A\tWWAC\tacdc", "two B\tWWAC\tacda", "low\tgg\tDD")
ENCODER = "pipeline.encoder.engine.hugging_face:HuggingFace"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "3di.tsv"
    path.write_text("\n".join([*ROWS, ""]))
    return path


LETTERS_OF = {
    "MKVAC": "dacca",
    "WWAC": "acd#",  # two chains, which differ at the end
    "KVA": "acc",  # a window
    "AC": "##",  # of several, which differ everywhere
    "GG": "dd",
    "MKVAL": "#####",
}


def test_letters_of_structure_are_those_on_which_all_chains_of_a_sequence_agree(table):
    assert {sequence: StructureTable(table).letters(sequence) for sequence in LETTERS_OF} == LETTERS_OF
    for row in ("name\tMKV", "name\tMKV\tdd", "name\tMK\td#"):
        table.write_text(f"{ROWS[0]}\n{row}\n")
        with pytest.raises(DataError, match="line 2"):
            StructureTable(table)


def test_a_table_of_other_sequences_is_told_of_once(table, caplog):
    others, ours = StructureTable(table), StructureTable(table)
    assert ours.letters("MKVAC") == "dacca"
    for number in range(250):
        sequence = f"{number:b}".translate({ord("0"): "L", ord("1"): "F"})
        assert {*others.letters(sequence), *ours.letters(sequence)} == {"#"}
    assert [str(table) in record.message for record in caplog.records] == [True]


def test_rows_are_those_of_their_library_for_residues_with_their_letters_of_structure(tmp_path, table):
    folder = saprot(tmp_path / "saprot")
    told, untold = (
        OwnSource("saprot", HuggingFace(folder, residue="{}#", structures=path), lambda: "").build(
            layer=2, precision="fp32", device=CPU
        )([as_letters("MKVAC")])
        for path in (str(table), None)
    )
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for rows_LD, text in ((told, "MdKaVcAcCa"), (untold, "M#K#V#A#C#")):
        with torch.inference_mode():
            wanted = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 1:-1]
        torch.testing.assert_close(rows_LD, wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(told, untold, atol=1e-3)


def test_what_the_table_holds_is_in_the_keys_and_where_it_lies_is_not_read_twice(tmp_path, table, monkeypatch):
    settings = [
        f"data.path={tmp_path}", f"cluster.runs={tmp_path}/runs", f"embed.encoder={ENCODER}",
        f"embed.weights={saprot(tmp_path / 'saprot')}", "embed.options.residue='{}#'",
    ]  # fmt: skip

    def digest(*more: str) -> str:
        return encoder_code(read_config(None, [*settings, *more]).config, None).facts.digest

    plain, first = digest(), digest(f"embed.options.structures={table}")
    assert first != plain
    assert digest(f"embed.options.structures={table}") == first
    table.write_text(table.read_text() + "three\tWWW\tccc\n")
    assert digest(f"embed.options.structures={table}") not in (plain, first)
    with pytest.raises(ConfigError):
        digest(f"embed.options.structures={tmp_path}/none.tsv")
    (tmp_path / "runs").mkdir()  # where it is remembered what an encoder is
    settle(tmp_path / "saprot")
    assert [digest(), digest()] == [plain, plain]
    monkeypatch.setattr(hugging_face.metadata, "version", lambda _name: "99.0")
    assert digest() != plain  # the version of their library is in the keys, too
