"""What `duetto serve` refuses of its own flags, before anything is read."""

import pytest

from duetto.serve.options.server import ServerOptions

REFUSED = [
    ({"host": ""}, "host '' is not allowed"),
    ({"port": -1}, "port -1 is not allowed: 0 to 65535"),
    ({"port": 65536}, "port 65536 is not allowed"),
    ({"served_model_name": ["demo", ""]}, "served_model_name '' is not allowed"),
    ({"max_queued": 0}, "max_queued 0 is not allowed: more than 0"),
    ({"queue_timeout": float("nan")}, "queue_timeout nan is not allowed"),
    ({"allowed_origins": ["https://a.example/"]}, "allowed_origins 'https://a.example/' is not allowed"),
    ({"allowed_origins": ["a.example"]}, "allowed_origins 'a.example' is not allowed"),
    ({"allowed_origins": ['["*"]']}, "scheme://host"),
    ({"otlp_traces_endpoint": "collector:4318"}, "otlp_traces_endpoint 'collector:4318' is not allowed"),
    ({"ssl_keyfile": "key"}, "ssl_keyfile is not allowed without ssl_certfile"),
]


@pytest.mark.parametrize("fields, message", REFUSED, ids=str)
def test_refused(fields, message):
    with pytest.raises(ValueError) as error:
        ServerOptions(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize("origin", ["*", "null", "http://localhost:3000", "https://a.example", "app://x"])
def test_origins(origin):
    assert ServerOptions(allowed_origins=[origin]).allowed_origins == [origin]
