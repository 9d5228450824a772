"""Whether what a page shows is what was printed, but for what differs from run to run and from machine to machine."""

from __future__ import annotations

import re

LEFT_OUT = "…"  # a line of its own: here the page leaves lines out
VARIABLE = (
    (re.compile(r"\x1b\[[\d;?]*[A-Za-z]"), ""),
    (re.compile(r"run \S+:"), "run R:"),
    (re.compile(r"\b\d{8}-(\d{6}-)?[0-9a-f]{4}(-\w+)?"), "R"),
    (re.compile(r"\b\d+(\.\d+)?( ms| s| min| h|s|m|h( \d+m)?)\b"), "T"),
    (re.compile(r"[\d,]+ residues/s"), "N residues/s"),
    (re.compile(r"peak \d+ MiB"), "peak M"),
    (re.compile(r"[\d.]+ MiB (allocated|reserved|at the peak|used)"), "M"),
    (re.compile(r"\b[\d.,]+ (B|kB|MB|GB|KiB|MiB|GiB)\b|\b[\d.]+[KMGT]\b"), "M"),
    (re.compile(r"[\d.,]+ items/s(, \d+% [a-z ]+)*"), "N items/s"),
    # the last digits are the processor's
    (re.compile(r"(interface|contacts|loss|_auroc|_auprc|_l5|accuracy|rmse)( +)[\d.e-]+"), r"\1 F"),
    (re.compile(r"\(val\) / [\d.e-]+"), "(val) / F"),
    (re.compile(r"is \d of 3:"), "is E of 3:"),
    (re.compile(r"(?<![\w.])/(?:[\w.@+-]+/)*(?=[\w.@+-])"), "/"),  # folders above
    (re.compile(r"\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{8,64}\b"), "D"),  # digests
    (re.compile(r"[ \t]+"), " "),
    (re.compile(r" +$", re.MULTILINE), ""),
)


def plain(text: str) -> str:
    """Return a text with stand-ins for what differs."""
    for pattern, stand_in in VARIABLE:
        text = pattern.sub(stand_in, text)
    return text


def is_shown(shown: str, printed: str) -> bool:
    """Tell whether the parts of what is shown were printed, whole lines, in this order."""
    left = "\n" + plain(printed).strip("\n") + "\n"
    for part in re.split(rf"^{LEFT_OUT}\n", shown, flags=re.MULTILINE):
        lines = "\n" + plain(part).strip("\n") + "\n"
        if lines.strip():
            place = left.find(lines)
            if place < 0:
                return False
            left = left[place + len(lines) - 1 :]
    return True
