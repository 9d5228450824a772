"""Whether a spectrum is good enough to learn from: the checks of DreaMS' data, format A."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.readers.entry import UnusableEntry

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class SpectrumQuality:
    """Limits of spectra; what is outside is refused, with the first limit that it is outside of."""

    most_precursor_mz: float = 1000.0
    most_charge: int = 1
    least_peaks: int = 3
    most_peaks: int = 128
    most_mz: float = 1000.0
    least_contrast: float = 20.0  # the highest intensity over the lowest
    high: float = 0.1  # of the highest intensity; so high at least `least_peaks` must be

    def check(self, peak_P2: NDArray[Any], precursor_mz: float, charge: int) -> None:
        """Raise for a spectrum that is outside of a limit; a charge of 0 is not known, and passes."""
        if precursor_mz > self.most_precursor_mz:
            raise UnusableEntry(f"the precursor's m/z is {precursor_mz:g}, above {self.most_precursor_mz:g}")
        if abs(charge) > self.most_charge:
            raise UnusableEntry(f"the charge is {charge}, above {self.most_charge}")
        mz_P, intensity_P = peak_P2[peak_P2[:, 1] > 0].T
        if not self.least_peaks <= len(mz_P) <= self.most_peaks:
            raise UnusableEntry(f"{len(mz_P)} peaks, not {self.least_peaks} to {self.most_peaks}")
        if mz_P.max() > self.most_mz:
            raise UnusableEntry(f"a peak at m/z {mz_P.max():g}, above {self.most_mz:g}")
        if intensity_P.max() < self.least_contrast * intensity_P.min():
            raise UnusableEntry(f"the highest peak is not {self.least_contrast:g} times as high as the lowest")
        if (count := int((intensity_P > self.high * intensity_P.max()).sum())) < self.least_peaks:
            raise UnusableEntry(f"{count} peaks above {self.high:g} of the highest, fewer than {self.least_peaks}")


FORMATS = {"": None, "A": SpectrumQuality()}
