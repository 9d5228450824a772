"""Images with captions as a task: what a batch is, how images vary, classes told two ways, and what is published."""

from __future__ import annotations

import csv
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.protocol import Publishes, ReadsFiles
from pipeline.tasks.pairs import retrieval
from pipeline.tasks.pairs.pair_towers import cropped
from tests.tasks.cases import model_of
from tests.tasks.items import double
from tests.tasks.pairs.pictures import CLASSED, CLIP, NAMES, SIZE, collated, item, items

VARIED = replace(CLASSED, crop_least=0.5, mirror=True)


# ---- a batch ----


def test_images_cost_the_same_so_that_texts_alone_drive_memory():
    sizes = {"left": np.full(3, SIZE), "right": np.array([5, 9, 40])}
    assert {name: one.tolist() for name, one in CLIP.cost(sizes).items()} == {"right": [5, 9, 24]}
    assert set(replace(CLIP, right="images").cost(sizes)) == {"left"}


# ---- crops and mirrors ----


def test_crops_are_drawn_by_the_item_however_a_step_is_cut():
    values, ids = items(6), [f"p{place}" for place in range(6)]
    whole = collated(values, VARIED, ids).left
    parts = [collated(values[at : at + 2], VARIED, ids[at : at + 2]).left for at in (0, 2, 4)]
    assert torch.equal(whole.crop_B4, torch.cat([part.crop_B4 for part in parts]))
    assert torch.equal(whole.is_mirrored_B, torch.cat([part.is_mirrored_B for part in parts]))
    assert len({tuple(crop) for crop in whole.crop_B4.tolist()}) == 6


def test_images_vary_while_they_are_trained_on_and_never_where_the_model_is_applied():
    batch, model = collated(items(4), VARIED).left, model_of(VARIED, torch.float32)
    plain = model.left.eval().shown(batch)
    assert torch.equal(plain, model.left.shown(batch._replace(crop_B4=None, is_mirrored_B=None)))
    assert (model.left.train().shown(batch) - plain).abs().max() > 0.1


def test_a_crop_is_the_part_that_was_drawn_and_a_mirror_turns_left_and_right():
    picture = torch.arange(64.0).view(1, 1, 8, 8)
    whole, no, yes = torch.tensor([[1.0, 1, 0, 0]]), torch.tensor([False]), torch.tensor([True])
    assert torch.allclose(cropped(picture, whole, no), picture, atol=1e-4)
    assert torch.allclose(cropped(picture, whole, yes), picture.flip(-1), atol=1e-4)
    corner = cropped(picture, torch.tensor([[0.5, 0.5, -0.5, 0.5]]), no)
    assert float(corner.min()) >= 3.5  # of the upper right quarter, whose left column is 4
    assert float(corner.max()) < 36  # where the lower half begins


@pytest.mark.parametrize("least", [0.2, 0.9])
def test_crops_stay_within_the_image_and_keep_as_much_as_is_asked(least):
    batch = collated(items(40), replace(CLIP, crop_least=least)).left
    height_B, width_B, down_B, right_B = batch.crop_B4.unbind(-1)
    assert (height_B <= 1).all()
    assert (down_B.abs() + height_B <= 1 + 1e-6).all()
    assert (right_B.abs() + width_B <= 1 + 1e-6).all()
    assert (height_B * width_B >= 0.85 * least).all()  # where a side would be longer than the image it is cut
    assert not batch.is_mirrored_B.any()


# ---- two losses ----


def test_classes_are_a_second_loss_with_its_weight_over_those_that_are_known():
    model = model_of(CLASSED)
    batch = double(collated([item(0), item(1), item(2, known=False)]))
    terms = CLASSED.loss(model, batch)
    told_BC = model(batch)[2]
    wanted = torch.nn.functional.cross_entropy(told_BC[:2], batch.class_B[:2], reduction="sum")
    total, weight = terms["classes"]
    assert float(weight) == 2
    assert float((total - 0.5 * wanted).detach().abs()) < 1e-12
    assert terms["pairs"][1] == 3


def test_classes_that_no_item_has_are_refused_in_training_and_told_where_the_model_is_applied():
    values = [{name: array for name, array in one.items() if name != "class"} for one in items(2)]
    model, batch = model_of(CLASSED, dtype=torch.float32), collated(values)
    with pytest.raises(ConfigError, match="learns classes, but no item has one") as caught:
        CLASSED.embed(model.train(), batch)
    assert "data.options.label" in caught.value.remedy
    with torch.no_grad():
        outputs = CLASSED.outputs(model.eval(), batch)
    assert {"class", "zero_shot"} <= set(outputs)
    assert not {"class_place", "zero_shot_place"} & set(outputs)
    assert set(CLASSED.contrast(model, CLASSED.embed(model, batch))) == {"pairs"}


# ---- told classes ----


def figures_of(task, model, values):
    with torch.no_grad():
        outputs = task.outputs(model.eval(), collated(values, task))
    return outputs, task.metrics({name: [one.numpy() for one in rows] for name, rows in outputs.items()})


