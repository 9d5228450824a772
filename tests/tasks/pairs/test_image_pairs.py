"""Images with captions as a task: what a batch is, how images vary, classes told two ways, and what is published."""

from __future__ import annotations

import csv
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeline.errors import ConfigError
from pipeline.memory.footprint import MemoryChoice, live_peak_bytes
from pipeline.protocol import ITEMS, Publishes, ReadsFiles
from pipeline.runs.model.task_contract import breaches
from pipeline.tasks.pairs import retrieval
from pipeline.tasks.pairs.pair_towers import cropped
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.optimizers import StepSettings
from tests.memory.tracing.traced import tracer, true_peak
from tests.tasks.pairs.pictures import CLASSED, CLIP, NAMES, SIZE, collated, item, items
from tests.tasks.reader_items import batch_of
from tests.testkit.limited import device

SIZES = ({"right": 9, ITEMS: 1}, {"right": 14, ITEMS: 6}, {"right": 24, ITEMS: 30})
VARIED = replace(CLASSED, crop_least=0.5, mirror=True)


def doubled(batch):
    return tree_map_only(torch.Tensor, lambda one: one.double() if one.is_floating_point() else one, batch)


def model_of(task=CLASSED, dtype=torch.float64):
    torch.manual_seed(0)
    return task.model().to(dtype)


# ---- a batch ----


@pytest.mark.nightly
@pytest.mark.parametrize("task", [CLIP, CLASSED, VARIED], ids=["pairs", "classes", "varied"])
def test_it_keeps_the_contract_and_an_example_is_like_a_batch(task):
    found = batch_of(items(3)).items[:]
    assert list(breaches(task, {"right": 14, ITEMS: 3}, found)) == []
    batch = collated(items(3), task)
    example = task.example({ITEMS: 3, "right": batch.right.token_BL.shape[1]})
    leaves = [[one for one in tree_leaves(which) if one is not None] for which in (batch, example)]
    shapes = [[(one.shape, one.dtype) for one in which] for which in leaves]
    assert shapes[0] == shapes[1]


def test_images_cost_the_same_so_that_texts_alone_drive_memory():
    sizes = {"left": np.full(3, SIZE), "right": np.array([5, 9, 40])}
    assert {name: one.tolist() for name, one in CLIP.cost(sizes).items()} == {"right": [5, 9, 24]}
    assert set(replace(CLIP, right="images").cost(sizes)) == {"left"}


def test_an_item_is_embedded_the_same_alone_and_in_a_batch():
    model, values = model_of(), items(4)
    together = CLASSED.embed(model, doubled(collated(values)))
    alone = [CLASSED.embed(model, doubled(collated([one]))) for one in values]
    for name, rows in together.items():
        assert torch.allclose(rows, torch.cat([one[name] for one in alone]), rtol=0, atol=1e-12)


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
    model = model_of()
    batch = doubled(collated([item(0), item(1), item(2, known=False)]))
    terms = CLASSED.loss(model, batch)
    told_BC = model(batch)[2]
    wanted = torch.nn.functional.cross_entropy(told_BC[:2], batch.class_B[:2], reduction="sum")
    total, weight = terms["classes"]
    assert float(weight) == 2
    assert float((total - 0.5 * wanted).detach().abs()) < 1e-12
    assert terms["pairs"][1] == 3


@pytest.mark.parametrize("cuts", [(4,), (1, 3, 9), (2, 4, 6, 8, 10)])
def test_a_step_of_both_losses_has_the_same_gradients_however_it_is_cut(cuts):
    values, ids = items(12), [f"p{place}" for place in range(12)]
    values[3]["class"] = np.array(-1, np.int64)
    settings = StepSettings(optimizer="sgd", learning_rate=1.0, weight_decay=0.0, momentum=0.0)

    def moved(spans):
        step = make_step(VARIED, settings, model=model_of(VARIED))
        before = {name: one.detach().clone() for name, one in step.model.named_parameters()}
        step.run([doubled(collated(values[start:stop], VARIED, ids[start:stop])) for start, stop in spans])
        return {name: before[name] - one.detach() for name, one in step.model.named_parameters()}

    whole, found = moved([(0, 12)]), moved(list(zip((0, *cuts), (*cuts, 12), strict=True)))
    assert float(whole["classes.weight"].abs().max()) > 1e-3
    assert max(float((one - whole[name]).abs().max()) for name, one in found.items()) < 1e-10


def test_classes_that_no_item_has_are_refused_in_training_and_told_where_the_model_is_applied():
    values = [{name: array for name, array in one.items() if name != "class"} for one in items(2)]
    model, batch = model_of(dtype=torch.float32), collated(values)
    with pytest.raises(ConfigError, match="learns classes, and no item has one") as caught:
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
    model = model_of(dtype=torch.float32)
    outputs, figures = figures_of(CLASSED, model, [item(0), item(1), item(2, known=False)])
    for way in ("class", "zero_shot"):
        assert outputs[f"{way}_place"].isnan().tolist() == [False, False, True]
        is_first = (outputs[way][:2] == torch.tensor([int(item(seed)["class"]) for seed in (0, 1)])).float()
        assert figures[f"{way}_at_1"] == pytest.approx(float(is_first.mean()))
        assert figures[f"{way}_at_1"] <= figures[f"{way}_at_5"] <= 1
    assert {"left_to_right_at_1", "left_to_right_at_5", "left_to_right_at_10", "right_to_left_at_10"} <= set(figures)


