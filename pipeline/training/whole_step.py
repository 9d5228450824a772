"""One step of all ranks: each runs its share, all tell what came of it, and take the sum of all gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pipeline.memory.recovery import said_out_of_memory
from pipeline.training.words import Heard, Words

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pipeline.memory.meters import Meter
    from pipeline.training.ranks import Ranks
    from pipeline.training.share import Share
    from pipeline.training.step import Step
    from pipeline.training.stepping import Local, Stepper


class WholeStep:
    """Makes steps with every rank; `lost` says, on the rank where it was so, that memory ended within the optimizer."""

    def __init__(
        self,
        step: Step,
        stepper: Stepper,
        ranks: Ranks,
        *,
        meter: Meter | None,
        complete: Callable[[Words], None],
        say: Callable[[str], None],
    ) -> None:
        """Take what runs this rank's part; `complete` adds to its words what is not of the step itself."""
        self.step, self.stepper, self.ranks, self.meter = step, stepper, ranks, meter
        self.lost = ""
        self.empty_cache = False  # is wanted once the step has ended
        self._complete, self._say = complete, say

    def accumulate(self, share: Share, number: int) -> Heard:
        """Run this rank's share; return what all ranks did."""
        weights, is_lost = self._weights(share)
        if is_lost:
            share.drain()
            words = Words(lost=self.lost)
        else:
            local = self.stepper.run(share, weights)
            words = self._words(share, local, number)
        heard = Heard.of(self.ranks.exchange(words.to_json()))
        self.stepper.learn_terms(len(heard.names))
        are_more = weights is None and len(heard.names) > 1  # terms than ever before: they were divided by a guess
        are_less = weights is not None and heard.sum_of("just_skipped")  # items than were weighed
        if (are_more or are_less or heard.sum_of("again")) and not heard.lost:
            self.stepper.go_back()
            again = self.accumulate(share, number)
            for first, second in zip(heard.words, again.words, strict=True):
                second.carry(first)
            return again
        if weights is None and len(heard.names) == 1:
            ((_, weight),) = heard.totals.values()
            self.step.settle(weight)
        return heard

    def _weights(self, share: Share) -> tuple[dict[str, float] | None, bool]:
        """Return the weights of the whole step, where they must be known beforehand, and whether it cannot be run."""
        if not self.stepper.needs_weights:
            return None, bool(self.lost)
        own = {} if self.lost else self.stepper.weights(share)
        said = self.ranks.exchange({"lost": bool(self.lost), "weights": own})
        told, is_lost = [one["weights"] for one in said], any(one["lost"] for one in said)
        names = list(dict.fromkeys(name for one in told for name in one))
        self.stepper.learn_terms(len(names))
        if not self.stepper.needs_weights:
            return None, is_lost
        return {name: math.fsum(one.get(name, 0.0) for one in told) for name in names}, is_lost

    def _words(self, share: Share, local: Local, number: int) -> Words:
        memory = self.meter.read() if self.meter else None
        want = self.stepper.governor.after_step(memory)
        self.empty_cache = want.empty_cache
        if want.why:
            self._say(f"step {number}: {want.why}")
        words = Words(
            terms=local.terms,
            items=local.items,
            micros=local.micros,
            ooms=local.ooms,
            rejected=share.rejected,
            skipped=len(share.skipped),
            just_skipped=len(local.skipped),
            remedied=local.remedied,
            again=local.again,
            absent=self._absent(),
            budget=want.budget,
        )
        self._complete(words)
        return words

    def _absent(self) -> list[int] | None:
        absent = [number for number, one in enumerate(self.step.trained) if one.grad is None]
        return None if len(absent) == len(self.step.trained) else absent

    def take(self, heard: Heard) -> float | None:
        """Let the optimizer take the gradients of all ranks; return their norm; None where it is not finite."""
        if not heard.names:  # no rank has any item
            self.step.release()
            return 0.0
        self._add_up(heard)
        norm = float(self.step.clip() if self.step.settings.clip is not None else self.step.norm())
        if not math.isfinite(norm) and not self.step.retries_by_scale:
            return None
        if self.step.is_spread:  # where memory ends here, all ranks end
            self.step.apply()
            return norm
        lost = said_out_of_memory(lambda _: self.step.apply(), None)
        self.lost = "" if lost is None else f"memory ended within the optimizer: {lost}"
        return norm

    def _add_up(self, heard: Heard) -> None:
        """Give every rank the gradients of all."""
        if self.ranks.world == 1 or self.step.is_spread:  # then they are sums already
            return
        gradients: list[Tensor] = []
        for number in heard.with_gradient(len(self.step.trained)):
            parameter = self.step.trained[number]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self.ranks.add_up(gradients)

    def lost_by(self) -> str:
        """Ask all ranks whether any has lost its parameters in the last step; return which, and how."""
        told = self.ranks.exchange({"lost": self.lost})
        return next((f"rank {rank}: {one['lost']}" for rank, one in enumerate(told) if one["lost"]), "")
