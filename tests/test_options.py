"""The table of caption options: held to the contract of the wire, to the command line and to the gateway's options."""

import copy
import dataclasses
import inspect
import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import numpy as np
import pytest

from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.plan import make_plan
from slipstream.cli.caption import caption_options
from slipstream.errors import InvalidRequest
from slipstream.option_specs import UNSET, OptionSpec
from slipstream.options import OF_FILMS, OPTIONS, CaptionOptions
from slipstream.rpc.codec import options_message, read_options
from slipstream.rpc.v1 import archive_pb2, gateway_pb2
from slipstream.sampling.params import STRUCTURES, SamplingParams

CONFIG = GatewayConfig(listen="", target="t:1", draft="d:1")
ADDRESSING = {"path", "request_id"}
"""What the wire's `CaptionOptions` has besides options."""
KINDS: dict[type, set[int]] = {
    str: {gateway_pb2.CaptionOptions.DESCRIPTOR.fields_by_name["path"].TYPE_STRING},
    float: {gateway_pb2.CaptionOptions.DESCRIPTOR.fields_by_name["path"].TYPE_DOUBLE},
    bool: {gateway_pb2.CaptionOptions.DESCRIPTOR.fields_by_name["path"].TYPE_BOOL},
    int: {
        gateway_pb2.CaptionOptions.DESCRIPTOR.fields_by_name["path"].TYPE_UINT32,
        gateway_pb2.CaptionOptions.DESCRIPTOR.fields_by_name["path"].TYPE_UINT64,
    },
}


def sample_of(spec: OptionSpec) -> Any:
    """Some value that the option may have."""
    if spec.repeated:
        return ("a", "b")
    if spec.choices:
        return spec.choices[-1]
    if spec.name == "segments":
        return "fixed:10s"
    if spec.name == "json_schema":
        return '{"type": "object"}'
    return {str: "text", int: 3, float: 0.25, bool: True}[spec.kind]


ALL = {spec.name: sample_of(spec) for spec in OPTIONS}
by_name = pytest.mark.parametrize("spec", OPTIONS, ids=lambda spec: spec.name)


def test_the_table_and_the_contract_have_the_same_options() -> None:
    assert {spec.name for spec in OPTIONS} == set(gateway_pb2.CaptionOptions.DESCRIPTOR.fields_by_name) - ADDRESSING


@by_name
def test_an_option_is_of_the_same_kind_on_the_wire(spec: OptionSpec) -> None:
    field = gateway_pb2.CaptionOptions.DESCRIPTOR.fields_by_name[spec.name]
    assert field.type in KINDS[spec.kind]
    assert spec.repeated == field.is_repeated
    assert field.has_presence or spec.repeated or spec.fallback is False, "what was left out must be seen to be"


def test_type_checkers_let_lists_be_given_where_lists_are_taken() -> None:
    kinds = get_type_hints(CaptionOptions)
    assert {name for name, kind in kinds.items() if kind == Sequence[str]} == {
        spec.name for spec in OPTIONS if spec.repeated
    }
    assert CaptionOptions(stop=["."]).stop == (".",)


@by_name
def test_an_option_survives_the_wire_alone(spec: OptionSpec) -> None:
    options = CaptionOptions(**{spec.name: ALL[spec.name]})
    message = gateway_pb2.CaptionOptions.FromString(options_message(options).SerializeToString())
    assert read_options(message) == options
    assert list(options.given()) == [spec.name]


@pytest.mark.parametrize("left_out", [STRUCTURES, (*STRUCTURES[1:], "min_new_tokens")])
def test_all_options_survive_the_wire_and_json(left_out: Sequence[str]) -> None:
    """But for those that do not go together."""
    options = CaptionOptions(**{name: value for name, value in ALL.items() if name not in left_out})
    assert read_options(options_message(options, path="a", request_id="b")) == options
    assert CaptionOptions.from_mapping({**options.given(), "stop": list(options.stop)}) == options


def test_a_schema_may_be_the_object_that_it_is() -> None:
    schema = {"type": "object", "properties": {"caf\u00e9": {}}}
    given = CaptionOptions.from_mapping({"json_schema": schema})
    assert given == CaptionOptions(json_schema=schema) == CaptionOptions(json_schema=given.json_schema)
    assert isinstance(given.json_schema, str)
    assert json.loads(given.json_schema) == schema and "caf\u00e9" in given.json_schema
    with pytest.raises(InvalidRequest, match="prompt must be text"):
        CaptionOptions.from_mapping({"prompt": schema})
    with pytest.raises(InvalidRequest, match="json_schema is no JSON: Object of type set"):
        CaptionOptions(json_schema={"enum": {1}})


