"""Images with captions: tables, tars, texts and classes, and what is made of an image."""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.errors import ConfigError, DataError
from pipeline.readers.captions import Captions, decoded_image
from pipeline.readers.pairs import Pairs
from pipeline.records import Entry, Rejection
from tests.readers.compared import read_twice
from tests.testkit.stubs import program

SIZE = 16


def picture(seed: int, width: int = 24, height: int = 20, kind: str = "PNG") -> bytes:
    rng = np.random.default_rng(seed)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, kind)
    return file.getvalue()


def table(folder: Path, rows: Sequence[Sequence[str]], header: str = "image,caption", name: str = "x.csv") -> Path:
    """Write a table, and a picture for each row that names one of it."""
    for number, row in enumerate(rows):
        if row[0].endswith(".png"):
            (folder / row[0]).write_bytes(picture(number))
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        file.write(header + "\n")
        csv.writer(file, delimiter="\t" if "\t" in header else ",", lineterminator="\n").writerows(rows)
    return folder / name


def read(path: Path, **options: Any) -> list[Entry]:
    return read_twice(Captions(path, size=SIZE, **options))


# ---- tables ----


def test_a_csv_of_paths_and_captions_is_images_and_tokens(tmp_path: Path) -> None:
    first, second = read(table(tmp_path, [("a.png", "a cat"), ("b.png", "two dogs, out")]))
    assert (first.id, second.id, second.origin) == ("a-0", "b-1", "x.csv:3")
    said = dict(Captions(tmp_path / "x.csv", size=SIZE).headers())
    assert said["b-1"] == {"image": str(tmp_path / "b.png"), "caption": "two dogs, out"}
    assert first.arrays["left.image"].shape == (SIZE, SIZE, 3)
    assert first.arrays["left.image"].dtype == np.uint8
    assert first.arrays["right.token"].dtype == np.int32
    assert first.arrays["right.token"][[0, -1]].tolist() == [512, 513]  # no merges: 512 bytes, inside and at ends
    assert len(first.arrays["right.token"]) == 2 + len("acat")


def test_open_clips_columns_are_known_also_where_tabs_part_a_csv(tmp_path: Path) -> None:
    for header, name in (("filepath\ttitle", "x.csv"), ("filepath\ttitle", "x.tsv"), ("filepath,title", "x.csv")):
        (entry,) = read(table(tmp_path, [("a.png", "a cat")], header, name))
        assert entry.id == "a-0", (header, name)


def test_columns_are_named_by_options_and_captions_are_made_of_columns(tmp_path: Path) -> None:
    rows = [("a.png", "Audi", "A4", "train", "p1"), ("b.png", "Fiat", "Uno", "val", "p2")]
    path = table(tmp_path, rows, "picture,make,model,part,key")
    said = {"image": "picture", "split": "part", "id": "key"}
    made = read(path, template="a photo of a {make} {model} car", **said)
    assert [(entry.id, entry.split) for entry in made] == [("p1", "train"), ("p2", "val")]
    other = table(tmp_path, [("a.png", "a photo of a Audi A4 car")], "image,caption", "y.csv")
    assert made[0].arrays["right.token"].tolist() == read(other)[0].arrays["right.token"].tolist()


def test_classes_are_numbered_as_they_are_named_and_an_empty_cell_is_unknown(tmp_path: Path) -> None:
    path = table(tmp_path, [("a.png", "x", "dog"), ("b.png", "x", ""), ("c.png", "x", "cow")], "image,caption,kind")
    (tmp_path / "kinds.txt").write_text("cat\ndog\n")
    for classes in (["cat", "dog"], "kinds.txt"):
        dog, nothing, cow = read(path, label="kind", classes=classes)
        assert [int(entry.arrays["class"]) for entry in (dog, nothing)] == [1, -1]
        assert isinstance(cow, Rejection)
    with pytest.raises(ConfigError) as caught:
        read(path, label="kind")
    assert caught.value.where == "data.options.classes"


def test_a_longer_text_is_refused_or_cut_before_its_end(tmp_path: Path) -> None:
    path = table(tmp_path, [("a.png", "abcdefgh")])
    (refused,) = read(path, context=6)
    assert isinstance(refused, Rejection)
    (cut,) = read(path, context=6, long="cut")
    assert len(cut.arrays["right.token"]) == 6
    assert cut.arrays["right.token"][-1] == 513


def test_a_column_of_paths_read_as_text_is_refused_with_the_reader_of_images(tmp_path: Path) -> None:
    path = table(tmp_path, [("a.png", "a cat"), ("b.PNG", "")], "filepath,title")
    with pytest.raises(ConfigError) as caught:
        Pairs(path, left="filepath", right="title")
    assert caught.value.where == "data.options.left"
    assert "data.reader=pipeline.readers.captions:Captions" in caught.value.remedy
    texts = table(tmp_path, [("a.png", "x"), ("no path", "y")], "left,right", "texts.csv")
    assert len(list(Pairs(texts).entries())) == 2  # a text may end so


