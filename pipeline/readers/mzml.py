"""Spectra of mzML: the elements `spectrum` of MS level 2 and above, each read by itself.

Peaks are float32, float64 or whole numbers, plain or compressed by zlib; other compressions (numpress) are refused by
name. Shapes: P peaks; 2 is m/z and intensity.
"""

from __future__ import annotations

import base64
import re
import zlib
from typing import TYPE_CHECKING
from xml.etree import ElementTree  # elements only; document types are refused below

import numpy as np

from pipeline.readers.entry import UnusableEntry, opened
from pipeline.readers.spectrum_files import CHUNK_BYTES, Block, SpectrumForm, pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from xml.etree.ElementTree import Element

    from numpy.typing import NDArray

    from pipeline.readers.spectrum_files import Divided

BEGIN, END = re.compile(rb"<spectrum(?=[\s>])"), b"</spectrum>"
MOST_BYTES = 64 << 20  # of a spectrum, and of its peaks unpacked
MOST_MARKUP = 100_000  # signs of elements and attributes, each of which takes more memory than its text
LEVEL, POSITIVE, NEGATIVE, PROFILE = "MS:1000511", "MS:1000130", "MS:1000129", "MS:1000128"
TIME, ION, CHARGE, MINUTE = "MS:1000016", "MS:1000744", "MS:1000041", "UO:0000031"
ARRAYS = {"MS:1000514": "m/z", "MS:1000515": "intensity"}
TYPES = {"MS:1000521": "<f4", "MS:1000523": "<f8", "MS:1000519": "<i4", "MS:1000522": "<i8"}
PLAIN, ZLIB = "MS:1000576", "MS:1000574"
COMPRESSED = "compression"
SCAN = re.compile(r"(?:scan|scanId|index|spectrum)=(\d+)")
# Neither looks beyond where the next one begins, so that many beginnings without an end take no longer than one.
SURVEY = re.compile(rb'accession="MS:1000511"(?:(?!accession=)[^>])*?value="1"')
COUNT = re.compile(rb'<spectrumList\s(?:(?!count=)[^<>])*count="(\d{1,9})"')
GROUP = re.compile(
    rb"<referenceableParamGroup\s(?:(?!<referenceableParamGroup\s).)*?</referenceableParamGroup>", re.DOTALL
)
UNENDED = "no </spectrum> before the next one or the end of the file: truncated?"
Groups = dict[str, "Element"]


def mzml_blocks(path: Path) -> Iterator[Block]:
    """Yield the spectra of a file except those of MS level 1, and last how many its list lacks."""
    missing = line = 0
    for offset, line, text, _ in pieces(path, BEGIN, MOST_BYTES):
        stop = text.find(END) + len(END)
        body = text[:stop] if stop >= len(END) else text[:CHUNK_BYTES]
        is_spectrum = bool(BEGIN.match(body))
        missing += -1 if is_spectrum else sum(map(int, COUNT.findall(text)))
        if is_spectrum and not SURVEY.search(body):
            yield Block(offset, line, body, "" if body.endswith(END) else UNENDED)
    if missing > 0:
        yield Block(0, line, b"", f"{missing:,} spectra fewer than spectrumList counts: truncated?", is_between=True)


def groups(path: Path) -> Groups:
    """Return the groups of parameters that spectra refer to, by their names."""
    found: Groups = {}
    with opened(path) as file:
        head = b""
        while (chunk := file.read(CHUNK_BYTES)) and not BEGIN.search(head) and len(head) < MOST_BYTES:
            head += chunk
    for text in GROUP.findall(head):
        try:
            group = _element(text)
        except UnusableEntry:
            continue  # spectra that refer to it are rejected
        found[group.get("id", "")] = group
    return found


def divide_mzml(body: bytes, named: Groups) -> Divided:
    """Return headers as MGF would have them, and the peaks [P, 2], of a spectrum's text."""
    spectrum = _element(body)
    said = _parameters(spectrum, named)
    if PROFILE in said:
        raise UnusableEntry("a profile, not centroided")
    headers = _headers(spectrum, said, named)
    mz_P, intensity_P = (_array(spectrum, accession, named) for accession in ARRAYS)
    if len(mz_P) != len(intensity_P):
        raise UnusableEntry(f"{len(mz_P)} m/z and {len(intensity_P)} intensities")
    if (declared := spectrum.get("defaultArrayLength", "")) != str(len(mz_P)):
        raise UnusableEntry(f"defaultArrayLength is {declared!r}, found {len(mz_P)} peaks")
    return headers, np.stack([mz_P, intensity_P], 1)


