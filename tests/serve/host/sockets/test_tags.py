"""Messages between engines keep their tags, so that engines of two versions understand each other."""

import msgspec
import pytest

from duetto.serve.host.sockets import handshake, secret
from duetto.serve.kv.disagg import messages as prefill
from duetto.serve.runtime.multihost import messages as group


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (secret.Challenge(b"n"), b"\x82\xa4type\xa9Challenge\xa5nonce\xc4\x01n"),
        (secret.ChallengeResponse(b"n", b"p"), b"\x83\xa4type\xa6Answer\xa5nonce\xc4\x01n\xa5proof\xc4\x01p"),
        (secret.Proof(b"p"), b"\x82\xa4type\xa5Proof\xa5proof\xc4\x01p"),
        (secret.Denied(), b"\x81\xa4type\xa6Denied"),
        (
            handshake.Handshake({"a": "b"}, 1),
            b"\x83\xa4type\xa5Hello\xa5facts\x81\xa1a\xa1b\xa4rank\x01",
        ),
        (handshake.HandshakeRejected("no"), b"\x82\xa4type\xa7Refused\xa3why\xa2no"),
        (group.End(), b"\x81\xa4type\xa3End"),
    ],
)
def test_a_message_has_the_same_bytes(message, content):
    assert msgspec.msgpack.encode(message) == content


@pytest.mark.parametrize(
    ("union", "tags"),
    [
        (prefill.PrefillMessage, "Hello Welcome Refused Compute Computed Leave Fetch Page"),
        (group.GroupMessage, "Hello Welcome Refused Beat Order End"),
    ],
)
def test_a_record_has_the_same_tag(union, tags):
    assert [record.__struct_config__.tag for record in union.__args__] == tags.split()