# ---- images ----


def test_the_shorter_side_is_made_to_size_and_the_middle_cut_out() -> None:
    for width, height in ((40, 20), (20, 41), (SIZE, SIZE), (5, 9)):
        stripes = np.zeros((height, width, 3), np.uint8)
        stripes[:, width // 2 :] = 255
        file = io.BytesIO()
        Image.fromarray(stripes).save(file, "PNG")
        pixel_HWC = decoded_image(file.getvalue(), SIZE)
        assert pixel_HWC.shape == (SIZE, SIZE, 3)
        assert (pixel_HWC[:, :6] < 128).all(), (width, height)
        assert (pixel_HWC[:, 10:] > 128).all(), (width, height)


def test_images_of_every_mode_have_three_colours() -> None:
    for mode in ("L", "P", "RGBA", "1", "CMYK", "I;16"):
        file = io.BytesIO()
        Image.new(mode, (20, 30)).save(file, "TIFF")
        assert decoded_image(file.getvalue(), SIZE).shape == (SIZE, SIZE, 3), mode


def test_an_image_is_made_small_in_its_own_mode_as_openai_does_it() -> None:
    """A palette has no colours between two of its own."""
    (image := Image.fromarray(np.random.default_rng(0).integers(2, size=(20, 30), dtype=np.uint8))).putpalette(
        [250, 0, 0, 0, 0, 250]
    )
    image.save(file := io.BytesIO(), "PNG")
    wanted = image.resize((24, 16), Image.Resampling.BICUBIC).crop((4, 0, 20, 16)).convert("RGB")
    assert np.array_equal(decoded_image(file.getvalue(), SIZE), np.asarray(wanted))
    assert set(np.unique(wanted)) == {0, 250}


def test_postscript_under_the_name_of_an_image_is_a_rejection_and_starts_no_ghostscript(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "bin", "gs", f"touch {tmp_path / 'started'}")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # it remembers where it found the program
    path = table(tmp_path, [("cat.jpg", "a cat")])
    (tmp_path / "cat.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n")
    assert [type(entry) for entry in read(path)] == [Rejection]
    assert not (tmp_path / "started").exists()


# ---- tars ----


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            facts = tarfile.TarInfo(name)
            facts.size = len(content)
            file.addfile(facts, io.BytesIO(content))
    return path


def test_webdataset_tars_are_read_one_or_a_folder_of_them(tmp_path: Path) -> None:
    members = {"0.jpg": picture(0, kind="JPEG"), "0.txt": b"a cat", "1.png": picture(1), "1.json": b"{}"}
    members["1.txt"] = b"a dog"
    one = read(tar(tmp_path / "a.tar", members))
    assert [entry.id for entry in one] == ["0", "1"]
    tar(tmp_path / "b.tar", {"0.txt": b"a cow", "0.jpg": picture(2, kind="JPEG")})
    several = read(tmp_path)
    assert [entry.id for entry in several] == ["a-0", "a-1", "b-0"]
    assert several[0].arrays["left.image"].tolist() == one[0].arrays["left.image"].tolist()


def test_what_a_tar_lacks_is_a_rejection_and_a_torn_tar_an_error(tmp_path: Path) -> None:
    path = tar(
        tmp_path / "a.tar",
        {"0.jpg": picture(0), "1.txt": b"x", "2.jpg": b"no", "2.txt": b"x", ".": b"x", "/": b"x"}
        | {"3.jpg": picture(3), "3.txt": b"x"},
    )
    *rejected, found = read(path)
    assert ([type(entry) for entry in rejected], found.id) == ([Rejection] * 5, "3")
    (tmp_path / "b.tar").write_bytes(b"no tar at all")
    with pytest.raises(DataError, match=r"b\.tar"):
        list(Captions(tmp_path / "b.tar", size=SIZE).entries())


def test_an_image_that_went_since_the_scan_is_an_error_that_names_it(tmp_path: Path) -> None:
    reader = Captions(table(tmp_path, [("a.png", "a cat")]), size=SIZE)
    (entry,) = reader.entries()
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.png"):
        reader.read(entry.place)


def test_a_header_without_a_column_is_refused_with_the_option_that_names_one(tmp_path: Path) -> None:
    for header, options in (
        ("picture,caption", {}),
        ("image,words", {}),
        ("image,caption", {"caption": "title"}),
        ("image,caption", {"template": "a {make}"}),
        ("image,image", {"caption": "image"}),
    ):
        with pytest.raises(DataError) as caught:
            Captions(table(tmp_path, [("a.png", "a")], header), **options)
        assert "--set data.options." in caught.value.remedy, header