def test_zero_shot_compares_with_the_mean_of_each_class_in_all_templates_made_of_length_1_again():
    model = model_of(dtype=torch.float32).eval()
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


def test_prompts_are_embedded_once_until_the_model_changes(monkeypatch):
    model, calls = model_of(dtype=torch.float32).eval(), []
    monkeypatch.setattr(retrieval, "_read", lambda *of, real=retrieval._read: calls.append(1) or real(*of))
    with torch.no_grad():
        before = CLASSED.prompts.vectors(model, torch.zeros(1))
        assert CLASSED.prompts.vectors(model, torch.zeros(1)) is before
        assert len(calls) == 1
        model.right.out_DK.mul_(-1)
        after = CLASSED.prompts.vectors(model, torch.zeros(1))
    assert len(calls) == 2
    assert torch.allclose(after, -before, atol=1e-6)


def test_a_task_travels_to_reading_processes_after_it_has_told_classes():
    figures_of(CLASSED, model_of(dtype=torch.float32), items(2))
    assert pickle.loads(pickle.dumps(CLASSED)).names == NAMES


# ---- what is nearest ----


class Column(list):
    """A column of outputs, with the ids of its items."""

    def id(self, place):
        return f"p{place}"


def test_predictions_are_tables_of_the_nearest_texts_and_images_and_classes_by_name(tmp_path):
    assert isinstance(CLASSED, Publishes)
    outputs, _ = figures_of(CLASSED, model_of(dtype=torch.float32), items(7))
    columns = {name: Column(rows.numpy()) for name, rows in outputs.items()}
    files = CLASSED.publish(tmp_path, columns, [], None)
    assert [file.name for file in files] == ["nearest_right.csv", "nearest_left.csv"]
    rows, back = (list(csv.DictReader(file.read_text().splitlines())) for file in files)
    assert [row["id"] for row in rows] == [f"p{place}" for place in range(7)]
    cosines = outputs["left"] @ outputs["right"].T
    for place, row in enumerate(rows):
        assert row["nearest_1"] == f"p{int(cosines[place].argmax())}"
        assert float(row["cosine_1"]) == pytest.approx(float(cosines[place].max()), abs=1e-4)
        assert float(row["own_cosine"]) == pytest.approx(float(cosines[place, place]), abs=1e-4)
        assert row["zero_shot"] == NAMES[int(outputs["zero_shot"][place])]
        assert row["class"] == NAMES[int(outputs["class"][place])]
    assert [row["nearest_1"] for row in back] == [f"p{int(place)}" for place in cosines.argmax(0)]


# ---- memory ----


@pytest.mark.nightly
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", range(len(SIZES)))
def test_the_planner_traces_it_to_a_hundredth_of_what_it_takes(size):
    device.need()
    settings = {"clip": 1.0, "batch": SIZES[size][ITEMS]}
    traced = tracer(VARIED, least=SIZES[0], **settings)
    standing, micro = traced.standing(MemoryChoice()), traced.micro(MemoryChoice(), SIZES[size])
    predicted = live_peak_bytes(standing, micro, accumulate=False)
    assert predicted == pytest.approx(true_peak(VARIED, SIZES[size], **settings), rel=0.01)


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "name", "said"),
    [
        ({"patch": 5}, "patch", "images of 16 pixels cannot be cut into patches of 5"),
        ({"image_heads": 3}, "image_heads", "16 features cannot be divided among 3 heads"),
        ({"crop_least": 0.0}, "crop_least", "crop_least is 0.0"),
        ({"class_weight": 1.0, "classes": ["a"]}, "classes", "class_weight needs the names of two classes"),
        ({"templates": ["a {}"]}, "classes", "templates needs the names of two classes"),
        ({"templates": ["a dog"], "classes": ["a", "b"]}, "templates", "the template 'a dog' has no {}"),
        ({"templates": ["a {}"], "classes": ["a" * 40, "b"]}, "templates", "a prompt is too long: 43 tokens"),
        ({"templates": ["a {}"], "classes": ["a", "b"], "vocabulary": 500}, "merges", "a token of a prompt is 513"),
        ({"templates": ["a {}"], "classes": ["a", "b"], "merges": "/none"}, "merges", "/none cannot be read"),
        ({"templates": ["a {}"], "classes": ["a", "b"], "right": "tokens"}, "templates", "the right side is tokens"),
        ({"classes": ["a", "a"]}, "classes", "the class 'a' is named twice"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options, name, said):
    with pytest.raises(ConfigError, match=said) as caught:
        replace(CLIP, **options)
    assert caught.value.where == f"train.options.{name}"


@pytest.mark.parametrize(
    ("value", "options", "said", "remedy"),
    [
        ({}, {"image_size": 32}, "images of 32 × 32 pixels of 3 colours, left.image of item0", "data.options.size=32"),
        ({}, {"right_most": 5}, "has 10 tokens, the model has places for 5", "data.options.context=5"),
        ({"right.token": np.array([0, 600], np.int32)}, {}, "a token of item0 is 600, the model knows 514", "merges"),
        ({"right.token": np.array([0, 6], np.uint8)}, {}, "as byte-pair tokens, and item0 has bytes", "right=tokens"),
        ({}, {"right": "tokens"}, "as bytes, and item0 has byte-pair tokens", "right=text"),
        ({"class": np.array(9, np.int64)}, {"classes": ["a", "b"]}, "item0 is of class 9, and there are", "classes"),
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
