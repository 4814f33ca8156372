"""Token records: bytes against the specification, codecs against numpy, refusals."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mla_jax.errors import ArgumentError, MetadataError
from mla_jax.formats import ELEMENT_FORMATS, FORMATS, RECORD_FORMATS, Field, RecordFormat, ScaleRule

RECORDS = {
    f"{f.name} {r.name}": f.with_rule(r.name) for f in RECORD_FORMATS.values() for r in f.rules
}
SIZED = RECORDS | {f.name: f.record(16, 4) for f in ELEMENT_FORMATS.values()}
SCALE = jnp.float32(0.37)  # of a cache whose records keep none

record_of = pytest.mark.parametrize("record", SIZED.values(), ids=SIZED.keys())


def draw(rng, record, tokens=9, dtype=ml_dtypes.bfloat16):
    """Values of very different sizes, a row of zeros among them."""
    size = 2.0 ** rng.integers(-12, 12, size=(tokens, 1)) * (np.arange(tokens) > 0)[:, None]
    return tuple(
        jnp.asarray((rng.normal(size=(tokens, f.count)) * size).astype(dtype))
        for f in record.values
    )


def numpy(x):
    return np.asarray(x).astype(np.float32)


def test_formats_are_all_of_them():
    assert set(FORMATS) == {"bf16", "fp16", "fp32", "fp8_e4m3", "ds_mla", "v4", "index_key"}
    assert all(name == f.name and hash(f) for name, f in FORMATS.items())
    quantised = {name for name, f in FORMATS.items() if f.quantised}
    assert quantised == {"fp8_e4m3", "ds_mla", "v4", "index_key"}


@pytest.mark.parametrize(
    ("name", "row_bytes", "row", "pages"),
    [  # spec 2.3, 2.4 and 8.2: bytes from page to page by tokens in one
        ("ds_mla", 656, 576, {1: 656, 64: 41984}),
        ("v4", 584, 512, {2: 1728, 4: 2880, 32: 19008, 64: 37440, 128: 74880, 256: 149760}),
        ("index_key", 132, 128, {1: 132, 64: 8448}),
    ],
)
def test_sizes(name, row_bytes, row, pages):
    record = RECORD_FORMATS[name]
    assert (record.row_bytes, record.row) == (row_bytes, row)
    assert {n: record.page_bytes(n) for n in pages} == pages


def test_offsets_are_those_of_the_specification():
    ds_mla, v4, index_key = (RECORD_FORMATS[n] for n in ("ds_mla", "v4", "index_key"))
    places = [ds_mla.offset(f.name, 5, page=64) - 5 * 656 for f in ds_mla.fields]
    assert places == [0, 512, 528]
    places = [v4.offset(f.name, 5, page=64) for f in v4.fields]
    assert places == [5 * 576, 5 * 576 + 448, 64 * 576 + 5 * 8, 64 * 576 + 5 * 8 + 7]
    assert index_key.offset("key", 5, page=64) == 5 * 128
    assert index_key.offset("key_scale", 5, page=64) == 8192 + 5 * 4


@record_of
@pytest.mark.parametrize("page", [1, 2, 3, 64])
def test_fields_tile_a_page(record, page):
    """Every byte of the page's tokens belongs to one field of one token, in both descriptions."""
    owner = np.full(record.page_bytes(page), -1)
    for token in range(page):
        for i, f in enumerate(record.fields):
            begin = record.offset(f.name, token, page=page)
            at = slice(begin, begin + f.end - f.offset)
            assert (owner[at] == -1).all()
            owner[at] = token * len(record.fields) + i
    used = page * record.row_bytes
    assert (owner[:used] >= 0).all() and (owner[used:] == -1).all()
    assert 0 <= record.page_bytes(page) - used < record.page_multiple
    parts = record.split(jnp.asarray(owner % 256, jnp.uint8), page=page)
    for plane, part in zip(record.planes, parts, strict=True):
        for f in plane:
            want = (np.arange(page) * len(record.fields) + record.fields.index(f)) % 256
            assert (np.asarray(part)[:, f.offset : f.end] == want[:, None]).all()