def test_numbers_of_numpy_are_numbers() -> None:
    numbers = {"num_frames": np.int64(8), "seed": np.uint32(7), "alpha": np.float32(0.5), "temperature": np.float64(1)}
    given = CaptionOptions.from_mapping(numbers)
    assert given == CaptionOptions(num_frames=8, seed=7, alpha=0.5, temperature=1.0)
    assert CaptionOptions(gate=np.bool_(False)).given() == {"gate": False}
    assert json.loads(json.dumps(given.given())) == given.given()
    with pytest.raises(InvalidRequest, match="must be a whole number"):
        CaptionOptions.from_mapping({"num_frames": np.float32(8.5)})


def test_a_structure_takes_the_place_of_any_other() -> None:
    fallbacks = CaptionOptions(json_schema="", regex="", choice=(), prompt="a")
    assert CaptionOptions(regex="a").over(fallbacks).given() == {**fallbacks.given(), "regex": "a"}
    assert CaptionOptions(regex="a").over(CaptionOptions(json_schema={}, seed=1)) == CaptionOptions(regex="a", seed=1)
    assert CaptionOptions(choice=()).over(CaptionOptions(regex="a", seed=1)) == CaptionOptions(choice=(), seed=1)
    assert CaptionOptions(seed=1).over(CaptionOptions(choice=("a",))) == CaptionOptions(choice=("a",), seed=1)


def test_what_is_not_given_stays_out() -> None:
    assert CaptionOptions().given() == {}
    assert not options_message(CaptionOptions()).ListFields()
    assert read_options(gateway_pb2.CaptionOptions()) == CaptionOptions()


def test_every_option_has_a_flag_or_none_on_purpose() -> None:
    flags = set(inspect.signature(caption_options).parameters)
    assert flags == {spec.name for spec in OPTIONS if spec.flag}
    without = {"prompt", "trace", "want_kept", "logprobs", "top_logprobs"}
    assert {spec.name for spec in OPTIONS if not spec.flag} == without, "--prompt is `prompts`, or their one"


def test_every_option_has_a_value_in_a_plan_but_those_that_may_lack_one() -> None:
    plan = make_plan(CaptionOptions(), CONFIG)
    may_lack = {"fps", "gamma", "lossy", "lossy_keep", *OF_FILMS, "system", "tolerance", "tolerance_rule", "turns"}
    assert {spec.name for spec in OPTIONS} - set(plan.options.given()) == may_lack
    assert plan.sampling == SamplingParams()


@by_name
def test_the_gateways_part_names_fields_of_its_configuration(spec: OptionSpec) -> None:
    names = {field.name for field in dataclasses.fields(GatewayConfig)}
    assert {spec.gateway_default, spec.gateway_limit} - {""} <= names
    assert spec.fallback is UNSET or not spec.gateway_default


@by_name
def test_a_value_of_another_type_is_refused_by_name(spec: OptionSpec) -> None:
    wrong: Any = 7 if spec.kind in (str, bool) else "7"
    with pytest.raises(InvalidRequest, match=spec.name):
        CaptionOptions(**{spec.name: wrong})


@pytest.mark.parametrize("spec", [spec for spec in OPTIONS if spec.kind in (int, float)], ids=lambda spec: spec.name)
def test_a_number_that_no_float_can_hold_is_refused_by_name(spec: OptionSpec) -> None:
    with pytest.raises(InvalidRequest, match=spec.name):
        CaptionOptions(**{spec.name: 10**400})


@pytest.mark.parametrize("spec", [spec for spec in OPTIONS if spec.kind is str and not spec.choices])
def test_text_that_is_no_unicode_is_refused_by_name(spec: OptionSpec) -> None:
    broken: Any = ("sound", "\ud83d") if spec.repeated else "\ud83d"
    with pytest.raises(InvalidRequest, match=f"^{spec.name} has a text that is no valid Unicode"):
        CaptionOptions(**{spec.name: broken})


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(InvalidRequest, match="'colour' is no option; known: prompt"):
        CaptionOptions.from_mapping({"colour": 1})


def test_what_a_summary_and_a_receipt_repeat_are_options() -> None:
    echoed = {"method", "pruner", "alpha", "policy", "max_window", "lossy", "lossy_keep"}
    assert echoed <= set(gateway_pb2.Summary.DESCRIPTOR.fields_by_name) & {spec.name for spec in OPTIONS}
    options = archive_pb2.Receipt.DESCRIPTOR.fields_by_name["options"].message_type
    assert options == gateway_pb2.CaptionOptions.DESCRIPTOR


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda options: pickle.loads(pickle.dumps(options))])  # noqa: S301
def test_options_are_copied_and_sent_to_other_processes(copied: Callable[[CaptionOptions], CaptionOptions]) -> None:
    options = CaptionOptions("What happens?", stop=(".",))
    assert copied(options) == options and copied(options).given() == options.given()
