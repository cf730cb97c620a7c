"""Signatures of webhooks."""

from __future__ import annotations

import base64
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events.signature import SecretError, SignatureError, Verifier, new_secret, secret_key, sign, sign_plain

# The test vector of the Standard Webhooks reference libraries.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
NOW = 1614265330
BODY = b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
HEADERS = {"webhook-id": ID, "webhook-timestamp": str(NOW), "webhook-signature": SIGNATURE}
PLAIN = "a plain secret of a sender"


def verify(headers: dict[str, str], body: bytes = BODY, secrets: tuple[str, ...] = (SECRET,), now: float = NOW):
    verifier = Verifier(headers, secrets, now, 300)
    verifier.update(body)
    return verifier.finish()


def test_the_published_vector_is_made_and_verified():
    assert sign(SECRET, ID, NOW, BODY) == HEADERS
    signed = verify(HEADERS)
    assert (signed.scheme, signed.webhook_id) == ("standard", ID)


def test_any_of_several_secrets_and_signatures_may_match():
    old, new = new_secret(), new_secret()
    both = sign(old, ID, NOW, BODY)["webhook-signature"] + " " + sign(new, ID, NOW, BODY)["webhook-signature"]
    assert verify({**HEADERS, "webhook-signature": both}, secrets=(new,)).webhook_id == ID
    assert verify({**HEADERS, "webhook-signature": both}, secrets=(SECRET, old)).webhook_id == ID
    assert verify({**HEADERS, "webhook-signature": "v1a,aGk= " + SIGNATURE}).webhook_id == ID


@pytest.mark.parametrize("name", ["x-hub-signature-256", "x-signature"])
def test_plain_hex_schemes_sign_the_body_alone(name: str):
    signed = verify({name: sign_plain(PLAIN, BODY), "webhook-id": "unsigned"}, secrets=(PLAIN,))
    assert signed.webhook_id is None
    assert verify({name: "sha256=" + sign_plain(PLAIN, BODY)[7:].upper()}, secrets=(PLAIN,)) == signed
    with pytest.raises(SignatureError, match="no signature matches"):
        verify({name: sign_plain(PLAIN, BODY + b" ")}, secrets=(PLAIN,))


def test_githubs_documented_example_verifies():
    body, secret = b"Hello, World!", "It's a Secret to Everybody"
    digest = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    assert sign_plain(secret, body) == digest
    assert verify({"x-hub-signature-256": digest}, body, (secret,)).scheme == "hub"


def test_a_failed_strong_scheme_is_not_made_good_by_a_weaker_one():
    headers = {**HEADERS, "webhook-signature": sign(new_secret(), ID, NOW, BODY)["webhook-signature"]}
    with pytest.raises(SignatureError):
        verify({**headers, "x-signature": sign_plain(SECRET, BODY)})
    with pytest.raises(SignatureError):
        verify({"webhook-timestamp": str(NOW), "x-signature": sign_plain(SECRET, BODY)})


@pytest.mark.parametrize(("apart", "good"), [(-301, False), (-300, True), (0, True), (300, True), (301, False)])
def test_the_clock_may_differ_by_five_minutes_both_ways(apart: int, good: bool):
    if good:
        verify(HEADERS, now=NOW + apart)
    else:
        with pytest.raises(SignatureError, match="webhook-timestamp 1614265330 is 301 s from now"):
            verify(HEADERS, now=NOW + apart)


@pytest.mark.parametrize(
    "change",
    [
        {"webhook-id": ""},
        {"webhook-id": "a.b"},
        {"webhook-id": "a b"},
        {"webhook-id": "ä"},
        {"webhook-id": "x" * 257},
        {"webhook-timestamp": ""},
        {"webhook-timestamp": "-1614265330"},
        {"webhook-timestamp": " 1614265330"},
        {"webhook-timestamp": "1614265330.0"},
        {"webhook-timestamp": "1_614_265_330"},
        {"webhook-timestamp": "١٦١٤٢٦٥٣٣٠"},
        {"webhook-timestamp": "9" * 400},
        {"webhook-timestamp": "nan"},
        {"webhook-signature": ""},
        {"webhook-signature": "v1"},
        {"webhook-signature": "v1,"},
        {"webhook-signature": SIGNATURE[3:]},
        {"webhook-signature": SIGNATURE + " "},
        {"webhook-signature": SIGNATURE + "," + SIGNATURE},
        {"webhook-signature": SIGNATURE[:-4]},
        {"webhook-signature": "v1,ä"},
        {"webhook-signature": "v1,!!!!"},
        {"webhook-signature": "v1,aGk="},
        {"webhook-signature": "v1a," + SIGNATURE[3:]},
        {"webhook-signature": "v2," + SIGNATURE[3:]},
        {"webhook-signature": " ".join([SIGNATURE] * 17)},
    ],
)
def test_every_malformed_header_is_a_signature_error(change: dict[str, str]):
    with pytest.raises(SignatureError):
        verify({**HEADERS, **change})


@pytest.mark.parametrize("missing", list(HEADERS))
def test_a_missing_header_is_a_signature_error(missing: str):
    with pytest.raises(SignatureError):
        verify({name: value for name, value in HEADERS.items() if name != missing})


@pytest.mark.parametrize(
    "value", ["", "sha256=", "sha1=" + "0" * 40, "sha256=" + "g" * 64, "0" * 64, "sha256=" + "٠" * 64]
)
def test_a_malformed_hex_signature_is_a_signature_error(value: str):
    with pytest.raises(SignatureError):
        verify({"x-signature": value}, secrets=(PLAIN,))


def test_no_header_and_no_secret_are_signature_errors():
    with pytest.raises(SignatureError, match="no signature"):
        verify({})
    with pytest.raises(SignatureError, match="no secret"):
        verify(HEADERS, secrets=())


@pytest.mark.parametrize(
    "secret", ["", "short", "whsec_", "whsec_!!!", "whsec_aGk=", "whsec_" + base64.b64encode(bytes(65)).decode()]
)
def test_a_secret_that_cannot_be_used_says_so_and_not_itself(secret: str):
    with pytest.raises(SecretError) as caught:
        secret_key(secret)
    assert secret in ("", "whsec_") or secret not in str(caught.value)


def test_padding_of_a_base64_secret_may_be_left_out():
    key = bytes(range(32))
    assert secret_key("whsec_" + base64.b64encode(key).decode().rstrip("=")) == key


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6), st.integers(0, 10**12 - 1))
def test_where_the_body_is_cut_does_not_show(body: bytes, cuts: list[int], stamp: int):
    verifier = Verifier(sign(SECRET, ID, stamp, body), [SECRET], stamp, 0)
    places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    for start, end in pairwise(places):
        verifier.update(body[start:end])
    assert verifier.finish().webhook_id == ID


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*HEADERS, "x-signature", "x-hub-signature-256"]), st.text(max_size=60)))
def test_no_made_up_header_passes_or_crashes(headers: dict[str, str]):
    with pytest.raises(SignatureError):
        verify(headers)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=60), st.integers(min_value=0), st.integers(0, 7))
def test_one_flipped_bit_of_the_body_fails(body: bytes, place: int, bit: int):
    headers = sign(PLAIN, ID, NOW, body)
    flipped = bytearray(body)
    flipped[place % len(body)] ^= 1 << bit
    with pytest.raises(SignatureError):
        verify(headers, bytes(flipped), (PLAIN,))