@record_of
def test_round_trip(record, rng):
    """Casts keep what they can; codes are within half a step; what was read is a fixed point."""
    values = draw(rng, record)
    encode = jax.jit(lambda *v: record.encode(*v, scale=SCALE))
    decode = jax.jit(lambda p: record.decode(p, scale=SCALE))
    parts = encode(*values)
    assert [p.shape[-1] for p in parts] == list(record.widths)
    stored, read = record.stored(parts), decode(parts)
    for f, x, y in zip(record.values, map(numpy, values), map(numpy, read), strict=True):
        if not f.scale:
            np.testing.assert_array_equal(y, x.astype(jnp.dtype(f.dtype)).astype(np.float32))
            continue
        s = numpy(stored[f.scale]) if f.scale in stored else np.full((len(x), 1), SCALE)
        s = np.repeat(s, f.count // s.shape[-1], axis=-1)
        near = np.abs(x - y) <= np.maximum(np.abs(x) / 16, s * 2.0**-10) * (1 + 1e-6)
        assert (near | (np.abs(x) > 448 * s)).all()
    again = decode(encode(*read))
    if record.rules and not record.rules[0].power_of_two:
        return  # a scale that is rounded itself
    for y, z in zip(map(numpy, read), map(numpy, again), strict=True):
        np.testing.assert_array_equal(y, z)


@pytest.mark.parametrize("name", ELEMENT_FORMATS)
def test_elements_and_records_are_the_same_bytes(name, rng):
    fmt = ELEMENT_FORMATS[name]
    record, values = fmt.record(16, 4), draw(rng, fmt.record(16, 4))
    (got,) = record.encode(*values, scale=SCALE)
    rows = fmt.encode(jnp.concatenate(values, axis=-1), SCALE)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(rows).view(np.uint8))
    read = jnp.concatenate(record.decode((got,), scale=SCALE), axis=-1)
    np.testing.assert_array_equal(numpy(read), numpy(fmt.decode(rows, SCALE)))


@pytest.mark.parametrize(
    ("record", "amax", "scale"),
    [  # spec 2.3, 2.4, 8.2: worked examples
        ("ds_mla power_of_two", 336.0, 1.0),
        ("ds_mla power_of_two", 0.0, 2.0**-13),
        ("ds_mla plain", 336.0, 0.75),
        ("ds_mla plain", 0.0, 2.0**-126),
        ("v4 floor_of_amax", 0.0, 2.0 ** (105 - 127)),
        ("v4 floor_of_amax", 1.0, 2.0 ** (119 - 127)),
        ("v4 floor_of_amax", 3.0, 2.0 ** (120 - 127)),
        ("v4 floor_of_amax", 6.0, 2.0 ** (121 - 127)),
        ("v4 floor_of_amax", 447.0, 1.0),
        ("v4 floor_of_amax", 448.0, 1.0),
        ("v4 floor_of_amax", 450.0, 2.0),
        ("v4 floor_of_quotient", 0.0, 2.0 ** (114 - 127)),
        ("index_key power_of_two", 0.0, 2.0**-22),
        ("index_key power_of_two", 3.0, 2.0**-7),
        ("index_key power_of_two", 448.0, 1.0),
        ("index_key plain", 3.0, np.float32(3) / np.float32(448)),
    ],
)
def test_scales_of_the_specification(record, amax, scale):
    fmt = RECORDS[record]
    values = [np.zeros((1, f.count), np.float32) for f in fmt.values]
    values[0][0, 3] = -amax
    stored = fmt.stored(fmt.encode(*map(jnp.asarray, values)))
    codes = fmt.values[0]
    assert numpy(stored[codes.scale])[0, 0] == np.float32(scale)
    want = np.float32(-amax / scale).astype(ml_dtypes.float8_e4m3fn)
    assert np.asarray(stored[codes.name])[0, 3].view(np.uint8) == want.view(np.uint8)


def test_codes_of_the_specification():
    """2.4: 1 and 0.30078125 beside it are 256 and 80 of 2^-8."""
    k = np.zeros((1, 448), np.float32)
    k[0, :2] = 1, 0.30078125
    data, _ = RECORD_FORMATS["v4"].encode(jnp.asarray(k), jnp.zeros((1, 64)))
    assert np.asarray(data)[0, :2].tolist() == [0x78, 0x6A]


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
def test_a_nan_stays_and_an_infinity_poisons_its_group(record, rng):
    codes, *rest = record.values
    x, *others = draw(rng, record)
    group = codes.count // record.field(codes.scale).count
    with_nan, parts = (
        record.encode(x.at[4, 1].set(v), *others) for v in (jnp.nan, jnp.zeros((), x.dtype))
    )
    got, want = numpy(record.decode(with_nan)[0]), numpy(record.decode(parts)[0])
    assert np.isnan(got[4, 1])
    got[4, 1] = want[4, 1]
    np.testing.assert_array_equal(got, want)
    for a, b in zip(with_nan, parts, strict=True):
        assert (np.asarray(a) != np.asarray(b)).sum() == (a is with_nan[0])
    read = record.decode(record.encode(x.at[4, 1].set(-jnp.inf), *others))
    lost = np.isnan(numpy(read[0]))
    assert lost[4, :group].all() and lost.sum() == group
    assert not any(np.isnan(numpy(y)).any() for y in read[1 : 1 + len(rest)])