def test_the_place_of_the_true_class_is_told_and_unknown_ones_do_not_count():
    model = model_of(CLASSED, dtype=torch.float32)
    outputs, figures = figures_of(CLASSED, model, [item(0), item(1), item(2, known=False)])
    for way in ("class", "zero_shot"):
        assert outputs[f"{way}_place"].isnan().tolist() == [False, False, True]
        is_first = (outputs[way][:2] == torch.tensor([int(item(seed)["class"]) for seed in (0, 1)])).float()
        assert figures[f"{way}_at_1"] == pytest.approx(float(is_first.mean()))
        assert figures[f"{way}_at_1"] <= figures[f"{way}_at_5"] <= 1
    assert {"left_to_right_at_1", "left_to_right_at_5", "left_to_right_at_10", "right_to_left_at_10"} <= set(figures)


def test_zero_shot_compares_with_the_mean_of_each_class_in_all_templates_made_of_length_1_again():
    model = model_of(CLASSED, dtype=torch.float32).eval()
    with torch.no_grad():
        like = torch.zeros(1)
        vectors_CK = CLASSED.prompts.vectors(model, like)
        texts = [template.replace("{}", NAMES[3]) for template in CLASSED.templates]
        asked = [
            {**item(0), "right.token": np.array(retrieval.BytePairs().encoded(text, 24), np.int32)} for text in texts
        ]
        mean_K = CLASSED.embed(model, collated(asked))["right"].mean(0)
    assert torch.allclose(vectors_CK[3], mean_K / mean_K.norm(), atol=1e-6)
    assert torch.allclose(vectors_CK.norm(dim=-1), torch.ones(len(NAMES)))


# ---- what is nearest ----


class Column(list):
    """A column of outputs, with the ids of its items."""

    def id(self, place):
        return f"p{place}"


def test_predictions_are_tables_of_the_nearest_texts_and_images_and_classes_by_name(tmp_path):
    assert isinstance(CLASSED, Publishes)
    outputs, _ = figures_of(CLASSED, model_of(CLASSED, dtype=torch.float32), items(7))
    columns = {name: Column(rows.numpy()) for name, rows in outputs.items()}
    texts = [(f"p{place}", {"image": f"{place}.png", "caption": f"the {place}"}) for place in range(7)]
    files = CLASSED.publish(tmp_path, columns, [], SimpleNamespace(headers=lambda: texts))
    assert [file.name for file in files] == ["nearest_right.csv", "nearest_left.csv"]
    rows, back = (list(csv.DictReader(file.read_text().splitlines())) for file in files)
    assert [row["id"] for row in rows] == [f"p{place}" for place in range(7)]
    cosines = outputs["left"] @ outputs["right"].T
    for place, row in enumerate(rows):
        nearest = int(cosines[place].argmax())
        assert [row[name] for name in ("image", "caption")] == [f"{place}.png", f"the {place}"]
        assert [row[name] for name in ("nearest_1", "caption_1")] == [f"p{nearest}", f"the {nearest}"]
        assert float(row["cosine_1"]) == pytest.approx(float(cosines[place].max()), abs=1e-4)
        assert float(row["own_cosine"]) == pytest.approx(float(cosines[place, place]), abs=1e-4)
        assert row["zero_shot"] == NAMES[int(outputs["zero_shot"][place])]
        assert row["class"] == NAMES[int(outputs["class"][place])]
    found = [(f"p{int(place)}", f"{int(place)}.png") for place in cosines.argmax(0)]
    assert [(row["nearest_1"], row["image_1"]) for row in back] == found


# ---- bad input ----


@pytest.mark.parametrize(
    ("value", "options", "said", "remedy"),
    [
        ({}, {"image_size": 32}, "images of 32 × 32 pixels of 3 colours, left.image of item0", "data.options.size=32"),
        ({}, {"right_most": 5}, "has 10 tokens, the model allows 5", "data.options.context=5"),
        ({"right.token": np.array([0, 600], np.int32)}, {}, "a token of item0 is 600, the model knows 514", "merges"),
        ({"right.token": np.array([0, 6], np.uint8)}, {}, "as byte-pair tokens, but item0 has bytes", "right=tokens"),
        ({}, {"right": "tokens"}, "as bytes, but item0 has byte-pair tokens", "right=text"),
        ({"class": np.array(9, np.int64)}, {"classes": ["a", "b"]}, "item0 is of class 9, but there are", "classes"),
    ],
)  # fmt: skip
def test_items_that_do_not_fit_the_model_are_refused_with_what_to_set(value, options, said, remedy):
    task = replace(CLIP, **options)
    with pytest.raises(ConfigError, match=said) as caught:
        collated([item(0, kind=0) | value], task)
    assert remedy in caught.value.remedy


def test_the_files_that_decide_what_is_told_are_read_into_the_models_name(tmp_path):
    (tmp_path / "names").write_text("cat\ndog\n")
    task = replace(CLIP, classes=str(tmp_path / "names"), templates=("a {}",))
    assert isinstance(task, ReadsFiles)
    assert task.names == ("cat", "dog")
    assert list(task.files_read()) == [tmp_path / "names"]
    assert list(CLIP.files_read()) == []
