"""`pipeline data split`: makes or checks splits that share nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.help import Verbs, option
from pipeline.cli.options import ConfigFile, Json, Sets, as_typed, one_of, open_project, print_json, refuse, show
from pipeline.cli.report_verbs import items_command
from pipeline.command_line import Command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from pipeline.dataset.split_data import Division, SharedItems
    from pipeline.project.project import Project

METHODS = ("sequence", "clusters")
NAMES = {2: ("train", "test"), 3: ("train", "val", "test")}
FEWEST_FOLDS = 3  # test, validation, and what trains
LIKE_FRACTIONS = Command.of("data split --fractions .8/.1/.1 --out FILE")
LIKE_FOLDS = Command.of("data split --folds 5 --out FILE")


def split_command(
    by: Annotated[
        str, one_of(METHODS, "--by", "How to group similar chains: same sequence, or your clusters.")
    ] = "sequence",
    fractions: Annotated[
        str | None, option("--fractions A/B/C", "Shares of train/val/test, or A/B of train/test. Default: .8/.1/.1.")
    ] = None,
    folds: Annotated[int | None, option("--folds", "Write one file for each of K folds instead.")] = None,
    seed: Annotated[int, option("--seed", "Random seed for the split.", min=0)] = 0,
    clusters: Annotated[
        list[Path] | None, option("--clusters FILE", "Cluster file: representative<TAB>member in each line.")
    ] = None,
    out: Annotated[Path | None, option("--out FILE", "Table to write.")] = None,
    check: Annotated[
        bool, option("--check", "Check the existing splits instead. Exit with 3 if they share chains.")
    ] = False,
    write_fasta: Annotated[
        Path | None,
        option("--write-fasta FILE", "Write only the protein chains, named ID_CHAIN, for clustering elsewhere."),
    ] = None,
    as_json: Json = False,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Split the data set without shared chains, or check its splits.

    Items that share a sequence or a cluster in any chain stay in one split. Run a scan first. Then set
    data.splits to the new table.

    Examples:
    pipeline data split --out splits.csv    # no shared sequence
    pipeline data split --by clusters --clusters clusters.tsv --out splits.csv
    pipeline data split --folds 5 --out folds.csv
    pipeline data split --check             # existing splits
    """
    from pipeline.dataset.split_data import check_out, check_place, read_shared
    from pipeline.store.format.disk import written_to

    wanted = _wanted(fractions, folds)
    if clusters and by != "clusters":
        remedy = Command.of("data split --by clusters --clusters FILE --out FILE")
        refuse(f"cannot be used with --by {by}", "--clusters", remedy)
    tables = (clusters or ()) if by == "clusters" else None
    _, project = open_project(config, sets, remember=False)
    for path in (write_fasta, out if check else None):
        if path is not None:
            check_place(project.source, path)
    if write_fasta is not None:
        with written_to(write_fasta):
            shared = read_shared(project, fasta=write_fasta)
        if as_json:
            print_json({"items": len(shared), "chains": shared.chains, "file": write_fasta})
        else:
            typer.echo(f"{shared.chains:,} chains of {len(shared):,} items: {write_fasta}")
        return
    if check:
        _check(project, tables, out, as_json=as_json)
        return
    if out is None:
        refuse("required: the file to write the table to", "--out", LIKE_FRACTIONS)
    check_out(project.source, out, folds or 0)
    shared = read_shared(project, tables, seed)
    _divide(project, shared, wanted, out, folds=folds or 0, as_json=as_json)


def _wanted(fractions: str | None, folds: int | None) -> dict[str, float]:
    """Return the wanted share of items of each split."""
    if folds is not None:
        if fractions is not None:
            refuse("cannot be combined with --folds", "--fractions", LIKE_FOLDS)
        if folds < FEWEST_FOLDS:
            refuse(f"must be at least {FEWEST_FOLDS} (train, validation, test), got {folds}", "--folds", LIKE_FOLDS)
        return {f"fold {fold}": 1 / folds for fold in range(folds)}
    try:
        shares = [float(word) for word in (fractions or ".8/.1/.1").split("/")]
    except ValueError:
        shares = []
    # As in 8/1/1, or in .8/.1/.1
    is_whole = max(shares, default=0.0) >= 1 or math.isclose(sum(shares), 1, abs_tol=1e-3)
    if len(shares) not in NAMES or not all(0 < share < math.inf for share in shares) or not is_whole:
        what = f"expected shares such as .8/.1/.1 (they sum to 1) or 8/1/1, got {fractions!r}"
        refuse(what, "--fractions", LIKE_FRACTIONS)
    return {name: share / sum(shares) for name, share in zip(NAMES[len(shares)], shares, strict=True)}