def test_decode_rounds_once_and_rotary_bits_stay(rng):
    ds_mla = RECORD_FORMATS["ds_mla"].with_rule("plain")
    bits = rng.integers(0, 2**16, size=(4, 64)).astype(np.uint16).view(ml_dtypes.bfloat16)
    latent = jnp.asarray(rng.normal(size=(4, 512)), jnp.bfloat16)
    parts = ds_mla.encode(latent, jnp.asarray(bits))
    got, rope = ds_mla.decode(parts, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(rope).view(np.uint16), bits.view(np.uint16))
    exact = ds_mla.decode(parts)[0].astype(jnp.bfloat16)
    np.testing.assert_array_equal(numpy(got), numpy(exact))


def test_a_rule_of_another_writer_changes_no_reader():
    plain = RECORD_FORMATS["ds_mla"].with_rule("plain")
    assert plain.planes == RECORD_FORMATS["ds_mla"].planes
    assert plain.with_rule("power_of_two") == RECORD_FORMATS["ds_mla"]


RULE = ScaleRule(name="r", power_of_two=True, floor=1e-4, floor_of="amax")
CODES, SCALES = Field("x", 0, "float8_e4m3fn", 8, scale="s"), Field("s", 8, "float32", 2)


@pytest.mark.parametrize(
    ("planes", "rules", "text"),
    [
        (
            ((Field("x", 0, "float32", 2), Field("y", 4, "float32", 1)),),
            (),
            "[0, 4]; allowed: [0, 8]",
        ),
        (((Field("x", 1, "uint8", 2),),), (), "given [1]; allowed: [0]"),
        (((Field("x", 0, "uint8", 2), Field("x", 2, "uint8", 1)),), (), "distinct names"),
        (((CODES,),), (RULE,), "scale of x: given 's'"),
        (((CODES, Field("s", 8, "float32", 3)),), (RULE,), "divides that of the codes"),
        (((CODES, SCALES),), (), "given if and only if scales are"),
        (((Field("x", 0, "uint8", 2),),), (RULE,), "given if and only if scales are"),
    ],
)
def test_records_that_do_not_add_up_are_refused(planes, rules, text):
    with pytest.raises(MetadataError) as refusal:
        RecordFormat(name="toy", planes=planes, rules=rules)
    assert text in str(refusal.value)


def test_a_record_is_its_data():
    """A record of one's own: no other place says anything about it."""
    toy = RecordFormat(name="toy", planes=((CODES, SCALES),), rules=(RULE,), page_multiple=64)
    x = jnp.asarray([[448.0, 1, 2, 3, 0, 0, 0, 14]])
    (raw,) = toy.encode(x)
    assert raw.shape == (1, 16) and toy.page_bytes(3) == 64
    assert numpy(toy.stored((raw,))["s"]).tolist() == [[1.0, 2.0**-5]]
    np.testing.assert_array_equal(numpy(toy.decode((raw,))[0]), numpy(x))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda f: f.with_rule("x"), MetadataError, "floor_of_amax, floor_of_quotient"),
        (lambda f: f.field("x"), MetadataError, "k_nope, k_rope, k_scale, zero"),
        (
            lambda f: f.encode(jnp.zeros((2, 512))),
            ArgumentError,
            "given (512,); allowed: (448, 64)",
        ),
        (
            lambda f: f.split(jnp.zeros((2, 2336), jnp.uint8), page=4),
            ArgumentError,
            "allowed: 2880",
        ),
    ],
)
def test_refusals_of_a_record(call, error, text):
    with pytest.raises(error) as refusal:
        call(RECORD_FORMATS["v4"])
    assert text in str(refusal.value)
