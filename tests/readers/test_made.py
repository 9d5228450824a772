"""Made data: the same for the same seed, in every format, and with something to learn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipeline.readers import made
from pipeline.readers.captions import Captions
from pipeline.readers.spectra import Spectra

KINDS = [
    (made.spectra, ".mgf"),
    (made.molecules, ".mgf"),
    *((make, suffix) for make in (made.sequences, made.captions) for suffix in (".csv", ".tsv")),
]


def test_the_same_seed_makes_the_same_bytes_and_another_others(tmp_path: Path) -> None:
    for make, suffix in KINDS:
        contents = []
        for number, seed in enumerate((1, 1, 2)):
            path = tmp_path / f"{make.__name__}{number}{suffix}"
            make(path, 12, seed)
            contents.append(path.read_bytes())
        assert contents[0] == contents[1] != contents[2], path


def test_made_captions_say_what_their_pictures_show_in_a_token_a_word(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    made.captions(path, 20, seed=3)
    reader = Captions(path, label="class", classes="classes.txt", merges="merges.txt", size=made.SIDE)
    for entry in reader.entries():
        assert len(entry.arrays["right.token"]) == 2 + len(["a", "red", "disc", "left", "of", "a", "blue", "ring"])
        colour, _ = made.CLASSES[int(entry.arrays["class"])].split()
        left_HWC = entry.arrays["left.image"][:, : made.SIDE // 2]
        assert 40 < (left_HWC == made.COLOURS[colour]).all(-1).sum() < left_HWC[..., 0].size / 2


def test_the_command_writes_a_file_and_says_so(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pipeline.readers.made", "spectra"]
    done = subprocess.run(
        [*words, str(tmp_path / "x.mgf"), "--count", "3", "--seed", "1"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'x.mgf'}: 3 spectra\n"), done.stderr
    assert len(list(Spectra(tmp_path / "x.mgf").entries())) == 3