def _divide(
    project: Project, shared: SharedItems, wanted: dict[str, float], out: Path, *, folds: int, as_json: bool
) -> None:
    from pipeline.dataset.split_data import divide_items, fold_files, write_splits
    from pipeline.report import tables
    from pipeline.store.format.disk import written_to

    division = divide_items(shared, wanted)
    filled = len(set(division.split_N.tolist()))
    if folds > filled:
        empty = tables.plural(folds - filled, "fold")
        problem = f"{empty} of {folds} have no items to test: too few independent groups"
        refuse(problem, "--folds", Command.of("data split --folds", max(FEWEST_FOLDS, filled), "--out", out))
    files = fold_files(out, folds) if folds else [out]
    with written_to(out):
        write_splits(project, shared, division, files, folds)
    document = {
        **division.to_json(),
        "rejected": shared.rejected,
        "chains": shared.chains,
        "without_cluster": dict(shared.unclustered),
        "files": [str(path) for path in files],
        "next": str(as_typed(Command.submit("scan").with_settings(("data.splits", str(files[0]))))),
    }
    show(lambda: document, lambda: _division_shown(document, division, shared), as_json=as_json)


def _division_shown(document: dict[str, Any], division: Division, shared: SharedItems) -> Iterator[RenderableType]:
    """Describe a division: its items, splits and remarks."""
    from pipeline.report import tables

    rejected = f", {shared.rejected:,} rejected" if shared.rejected else ""
    groups = tables.plural(document["components"], "group")
    yield f"{document['items']:,} items{rejected}; {shared.chains:,} chains; {groups} without shared chains"
    yield ""
    rows = [
        (name, f"{split['asked']:.1%}", f"{split['share']:.1%}", f"{split['items']:,}", _size(split["median_residues"]))
        for name, split in document["splits"].items()
    ]
    head = ("split", "requested", "got", "items", "median residues")
    yield tables.text_table(head, rows, right="requested got items median residues")
    yield ""
    largest = ", ".join(f"{count:,}" for count in document["largest"])
    yield f"items of the largest groups: {largest} ({document['largest'][0] / document['items']:.1%} in the first)"
    for table, chains in document["without_cluster"].items():
        if chains:
            yield f"{chains:,} of {shared.chains:,} chains are not in {table}: only identical sequences join them"
    if document["larger_than_a_split"]:
        smallest = min(division.fractions)
        yield (
            f"note: {tables.plural(document['larger_than_a_split'], 'component')} with more items than the smallest "
            f"split should have ({smallest:.0%}): shares may differ from the requested ones by as much"
        )
    yield from (f"written: {path}" for path in document["files"])
    yield f"  next: {document['next']}"


def _size(median: float | None) -> str:
    return "" if median is None else f"{median:,.0f}"


def _check(project: Project, clusters: Sequence[Path] | None, out: Path | None, *, as_json: bool) -> None:
    """Print the content that splits share; exit with 3 if there is any."""
    from pipeline.dataset.split_data import read_shared, shared_levels, write_leaking
    from pipeline.errors import DataError
    from pipeline.report import tables
    from pipeline.store.format.disk import written_to

    shared = read_shared(project, clusters)
    counts = {name: shared.splits.count(number) for name, number in shared.names.items()}
    if len([name for name in counts if name and counts[name]]) < len(NAMES[2]):
        problem = "the data set has fewer than two splits"
        raise DataError(problem, where=str(project.source.path), remedy=LIKE_FRACTIONS)
    found = shared_levels(shared)
    if out is not None:
        with written_to(out):
            write_leaking(project, shared, out)
    if as_json:
        levels = [each.to_json() for each in found]
        print_json({"items": counts, "rejected": shared.rejected, "shared": levels, "leaks": bool(found)})
    else:
        compared_by = ", ".join(["sequence", *shared.levels, *(["cluster"] if shared.whole.items else [])])
        rows = []
        for each in found:
            of = zip(each.splits, each.items, strict=True)
            items = " and ".join(f"{items:,} of {counts[name]:,} {name}" for name, items in of)
            rows.append((each.level, each.partners, f"{each.groups:,}", items))
        table = tables.text_table(("the same", "partners", "groups", "items"), rows, right="groups")
        tables.show_parts(table if rows else f"no shared chains between splits (compared by {compared_by})")
        if out is not None:
            typer.echo(f"all items of the leaks: {out}")
    if found:
        raise typer.Exit(DataError.exit_code)


data_app = Verbs("List the items of the data set and split it.")
data_app.command("items")(items_command)
data_app.command("split")(split_command)
