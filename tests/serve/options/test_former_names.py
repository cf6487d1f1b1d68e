"""Options that were renamed are accepted under their former names, with a note."""

import argparse
import json

import pytest

from duetto import EngineArgs
from duetto.compat.argparse_utils import FlexibleArgumentParser
from duetto.serve.jobs.batch.fingerprint import job_fingerprint
from duetto.serve.jobs.verify.claims import Start
from duetto.serve.options.engine import EngineOptions
from duetto.serve.options.flags import add_field_flags, read_given_fields
from duetto.serve.options.keywords import FORMER_NAMES, options_from_keywords
from duetto.serve.options.router import RouterOptions
from duetto.serve.options.server import ServerOptions

ENGINE = {
    "prompt_hold": ("max_prefill_delay", 1.5),
    "kv_patience": ("kv_transfer_timeout", 3.0),
    "serve_while_compiling": ("background_compilation", False),
    "fixed_products": ("batch_invariant_matmul", True),
}
FLAGS = [
    *((EngineOptions, former, *now) for former, now in ENGINE.items()),
    (ServerOptions, "max_unread", "max_stream_backlog", 7),
    (ServerOptions, "max_wait", "queue_timeout", 2.5),
    (ServerOptions, "ping", "keepalive_interval", 1.0),
    (RouterOptions, "max_absence", "replica_timeout", 4.0),
    (RouterOptions, "attempts", "max_attempts", 2),
]


def test_the_engines_former_names_are_these():
    assert {former: name for former, (name, _) in ENGINE.items()} == FORMER_NAMES


@pytest.mark.parametrize("former", ENGINE)
def test_a_keyword(former):
    name, value = ENGINE[former]
    with pytest.warns(FutureWarning, match=f"{former} is now {name}"):
        assert options_from_keywords({former: value}) == EngineOptions(**{name: value})
    with pytest.warns(FutureWarning, match=f"{former} is now {name}"):
        assert getattr(EngineArgs(**{former: value}), name) == value
    assert options_from_keywords({former: None}) == EngineOptions()
    with pytest.raises(TypeError, match="given under two names"):
        options_from_keywords({name: value, former: value})


@pytest.mark.parametrize("record, former, name, value", FLAGS)
def test_a_flag(record, former, name, value, capsys):
    parser = argparse.ArgumentParser("duetto")
    add_field_flags(parser, record, "options")
    no, flag = "no-" if value is False else "", former.replace("_", "-")
    args = parser.parse_args([f"--{no}{flag}", *([] if isinstance(value, bool) else [str(value)])])
    assert read_given_fields(record, args) == {name: value}
    now = name.replace("_", "-")
    assert f"duetto: --{no}{flag} is now --{no}{now}" in capsys.readouterr().err
    assert f"--{now}" in parser.format_help() and f"--{flag}" not in parser.format_help()


def test_a_file_of_options(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text(json.dumps({"serve_while_compiling": False, "kv-patience": 3, "fixed_products": True}))
    args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--config", str(file)])
    found = args.background_compilation, args.kv_transfer_timeout, args.batch_invariant_matmul
    assert found == (False, 3.0, True)


def test_older_jobs_and_logs_are_still_read(tmp_path):
    assert job_fingerprint(tmp_path, None, "auto", EngineOptions())["--fixed-products"] == "False"
    start = Start(None, {"fixed_products": True, "page_size": 16}, {}, None, [], None)
    assert start.options == {"batch_invariant_matmul": True, "page_size": 16}


def test_engine_args_take_one_name_of_an_option():
    args = EngineArgs(batch_invariant_matmul=True, fixed_products=None)
    assert args.batch_invariant_matmul is True
    with pytest.raises(TypeError, match="kv_transfer_timeout is given under two names"):
        EngineArgs(kv_transfer_timeout=5.0, kv_patience=3.0)
    with pytest.warns(FutureWarning, match="kv_patience"):
        assert (
            EngineArgs.from_cli_args(argparse.Namespace(model="m", kv_patience=3.0)).kv_transfer_timeout
            == 3.0
        )


def test_a_flag_of_several_values_takes_them_after_one_flag():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(["--logits-processors", "a:f", "b:g"]))
    assert options_from_keywords({"logits_processors": args.logits_processors}).logits_processors == [
        "a:f",
        "b:g",
    ]
