"""Records as bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.store.format.record import ALIGNMENT, BadRecord, decode_record, encode_record
from tests.store.content import arrays_of, is_right, key_of

KEY = key_of(0)


@pytest.mark.parametrize("dtype", ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", ">f4", ">i8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 1)])
def test_every_dtype_and_shape_comes_back(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    back = decode_record(encode_record(KEY, {"x": array}, {}).blob).arrays["x"]
    assert back.shape == shape
    assert back.dtype == array.dtype.newbyteorder("<")
    assert np.array_equal(back, array)
    turned = np.arange(24).reshape(4, 6).astype(dtype)[::2, ::-3].T  # which is not contiguous
    assert np.array_equal(decode_record(encode_record(KEY, {"x": turned}, {}).blob).arrays["x"], turned)


def test_bfloat16_is_carried_as_its_bits():
    bits = np.array([0x3F80, 0x4000], np.uint16)
    record = decode_record(encode_record(KEY, {"x": bits, "y": bits}, {}, bfloat16=["x"]).blob)
    assert record.bfloat16 == {"x"}
    assert record.arrays["x"].dtype == np.uint16
    assert np.array_equal(record.arrays["x"], bits)


def test_each_record_fills_whole_lines_so_that_the_next_is_aligned():
    for number in range(30):
        record = encode_record(key_of(number), arrays_of(key_of(number)), {"n": "x" * number})
        assert len(record.blob) % ALIGNMENT == 0
        for tensor in record.tensors:
            assert tensor.end - tensor.start == 0 or tensor.start % {"F64": 8, "F32": 4}.get(tensor.tag, 1) == 0


def test_meta_comes_back_as_json_does():
    meta = {"text": 'Å " \\ \u2028', "list": [1, 2.5, None, True], "deep": {"a": {"b": []}}}
    assert decode_record(encode_record(KEY, {}, meta).blob).meta == meta


NONE = np.zeros(1)
REFUSED = [
    *({name: NONE} for name in ("", "record", "a/b", "ä", "1a", 'a"b', "a b")),
    *({"x": array} for array in (np.zeros(1, complex), np.array(["a"]), np.array([object()]), np.zeros(1, "M8[s]"))),
]


def test_what_a_record_cannot_hold_is_refused():
    for arrays in REFUSED:
        with pytest.raises(ValueError, match=r"cannot|not a valid"):
            encode_record(KEY, arrays, {})
    for meta in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises((ValueError, TypeError)):
            encode_record(KEY, {}, meta)
    with pytest.raises(ValueError, match="bfloat16"):
        encode_record(KEY, {"x": np.zeros(1, np.float32)}, {}, bfloat16=["x"])


def hostile(arrays: str, *, key: str = KEY.hex(), meta: str = "{}", data: bytes = b"") -> bytes:
    text = f'{{"key":"{key}","arrays":{arrays},"meta":{meta}}}'.encode()
    return data + text + (len(text) + 8).to_bytes(8, "little")


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"short",
        bytes(64),
        b"\xff" * 64,
        b"[" * 100_000 + (100_008).to_bytes(8, "little"),
        hostile('[["x","F32",[1]]]'),
        hostile('[["x","F32",[-1]]]'),
        hostile('[["x","F32",[true]]]', data=bytes(4)),
        hostile('[["x","F32",[4611686018427387904,4]]]'),
        hostile('[["x","F32",[281474976710655,281474976710655,0]]]'),
        hostile('[["x","F32",[1.0]]]', data=bytes(4)),
        hostile('[["x","O",[1]]]', data=bytes(8)),
        hostile(f'[["x","U8",{[1] * 60}]]', data=bytes(1)),
        hostile('[["x","U8",[1]],["x","U8",[1]]]', data=bytes(2)),
        hostile('[["x","U8"]]'),
        hostile("{}"),
        hostile("[1]"),
        hostile("[]", data=bytes(8)),
        hostile("[]", key="00"),
        hostile("[]", key="zz" * 16),
        hostile("[]", meta="[]"),
    ],
)
def test_bytes_that_are_no_record_are_refused(blob):
    with pytest.raises(BadRecord):
        decode_record(blob)


@settings(max_examples=300)
@given(st.data())
def test_a_mutilated_record_is_read_or_refused_and_nothing_else(data):
    blob = bytearray(encode_record(KEY, arrays_of(KEY), {"name": KEY.hex()}).blob)
    assert is_right(decode_record(bytes(blob)), KEY)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(blob) - 1))
        blob[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        record = decode_record(bytes(blob))
    except BadRecord:
        return
    assert sum(array.nbytes for array in record.arrays.values()) <= len(blob)