def _scan_of(line: str) -> tuple[str, str] | None:
    """Return the number of a spectrum's scan, which its first line has."""
    found = SCAN.search(line.partition(">")[0]) if line.startswith("<spectrum ") else None
    return ("SCANS", found[1]) if found else None


def _element(text: bytes) -> Element:
    if b"<!" in text or text.count(b"<") + text.count(b"=") > MOST_MARKUP:
        raise UnusableEntry(f"a declaration or comment within a spectrum, or more than {MOST_MARKUP:,} elements")
    try:
        return ElementTree.fromstring(text)  # noqa: S314 - an element without declarations
    except ElementTree.ParseError as error:
        raise UnusableEntry(f"not XML: {error.msg}", max(error.position[0] - 1, 0)) from error


def _parameters(element: Element, named: Mapping[str, Element]) -> dict[str, Element]:
    """Return the parameters of an element by accession, those of groups that it refers to included."""
    referred = (named.get(reference.get("ref", ""), ()) for reference in element.findall("referenceableParamGroupRef"))
    found = [one for group in referred for one in group] + element.findall("cvParam")
    return {one.get("accession", ""): one for one in found if one.tag == "cvParam"}


def _headers(spectrum: Element, said: Mapping[str, Element], named: Mapping[str, Element]) -> dict[str, str]:
    headers = {"TITLE": spectrum.get("id", "")}
    if scan := SCAN.search(headers["TITLE"]):
        headers["SCANS"] = scan[1]
    if LEVEL in said:
        headers["MSLEVEL"] = said[LEVEL].get("value", "")
    sign = "-" if NEGATIVE in said else "+"
    if POSITIVE in said or NEGATIVE in said:
        headers["IONMODE"] = {"+": "positive", "-": "negative"}[sign]
    for ion in spectrum.findall("precursorList/precursor/selectedIonList/selectedIon")[:1]:
        of_ion = _parameters(ion, named)
        headers |= {"PEPMASS": of_ion[ION].get("value", "")} if ION in of_ion else {}
        if CHARGE in of_ion:
            headers["CHARGE"] = of_ion[CHARGE].get("value", "").strip("+-") + sign
    for scan_element in spectrum.findall("scanList/scan")[:1]:
        if (time := _parameters(scan_element, named).get(TIME)) is not None:
            unit = "RTINMINUTES" if time.get("unitAccession") == MINUTE else "RTINSECONDS"
            headers[unit] = time.get("value", "")
    return headers


def _array(spectrum: Element, accession: str, named: Mapping[str, Element]) -> NDArray[np.float64]:
    for element in spectrum.findall("binaryDataArrayList/binaryDataArray"):
        said = _parameters(element, named)
        if accession in said:
            return _numbers(element, said, ARRAYS[accession])
    raise UnusableEntry(f"no {ARRAYS[accession]} array")


def _numbers(element: Element, said: Mapping[str, Element], name: str) -> NDArray[np.float64]:
    kinds = [dtype for known, dtype in TYPES.items() if known in said]
    if len(kinds) != 1:
        raise UnusableEntry(f"the {name} array does not declare its number type")
    others = [one.get("name", "") for key, one in said.items() if COMPRESSED in one.get("name", "") and key != PLAIN]
    if ZLIB not in said and others:
        raise UnusableEntry(f"the {name} array is packed by {others[0]}: msconvert --zlib --numpressAll off")
    try:
        data = base64.b64decode("".join((element.findtext("binary") or "").split()), validate=True)
        if ZLIB in said:
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(data, MOST_BYTES)
            if unpacker.unconsumed_tail or not unpacker.eof:
                raise UnusableEntry(f"the {name} array is truncated or too large")
        return np.frombuffer(data, kinds[0]).astype(np.float64)
    except (ValueError, zlib.error) as error:
        raise UnusableEntry(f"the {name} array cannot be unpacked: {error}") from error


MZML = SpectrumForm(mzml_blocks, divide_mzml, _scan_of, "no spectra found (no <spectrum> of MS level 2)", groups)
