"""Where a training stands between two steps: what is counted, what was best, what is left out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pipeline.errors import DataError
from pipeline.training.keeping import Place
from pipeline.training.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.config.schema_train import Validation
    from pipeline.training.words import Heard


class Standing:
    """Counts steps and epochs, and judges what validations find; checkpoints have it as a `Place`."""

    def __init__(self, validation: Validation, epochs: int) -> None:
        """Take how validations are judged, and how many epochs there are in all."""
        self.epochs = epochs
        self.done = 0  # steps
        self.epoch = 0
        self.next = 0  # the step of the epoch that comes
        self.best: float | None = None
        self.stale = 0  # validations without a better one
        self.is_finished = False
        self.tally = Tally(0)
        self.poisoned: set[int] = set()  # steps that are left out after a rollback
        self._validation = validation

    @property
    def is_in_last_epoch(self) -> bool:
        """Say whether no epoch follows."""
        return self.epoch + 1 == self.epochs

    def count(self, heard: Heard, took_s: float) -> None:
        """Count a step that was made."""
        self.done += 1
        self.next += 1
        self.tally.add(heard, took_s)

    def leave_out_step(self) -> None:
        """Count a step that was not made."""
        self.done += 1
        self.next += 1
        self.tally.left_out += 1

    def end_epoch(self) -> None:
        """Go on to the next epoch, unless this was the last, or no validation becomes better."""
        self.is_finished = self.is_in_last_epoch or self._is_stale()
        self.epoch += 1
        self.next = 0

    def judge(self, figures: Mapping[str, float]) -> float | None:
        """Return the figure that is watched, and count how long none was better."""
        settings = self._validation
        figure = figures.get(settings.monitor)
        if figures and figure is None:
            known = ", ".join(figures)
            what = f"no figure of the validation is called {settings.monitor!r}; there are {known}"
            raise DataError(what, where="train.validation.monitor", remedy="name one of these")
        if figure is None:
            return None
        if not math.isfinite(figure):
            self.stale += 1
            return None
        better = self.best is None or (figure < self.best if settings.lower_is_better else figure > self.best)
        self.best, self.stale = (figure, 0) if better else (self.best, self.stale + 1)
        return figure

    def _is_stale(self) -> bool:
        patience = self._validation.patience
        return patience is not None and self.stale >= patience

    def refuse_nothing_learned(self) -> None:
        """Raise after an epoch of which no item had anything to learn from: only the weight decay moved the model."""
        weights = [weight for _, weight in self.tally.terms.values()]
        if weights and not any(weights):
            what = f"nothing was learned in an epoch of {self.tally.items:,} items: every term of the loss has weight 0"
            remedy = "see that the items have what is to be learned: labels, targets, peptides"
            raise DataError(what, where="train.task", remedy=remedy)

    def place(self, sampler: Mapping[str, Any]) -> Place:
        """Return all of it for a checkpoint."""
        return Place(
            epoch=self.epoch,
            done=self.done,
            sampler=sampler,
            best=self.best,
            stale=self.stale,
            monitor=self._validation.monitor,
            finished=self.is_finished,
            tally=self.tally.to_json(),
            poisoned=sorted(self.poisoned),
        )

    def take_up(self, place: Place) -> None:
        """Stand where a checkpoint was taken."""
        self.epoch, self.done, self.next = place.epoch, place.done, int(place.sampler.get("step", 0))
        is_alike = place.monitor == self._validation.monitor  # of another figure it says nothing
        self.best, self.stale = (place.best, place.stale) if is_alike else (None, 0)
        self.poisoned = set(place.poisoned)
        self.is_finished = self.epoch >= self.epochs or self._is_stale()
        self.tally = Tally.from_json(place.tally) if place.tally else Tally(self.epoch)
