"""The commented file, the schema for editors and the typed schema agree."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.config.load import json_schema, read_config
from pipeline.config.schema import LEAVES, Config
from pipeline.config.schema_data import TAKEN
from pipeline.config.schema_parts import Size, format_duration, format_size, parse_duration
from pipeline.training.items.item_source import OF_GRAPHS

BASE = Path(__file__).parents[2] / "configs/pipeline.yaml"
parse_size = TypeAdapter(Size).validate_python
YOURS = {("data", "path")}


def test_commented_file_writes_every_key_with_its_default(project: Path) -> None:
    (project / "configs").mkdir()
    shutil.copy(BASE, project / "configs")
    loaded = read_config(Path("configs/pipeline.yaml"))
    assert [key for key, origin in loaded.origins.items() if origin == "default"] == []
    defaults = read_config(None, ["data.path=data/manifest.csv"]).config  # ../cache in configs/ is cache/ beside it
    assert loaded.config == defaults


def test_every_key_has_one_line_of_description() -> None:
    for key, info in LEAVES.items():
        assert info.description, key
        assert "\n" not in info.description
        assert len(info.description) <= 110, key


def test_only_the_data_path_has_no_default() -> None:
    assert {key for key, info in LEAVES.items() if info.is_required()} == YOURS


def test_editor_schema_knows_every_key_and_refuses_others() -> None:
    schema = json_schema()
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
        assert section["description"]
        assert all("description" in entry or "$ref" in entry for entry in section["properties"].values())
    keys = {key for section in schema["$defs"].values() for key in section["properties"]}
    assert {key[-1] for key in LEAVES} <= keys
    json.dumps(schema)


def test_editor_schema_offers_sizes_as_text_and_numbers() -> None:
    size = json_schema()["$defs"]["CacheSection"]["properties"]["shard_bytes"]
    pattern = next(choice["pattern"] for choice in size["anyOf"] if choice["type"] == "string")
    assert all(re.search(pattern, text) for text in ("24GiB", "400G", "512 M", "1.5t"))
    assert not re.search(pattern, "24 parsecs")


def test_size_is_read() -> None:
    for written, size in [
        ("24GiB", 24 << 30),
        ("400G", 400 << 30),
        ("512M", 512 << 20),
        ("512mb", 512 << 20),
        ("1.5 T", 3 << 39),
        ("64k", 64 << 10),
        (4096, 4096),
    ]:
        assert parse_size(written) == size, (written, size)
        assert parse_size(format_size(size)) == size, (written, size)


def test_what_is_no_size_is_refused() -> None:
    for written in ["24", "G", "-1G", 0, -5, True, 1.5, None, "1e3M", "1,5G", "٣G", "24 GiBs", [1]]:
        with pytest.raises(ValueError, match=r"size|at least"):
            parse_size(written)


def test_written_size_is_exact() -> None:
    for size in [1, 1023, 1024, 1025, (1 << 40) + 1, 3 << 20]:
        assert parse_size(format_size(size)) == size, size


def test_time_is_read() -> None:
    for written, seconds in [
        ("01:00:00", 3600),
        ("2-12:00:00", 216000),
        ("90m", 5400),
        ("2h", 7200),
        ("45 s", 45),
        ("1D", 86400),
    ]:
        assert parse_duration(written) == seconds, (written, seconds)
        assert parse_duration(format_duration(seconds)) == seconds, (written, seconds)


def test_time_without_a_clear_unit_is_refused() -> None:
    for written in [60, "60", "30:00", "1:60:00", "0m", "-5m", "", None, True, "1h30"]:
        with pytest.raises(ValueError, match="a time such as"):
            parse_duration(written)


def test_schema_converts_nothing_silently() -> None:
    for wrong in ('{"limit": "8"}', '{"limit": true}', '{"max_rejected_fraction": "0.1"}', '{"splits": 3}'):
        data = json.loads(wrong) | {"path": "a"}
        with pytest.raises(ValidationError):
            Config.model_validate_json(json.dumps({"data": data}), strict=True)


def test_a_label_has_a_name_of_its_own() -> None:
    for labels in ['["affinity", "affinity"]', '["ptr"]', '["dG (kcal)"]', '["a.b"]', '["1st"]', "[1]"]:
        with pytest.raises(ValidationError, match="labels"):
            Config.model_validate_json(f'{{"data": {{"path": "a", "labels": {labels}}}}}', strict=True)


def test_labels_are_of_tables_and_not_called_as_parts_of_a_batch() -> None:
    assert set(TAKEN) == OF_GRAPHS
    data = '{"path": "a", "source": "reader", "reader": "a:B", "labels": ["affinity"]}'
    with pytest.raises(ValidationError, match="applies to structures"):
        Config.model_validate_json(f'{{"data": {data}}}', strict=True)
